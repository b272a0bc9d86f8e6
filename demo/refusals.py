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
    """`text` itself; refused unless it is text that can be encoded, which half of a surrogate pair cannot."""
    require(isinstance(text, str), f"{field} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        sentence = f"{field} must be valid Unicode text; character {error.start} is half of a surrogate pair"
        raise ValueError(sentence) from None
    return text


def sendable(text: str) -> str:
    """A refused text as it can go back to its field: what cannot be encoded becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
