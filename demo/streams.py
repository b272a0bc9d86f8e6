"""How often a stream may speak, how many a visitor may have, and what happens when its reader stalls or leaves."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import gradio as gr

from demo.refusals import TooMany
from demo.settings import PageSettings

MESSAGES_PER_SECOND = 60
FASTEST, SLOWEST = 0.125, 1.0
PATIENCE_S = 30.0  # with a reader who does not read
WHO = ("You already have", "Your network address already has")


class Source(Protocol):
    """What a stream follows: a generation or a race of the engine."""

    @property
    def done(self) -> bool: ...

    async def changed(self, timeout: float) -> bool: ...

    def cancel(self) -> None: ...


class Stream:
    """Follows one generation or race at the pace that its share of the message budget allows."""

    def __init__(self, streams: "Streams", source: Source, session: str | None):
        self._streams = streams
        self._source = source
        self._session = session
        self._due = 0.0

    async def next(self) -> bool:
        """Wait until there is something new to show, at most a second; False once the source is done."""
        if self._due and not self._source.done:
            await self._source.changed(timeout=SLOWEST - self._streams.interval)
            await asyncio.sleep(max(0.0, self._due - time.monotonic()))
            await self._until_read()
        self._due = time.monotonic() + self._streams.interval
        return not self._source.done

    async def _until_read(self) -> None:
        """Say nothing to a reader who is behind: what waits for them stays small. One who stays behind is given up."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._source.done and self._streams.reader_is_behind(self._session):
            if time.monotonic() > deadline:
                self._source.cancel()
            await self._source.changed(timeout=SLOWEST)
            await asyncio.sleep(self._streams.interval)


class Streams:
    """All streams of all pages: they share one budget of messages, and each visitor and each address has a limit.

    `reader_is_behind` says of a session whether what it was sent is still unread.
    """

    def __init__(self, settings: PageSettings, reader_is_behind: Callable[[str | None], bool]):
        self.reader_is_behind = reader_is_behind
        self._most = {
            "requests": (settings.max_per_visitor, settings.max_per_address),
            "races": (settings.max_races_per_visitor, settings.max_races_per_address),
        }
        self._taken: Counter[tuple[str, str]] = Counter()
        self._following = 0

    @property
    def interval(self) -> float:
        """Seconds between two messages of one stream: fewer messages each when there are many streams."""
        return min(SLOWEST, max(FASTEST, self._following / MESSAGES_PER_SECOND))

    @contextmanager
    def follow(self, source: Source, session: str | None) -> Iterator[Stream]:
        """A stream over `source` to that session, which is cancelled when the reader leaves early."""
        self._following += 1
        try:
            yield Stream(self, source, session)
        finally:
            self._following -= 1
            source.cancel()

    @contextmanager
    def place(self, request: gr.Request, kind: Literal["requests", "races"] = "requests") -> Iterator[None]:
        """One of the visitor's places, and one of its address; `ValueError` when all of either are taken.

        A call without a session is a visitor of its own, whom only the address holds back.
        """
        visitor, address = (kind, f"visitor {request.session_hash}"), (kind, address_of(request))
        for owner, most, who in zip((visitor, address), self._most[kind], WHO, strict=True):
            if self._taken[owner] >= most:
                raise TooMany(f"{who} {most} {kind if most > 1 else kind[:-1]} here; let one finish.")
        self._taken.update((visitor, address))
        try:
            yield
        finally:
            self._taken.subtract((visitor, address))
            for owner in (visitor, address):
                if not self._taken[owner]:
                    del self._taken[owner]


def address_of(request: gr.Request) -> str:
    """Where a request came from, as far as the web server knows: behind a proxy, what it was told."""
    return request.client.host if request.client else "unknown"
