"""Connections that nothing goes over: uvicorn would keep them for ever, until no descriptor is left for others."""

from asyncio import TimerHandle, Transport

from uvicorn import config
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # from the beginning, or from the end of the answer before, until the head of a request is whole
READ_S = 60.0  # for a reader who takes nothing; what waits for it meanwhile is bounded


class Punctual(H11Protocol):
    """Closes a connection whose next request does not come to the end of its head, or whose answer nobody reads."""

    _late: TimerHandle | None = None
    _unread: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def handle_events(self) -> None:
        super().handle_events()
        if self._late and self.cycle and not self.cycle.response_complete:
            self._late.cancel()

    def on_response_complete(self) -> None:
        self._expect()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._late:
            self._late.cancel()
        self._late = self.loop.call_later(HEAD_S, self.transport.close)


def adapt() -> None:
    """Once in a process: Gradio lets uvicorn choose its protocol, by this name."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{Punctual.__name__}"
