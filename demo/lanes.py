"""Where each request is drawn: a lane of its own, for its whole life."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

WINDOW_S = 30


def assign_lanes(
    requests: Iterable[dict[str, Any]], lanes: dict[int, int], now: float, window_s: float = WINDOW_S
) -> dict[int, int]:
    """A lane for each request, for its whole life: the lowest that is free from when it arrives.

    `lanes` is the previous answer; a request keeps its lane although older ones leave the picture.
    """
    recent = [entry for entry in requests if (entry["ended"] or now) > now - window_s]
    taken = {entry["request"]: lanes[entry["request"]] for entry in recent if entry["request"] in lanes}
    free_from: dict[int, float] = {}
    for entry in recent:
        if entry["request"] in taken:
            lane = taken[entry["request"]]
            free_from[lane] = max(free_from.get(lane, 0.0), entry["ended"] or math.inf)
    for entry in recent:
        if entry["request"] not in taken:
            lane = next(n for n in range(len(recent) + len(lanes) + 1) if free_from.get(n, 0.0) <= entry["queued"])
            taken[entry["request"]] = lane
            free_from[lane] = entry["ended"] or math.inf
    return taken


def phases(entry: dict[str, Any], now: float) -> list[tuple[str, float, float]]:
    """The spans of a request's life so far: (waiting, prefill or decode, start, end); one a chunk of the prompt."""
    end = entry["ended"] or now
    prefill = entry["prefill"] or end
    decode = entry["decode"] or end
    edges = sorted({prefill, *(start for start, _ in entry["chunks"] if prefill < start < decode), decode})
    chunks = [("prefill", start, stop) for start, stop in itertools.pairwise(edges)]
    spans = [("waiting", entry["queued"], prefill), *chunks, ("decode", decode, end)]
    return [(phase, start, stop) for phase, start, stop in spans if stop > start]
