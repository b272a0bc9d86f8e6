"""Speed now: what one conversation's tokens cost with the cache, and what they would cost without."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from demo import figures
from demo.plot import Point
from engine import Generation

MOST_POINTS = 160
RECENT = 3  # measurements, of which the middle one is shown: a busy machine spoils one now and then


@dataclass
class Measurements:
    """Everything measured during one conversation, over all its turns."""

    naive: list[Point] = field(default_factory=list)
    cached: list[Point] = field(default_factory=list)
    shared: list[Point] = field(default_factory=list)
    length: int = 0
    others: int = 0

    def with_turn(self, generation: Generation) -> "Measurements":
        """These and what `generation` has measured so far."""
        events, probes = generation.events, generation.probes
        together = [(e.context_length, e.step_ms) for e in events if e.batch_size > 1]
        return Measurements(
            naive=[*self.naive, *((p.length, p.naive_ms) for p in probes)],
            cached=[*self.cached, *((p.length, p.cached_ms) for p in probes)],
            shared=_thinned([*self.shared, *together]),
            length=generation.prompt_tokens + len(events),
            others=events[-1].batch_size - 1 if events else self.others,
        )


def _thinned(points: list[Point]) -> list[Point]:
    return points[:: 1 + len(points) // MOST_POINTS]


def speed_value(measured: Measurements) -> dict[str, Any]:
    """What the panel shows of a conversation: the numbers, where they come from, and the figure."""
    caption = f"your conversation, {measured.length:,} tokens long"
    if not measured.naive:
        return {"caption": caption, "pending": "A step without the cache is measured as soon as the batch has room."}
    length, naive_ms, cached_ms = _middle_of_recent(measured)
    count = len(measured.naive)
    return {
        "caption": caption,
        "ratio": naive_ms / cached_ms,
        "at": f"at {length:,} tokens",
        "cached_ms": cached_ms,
        "naive_ms": naive_ms,
        "measured": f"middle of the last {RECENT}" if count >= RECENT else f"measured {('once', 'twice')[count - 1]}",
        "explanation": explanation(length, naive_ms, cached_ms, crossing(measured.naive, measured.cached)),
        "figure": figures.speed(measured.naive, measured.cached, measured.shared, measured.others),
    }


def _middle_of_recent(measured: Measurements) -> tuple[float, float, float]:
    """Length, naive and cached ms of that one of the last measurements whose ratio lies between the others'."""
    pairs = zip(measured.naive[-RECENT:], measured.cached[-RECENT:], strict=True)
    recent = sorted((slow / fast, length, slow, fast) for (length, slow), (_, fast) in pairs)
    return recent[(len(recent) - 1) // 2][1:]


def explanation(length: float, naive_ms: float, cached_ms: float, crossed_at: int | None) -> str:
    """Why the two lines differ, in one sentence with the numbers on it."""
    if naive_ms <= cached_ms:
        return f"At {length:,} tokens the cache does not pay yet: reading everything again costs no more than one step."
    line = f"Without a cache the next token means reading all {length:,} again; with it, only the last one."
    return f"{line} The lines crossed at {crossed_at:,} tokens." if crossed_at else line


def crossing(naive: Iterable[Point], cached: Iterable[Point]) -> int | None:
    """The length at which the naive step became the slower one, interpolated between measured points."""
    gaps = sorted((length, slow - fast) for (length, slow), (_, fast) in zip(naive, cached, strict=True))
    for (x0, gap0), (x1, gap1) in pairwise(gaps):
        if gap0 < 0 <= gap1:
            return round(x0 + (x1 - x0) * -gap0 / (gap1 - gap0))
    return None
