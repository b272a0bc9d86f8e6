"""Where a refusal of the engine becomes a sentence for a person."""

from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from engine import EngineBusy, EngineNotReady, EngineStopped, GenerationError

REFUSALS = (ValueError, EngineBusy, EngineNotReady, EngineStopped, GenerationError)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the engine refuses into `gr.Error`; anything else stays a crash and is logged as one."""
    try:
        yield
    except REFUSALS as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None


def require(condition: bool, sentence: str) -> None:
    """Refuse with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def readable(text: str, field: str) -> str:
    """`text` as it can be sent to a browser: lone surrogates become question marks; anything but text is refused."""
    require(isinstance(text, str), f"{field} must be text, not {type(text).__name__}")
    return text.encode("utf-8", "replace").decode()
