"""Where a refusal becomes a sentence for a person, and is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr
from prometheus_client import Counter

from engine import EngineBusy, EngineNotReady, EngineStopped, GenerationError

ERRORS = Counter("kvscope_errors", "what visitors were told instead of an answer", ["kind"], registry=None)


class TooMany(ValueError):
    """A visitor or an address asks for more than its share."""


_KINDS = {
    TooMany: "too_many",
    EngineBusy: "busy",
    EngineNotReady: "not_ready",
    EngineStopped: "stopped",
    GenerationError: "failed",
}
REFUSALS = (ValueError, EngineBusy, EngineNotReady, EngineStopped, GenerationError)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the engine refuses into `gr.Error`; anything else stays a crash and is logged as one."""
    try:
        yield
    except REFUSALS as refusal:
        raise gr.Error(sentence(refusal), print_exception=False) from None


def sentence(refusal: Exception) -> str:
    """What to tell the visitor."""
    ERRORS.labels(_KINDS.get(type(refusal), "invalid")).inc()
    return str(refusal)


def require(condition: bool, why_not: str) -> None:
    """Refuse with the sentence `why_not` unless `condition` holds."""
    if not condition:
        raise ValueError(why_not)


def refuse_files(values: Any) -> None:
    """Refuse what Gradio would take for a file, however deep: it would fetch it from any host, and keep it."""
    unread = [values]
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            require(not ("meta" in value and isinstance(value.get("path"), str)), "This page takes no files.")
            unread += value.values()
        elif isinstance(value, list):
            unread += value


def readable(text: str, field: str) -> str:
    """`text` itself; refused unless it is text that can be encoded, which half of a surrogate pair cannot."""
    require(isinstance(text, str), f"{field} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why_not = f"{field} must be valid Unicode text; character {error.start} is half of a surrogate pair"
        raise ValueError(why_not) from None
    return text
