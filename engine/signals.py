"""One change, many waiters: threads and asyncio tasks that wait for the same object."""

import asyncio
import threading
from collections.abc import Callable


class Signal:
    """Counts changes; a waiter says which count it has seen and is woken by the next one."""

    def __init__(self) -> None:
        self.version = 0
        self._condition = threading.Condition()
        self._tasks: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def notify(self) -> None:
        with self._condition:
            self.version += 1
            self._condition.notify_all()
            for loop, event in self._tasks:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    def wait(self, seen: int, timeout: float | None = None) -> int:
        """Block until the version differs from `seen`, at most `timeout` seconds; the version then."""
        with self._condition:
            self._condition.wait_for(lambda: self.version != seen, timeout)
            return self.version

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until `condition()` holds after some change, at most `timeout` seconds; whether it does."""
        with self._condition:
            return self._condition.wait_for(condition, timeout)

    async def wait_async(self, seen: int, timeout: float | None = None) -> int:
        """The same for a task of a running event loop."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._condition:
            if self.version != seen:
                return self.version
            self._tasks.add(waiter)
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            pass
        finally:
            with self._condition:
                self._tasks.discard(waiter)
        return self.version
