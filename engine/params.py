"""How one request wants its tokens chosen: validated before anything is queued."""

import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any

from engine.grammar import check

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


def _whole(low: int, high: int, *, optional: bool = False) -> dict[str, Any]:
    return {"low": low, "high": high, "integral": True, "above_low": False, "optional": optional}


def _real(low: float, high: float, *, above_low: bool = False, optional: bool = False) -> dict[str, Any]:
    return {"low": low, "high": high, "integral": False, "above_low": above_low, "optional": optional}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. A bad value raises `ValueError` naming the field and its range.

    `do_sample=None` samples where `temperature` is above 0 or another sampling field is set; temperature 0 is
    greedy whatever the rest says. `top_k=0`, `top_p=1` and `typical_p=1` switch those off, penalties of 1 and 0 too.
    Both penalties count the prompt. `truncate` keeps that many tokens of the prompt's right end.

    `watermark` prefers a pseudo-random quarter of the vocabulary, by which `transformers.WatermarkDetector` knows the
    text (Kirchenbauer et al. 2023). `grammar` is `{"type": "json", "value": a schema}` or `{"type": "regex", "value":
    a pattern}`; an answer cut by `max_new_tokens` is only the beginning of a match. `top_n_tokens` asks for the
    model's best tokens beside each chosen one, `prompt_logprobs` for the log-probability of each prompt token.
    """

    max_new_tokens: int = field(default=64, metadata=_whole(1, 1_000_000))
    do_sample: bool | None = None
    temperature: float | None = field(default=None, metadata=_real(0, 100, optional=True))
    top_k: int = field(default=0, metadata=_whole(0, 1_000_000))
    top_p: float = field(default=1.0, metadata=_real(0, 1, above_low=True))
    typical_p: float = field(default=1.0, metadata=_real(0, 1, above_low=True))
    repetition_penalty: float = field(default=1.0, metadata=_real(0, 100, above_low=True))
    frequency_penalty: float = field(default=0.0, metadata=_real(-2, 2))
    seed: int | None = field(default=None, metadata=_whole(0, MAX_SEED, optional=True))
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    truncate: int | None = field(default=None, metadata=_whole(1, 1_000_000, optional=True))
    top_n_tokens: int = field(default=0, metadata=_whole(0, 20))
    prompt_logprobs: bool = False
    watermark: bool = False
    grammar: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.metadata:
                object.__setattr__(self, spec.name, _number(spec.name, getattr(self, spec.name), **spec.metadata))
        if self.do_sample not in (None, True, False):
            raise ValueError(f"do_sample must be true, false or None, not {self.do_sample!r}")
        for name in ("ignore_eos", "prompt_logprobs", "watermark"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.grammar is not None:
            check(self.grammar)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; otherwise the best one is taken."""
        if self.temperature == 0 or self.do_sample is False:
            return False
        asked = self.temperature is not None or self.top_k or self.top_p < 1 or self.typical_p < 1
        return bool(self.do_sample or asked)


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer from `low` to `high`; `ValueError` names it and the range."""
    return int(_number(name, value, **_whole(low, high)) or 0)


def _number(
    name: str, value: Any, *, low: float, high: float, integral: bool, above_low: bool, optional: bool
) -> int | float | None:
    kind = "a whole number" if integral else "a number"
    bounds = f"{'above' if above_low else 'from'} {low} {'and at most' if above_low else 'to'} {high}"
    if optional and value is None:
        return None
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        if integral and isinstance(value, float):
            number: Any = int(value) if value.is_integer() else None
        else:
            number = operator.index(value) if integral else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    in_range = number is not None and math.isfinite(number) and low <= number <= high
    if not in_range or (above_low and number == low):
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise ValueError(f"{name} must be {kind} {bounds}, not {shown}")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop must be a string or a list of strings, not {type(stop).__name__}")
    if len(strings) > MAX_STOP_STRINGS or not all(1 <= len(s) <= MAX_STOP_LENGTH for s in strings):
        raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters each")
    return tuple(strings)
