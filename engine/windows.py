"""How far a decode step reads the slots of rows of unlike lengths: neighbours together, as far as their longest.

One rectangle over all rows reads a slot of 100 tokens as far as one of 2,000 beside it. Several rectangles cost a few
more operators a layer, so the rows are split where what is not read outweighs that.
"""

from dataclasses import dataclass

WINDOW_STEP = 64  # so that shapes repeat


@dataclass(frozen=True)
class Window:
    """`rows` consecutive slots, of which a step reads the first `positions` positions each."""

    rows: int
    positions: int

    @property
    def size(self) -> int:
        return self.rows * self.positions


def rounded(length: int, most: int) -> int:
    """Positions that are read of a row of that length."""
    return min(-(-length // WINDOW_STEP) * WINDOW_STEP, most)


def split(lengths: list[int], most: int, each: int) -> list[Window]:
    """The windows over rows of these lengths that cost least, where one costs its size and `each` positions more.

    By dynamic programming over where the last window begins; `most` is how many positions a slot has.
    """
    cheapest: list[tuple[int, list[Window]]] = [(0, [])]
    for end in range(1, len(lengths) + 1):
        positions, options = 0, []
        for start in reversed(range(end)):
            positions = max(positions, rounded(lengths[start], most))
            before, windows = cheapest[start]
            options.append((before + (end - start) * positions + each, start, positions, windows))
        cost, start, positions, windows = min(options, key=lambda option: option[0])
        cheapest.append((cost, [*windows, Window(end - start, positions)]))
    return cheapest[-1][1]
