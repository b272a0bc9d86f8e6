"""Where the time between two lanes of a race goes: the gap taken apart, from what was measured of each lane."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# From the slowest to the fastest, and what the next one no longer does.
LANES = {
    "naive_all": "no cache: the whole text again for every token, logits of every position",
    "naive": "no cache: the whole text again for every token, logits of the last position only",
    "by_hand": "transformers' own cache, by hand: the prompt read once, then one token a step",
    "generate": "model.generate(), as it comes",
    "cached": "this engine alone: keys and values written into a slot, nothing copied",
    "shared": "this engine, the batch shared with others: each step makes a token for every row",
}
CAUSES = {
    "naive": "logits nobody reads",
    "by_hand": "reading the text again",
    "generate": "generate()'s own code",
    "cached": "copying the cache",
    "shared": "not sharing the steps",
}
WARM_UP, CHOICE = "first-call warm-up", "choosing the tokens"


@dataclass
class LaneTimes:
    """Milliseconds of a lane's counted steps and of its trial; `rows` is how many sequences each step served."""

    name: str
    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    trial_ms: list[float] = field(default_factory=list)

    @property
    def total_ms(self) -> float:
        return sum(self.step_ms)

    @property
    def share_ms(self) -> float:
        """Its own part of steps that made tokens for others, too."""
        return sum(ms / rows for ms, rows in zip(self.step_ms, self.rows, strict=True))

    @property
    def first_call_ms(self) -> float:
        """What the first steps took beyond the same steps later; counted in the total unless the lane was warmed up."""
        counted = sum(self.step_ms[: len(self.trial_ms)])
        return abs(sum(self.trial_ms) - counted)


def take_apart(lanes: Sequence[LaneTimes], warmed_up: bool) -> dict[str, Any]:
    """Seconds between the first and the last of `lanes` in the order of `LANES`, by cause; the parts are the whole.

    A part may be negative, where a lane does something that the one before it did not.
    """
    ordered = sorted(lanes, key=lambda lane: list(LANES).index(lane.name))
    first, last = ordered[0], ordered[-1]
    parts: dict[str, float] = {}
    if not warmed_up:
        parts[WARM_UP] = _warm_up(first) - _warm_up(last)
    for slow, fast in zip(ordered, ordered[1:], strict=False):
        parts[_cause(slow.name, fast.name)] = _forward(slow, warmed_up) - _forward(fast, warmed_up)
    parts[CHOICE] = _choice(first) - _choice(last)
    return {
        "from": first.name,
        "to": last.name,
        "from_s": first.total_ms / 1000,
        "to_s": last.share_ms / 1000,
        "parts": [{"cause": cause, "seconds": ms / 1000} for cause, ms in parts.items()],
    }


def _warm_up(lane: LaneTimes) -> float:
    """First calls as they are in the total, where they were counted; less than nothing is noise, and stays."""
    steps = len(lane.trial_ms)
    return _shares(lane, lane.step_ms[:steps]) - _shares(lane, lane.trial_ms)


def _forward(lane: LaneTimes, warmed_up: bool) -> float:
    return _shares(lane, lane.forward_ms) - (0.0 if warmed_up else _warm_up(lane))


def _choice(lane: LaneTimes) -> float:
    return lane.share_ms - _shares(lane, lane.forward_ms)


def _shares(lane: LaneTimes, milliseconds: Sequence[float]) -> float:
    return sum(ms / rows for ms, rows in zip(milliseconds, lane.rows, strict=False))


def _cause(slow: str, fast: str) -> str:
    names = list(LANES)
    between = names[names.index(slow) + 1 : names.index(fast) + 1]
    # generate() stands beside the loop by hand: who goes past it does not save its loop.
    return ", ".join(CAUSES[name] for name in between if name != "generate" or fast == "generate")
