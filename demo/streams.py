"""How often a stream may speak, how many a visitor may have, and what happens when its reader leaves."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import gradio as gr

MESSAGES_PER_SECOND = 60
FASTEST, SLOWEST = 0.125, 1.0


class Source(Protocol):
    """What a stream follows: a generation or a race of the engine."""

    @property
    def done(self) -> bool: ...

    async def changed(self, timeout: float) -> bool: ...

    def cancel(self) -> None: ...


class Stream:
    """Follows one generation or race at the pace that its share of the message budget allows."""

    def __init__(self, streams: "Streams", source: Source):
        self._streams = streams
        self._source = source
        self._due = 0.0

    async def next(self) -> bool:
        """Wait until there is something new to show, at most a second; False once the source is done."""
        if self._due and not self._source.done:
            await self._source.changed(timeout=SLOWEST - self._streams.interval)
            await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + self._streams.interval
        return not self._source.done


class Streams:
    """All streams of all pages: they share one budget of messages, and each address has a limit."""

    def __init__(self, max_per_address: int):
        self._max_per_address = max_per_address
        self._addresses: Counter[str] = Counter()
        self._following = 0

    @property
    def interval(self) -> float:
        """Seconds between two messages of one stream: fewer messages each when there are many streams."""
        return min(SLOWEST, max(FASTEST, self._following / MESSAGES_PER_SECOND))

    @contextmanager
    def follow(self, source: Source) -> Iterator[Stream]:
        """A stream over `source`, which is cancelled when the reader leaves early."""
        self._following += 1
        try:
            yield Stream(self, source)
        finally:
            self._following -= 1
            source.cancel()

    @contextmanager
    def place(self, request: gr.Request) -> Iterator[None]:
        """One of the places of the visitor's address; `ValueError` when all are taken."""
        address = request.client.host if request.client else "unknown"
        if self._addresses[address] >= self._max_per_address:
            raise ValueError(f"Your network address already has {self._max_per_address} requests here; let one finish.")
        self._addresses[address] += 1
        try:
            yield
        finally:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
