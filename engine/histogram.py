"""How values are spread, in a few numbers."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values were at most each of `bounds`; `counts` has one more, for those above all of them."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
