"""The race drawn: each lane's clock, its milliseconds a token, and the gap taken apart. Data in, figure out."""

import textwrap
from collections.abc import Sequence
from typing import Any

from demo.plot import Point, figure, label, line, nice_ceiling, unit

HEIGHT, PLOT = 224, 172  # pixels, in all and of the axes
LINE = 15  # between two names
MARGIN = {"l": 44, "r": 108, "t": 24, "b": 28}  # on the right, the names of the lines

# Warm where the text is read again, teal where it is not; names stand at the lines.
COLORS = {"naive_all": "var(--naive)", "naive": "var(--naive)"}
DASHES = {
    "naive_all": "2px,4px",
    "naive": "4px,4px",
    "by_hand": "8px,3px",
    "generate": "2px,3px",
    "shared": "10px,3px,2px,3px",
}
TITLES = {
    "naive_all": "naive, all logits",
    "naive": "naive",
    "by_hand": "cache by hand",
    "generate": "generate()",
    "cached": "cached",
    "shared": "shared batch",
}

Lanes = Sequence[dict[str, Any]]


def clocks(lanes: Lanes, target: int) -> dict:
    """Each lane's own clock against the tokens it has written."""
    lines = {lane["name"]: _clock(lane["step_ms"]) for lane in lanes}
    top = nice_ceiling(1.1 * max([points[-1][1] for points in lines.values()] + [0.2]))
    axes = {"x": {"range": [0, target], "nticks": 5}, "y": {"range": [0, top], "nticks": 4}}
    return _lines(lines, "%{x} tokens after %{y:.2f} s", "seconds of engine time, by tokens written", top, **axes)


def steps(lanes: Lanes, prompt_tokens: int, target: int) -> dict:
    """Milliseconds of each step against the tokens before it; the first step, which reads the prompt, is left out."""
    lines: dict[str, list[Point]] = {
        lane["name"]: list(enumerate(lane["step_ms"][1:], prompt_tokens + 1)) for lane in lanes
    }
    usual = [sorted(y for _, y in points)[int(0.95 * (len(points) - 1))] for points in lines.values() if points]
    top = nice_ceiling(1.25 * max(usual, default=40.0))
    axes = {"x": {"range": [prompt_tokens, prompt_tokens + target], "nticks": 5}, "y": {"range": [0, top], "nticks": 4}}
    shown = {name: points for name, points in lines.items() if points}
    return _lines(shown, "%{y:.0f} ms at %{x} tokens", "ms a token, by tokens in context", top, **axes)


def gap(taken_apart: dict[str, Any]) -> dict:
    """From the first lane to the last: what each cause takes off, as a waterfall."""
    first, last = taken_apart["from"], taken_apart["to"]
    bars = [(TITLES[first], 0.0, taken_apart["from_s"], _color(first))]
    level = taken_apart["from_s"]
    for part in taken_apart["parts"]:
        level -= part["seconds"]
        bars.append((f"− {part['cause']}", level, part["seconds"], "var(--muted)"))
    share = ": its share" if last == "shared" else ""
    bars.append((TITLES[last] + share, 0.0, taken_apart["to_s"], _color(last)))
    names, bases, widths, colors = zip(*bars, strict=True)
    return figure(
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": list(range(len(bars))),
                "x": list(widths),
                "base": list(bases),
                "marker": {"color": list(colors)},
                "width": 0.6,
                "text": [_seconds(width) for width in widths],
                "textposition": "outside",
                "textfont": {"color": "var(--ink)"},
                "cliponaxis": False,
                "hoverinfo": "skip",
            }
        ],
        height=HEIGHT,
        margin={"l": 172, "r": 64, "t": 4, "b": 24},
        x={
            "range": [min(0.0, *bases), max(base + width for base, width in zip(bases, widths, strict=True))],
            "nticks": 4,
            "ticksuffix": " s",
            "showticksuffix": "last",
        },
        y={
            "range": [len(bars) - 0.5, -0.5],
            "showgrid": False,
            "tickvals": list(range(len(bars))),
            "ticktext": ["<br>".join(textwrap.wrap(name, 28)) for name in names],
            "tickfont": {"color": "var(--ink)", "size": 12},
        },
    )


def _lines(lines: dict[str, list[Point]], hover: str, what: str, top: float, **axes: Any) -> dict:
    traces = [
        line(points, f"{TITLES[name]}: {hover}", color=_color(name), dash=DASHES.get(name, "solid"))
        for name, points in lines.items()
    ]
    return figure(traces, height=HEIGHT, annotations=[unit(what), *_names(lines, top)], margin=MARGIN, **axes)


def _names(lines: dict[str, list[Point]], top: float) -> list[dict[str, Any]]:
    """Each name behind the end of its line, moved up as far as the one below needs."""
    named, free_from = [], float("-inf")
    ends = {name: (points[-1][0], min(points[-1][1], top)) for name, points in lines.items() if len(points) > 1}
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        pixels = max(PLOT * y / top, free_from)
        free_from = pixels + LINE
        moved = {"yshift": pixels - PLOT * y / top, "xshift": 6}
        named.append(label(TITLES[name], x, y, _color(name), xanchor="left", yanchor="middle", **moved))
    return named


def _color(name: str) -> str:
    return COLORS.get(name, "var(--cached)")


def _seconds(value: float) -> str:
    return f"{value:.{2 if abs(value) < 10 else 1}f} s".replace("-", "−")


def _clock(steps_ms: Sequence[float]) -> list[Point]:
    points: list[Point] = [(0, 0.0)]
    for index, step in enumerate(steps_ms, 1):
        points.append((index, points[-1][1] + step / 1000))
    return points
