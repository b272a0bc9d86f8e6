"""The API of ZeroGPU as `spaces` asks it: its refusals, and where its own way would leave a visitor hanging or paying.

`spaces` takes whoever's event called it for the visitor, who may have pressed Stop since; and it lets a thread that
others wait for die of a release that fails.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import gradio as gr
from spaces.zero import client

from demo.quota import seconds_left
from engine.lease import Lease

DIED = "ZeroGPU worker error"
TOO_LONG = "ZeroGPU illegal duration"
QUOTA = "ZeroGPU quota exceeded"


class Asker:
    """What `spaces` looks at while it queues: the visitor in whose name it does, gone once nothing is wanted there."""

    def __init__(self, lease: Lease):
        self._lease = lease
        self.left = False

    @property
    def alive(self) -> bool:
        self.left = self.left or self._lease.payer_left
        return not self.left


asker: ContextVar[Asker | None] = ContextVar("asker", default=None)


def adapt() -> None:
    """Once in a process: `spaces` finds both by these names at each call."""
    vars(client)["get_event"] = lambda: asker.get(None)
    vars(client)["release"] = _logged(client.release)


def sentence(error: gr.Error) -> str:
    """The message of `spaces`, with its links as text, under its title."""
    return f"{error.title}: {error.message!s}"


def quota_exceeded(error: gr.Error) -> bool:
    """Whether a quota is the reason; no GPU for somebody unknown comes under the same title."""
    return error.title == QUOTA and client.NO_GPU_MESSAGE_REGULAR not in str(error.message)


def less(error: gr.Error, least_s: int, factor: float) -> int:
    """For how many seconds to ask instead of those that were refused; 0 where fewer would not help."""
    if error.title == TOO_LONG:
        return least_s
    return int((seconds_left(sentence(error)) or 0) / factor)


def _logged(release: Callable[..., None]) -> Callable[..., None]:
    """`release`, tried twice and then a line in the log: the GPU comes back by itself when its time is up."""

    def heard(allow_token: str, **how: Any) -> None:
        for attempt in ("first", "second"):
            try:
                release(allow_token, **how)
                return
            except Exception as error:
                print(f"The GPU's release failed at the {attempt} try: {error!r}", file=sys.stderr)

    return heard
