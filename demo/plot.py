"""The frame that all figures share: margins, axes, labels that stand at their lines, colours by name.

Figures are plain data: plotly's own classes check every property, which takes 25 ms a tick and is the tests'
business. Colours are CSS variables (`var(--cached)`), which the browser resolves: one figure serves both themes.
"""

import math
from collections.abc import Sequence
from typing import Any

Point = tuple[float, float]


def figure(traces: Sequence[Any], *, height: int, x: dict[str, Any], y: dict[str, Any], **layout: Any) -> dict:
    axis = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "showline": False,
        "tickfont": {"color": "var(--muted)", "size": 12},
        "ticklabelstandoff": 4,
    }
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 44, "r": 16, "t": 24, "b": 28},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": "var(--muted)", "size": 12},
            "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
            "showlegend": False,
            "xaxis": {**axis, "showgrid": False, **x},
            "yaxis": {**axis, **y},
            **layout,
        },
    }


def line_label(text: str, points: Sequence[Point], x_top: float, color: str, yanchor: str) -> dict[str, Any]:
    """A name that stands at the end of its line, on the side where there is room."""
    x, y = points[-1]
    side = {"xanchor": "right", "xshift": -8} if x > 0.5 * x_top else {"xanchor": "left", "xshift": 8}
    return label(text, x, y, color, yanchor=yanchor, yshift=4 if yanchor == "bottom" else -4, **side)


def label(text: str, x: float, y: float, color: str, **where: Any) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "y": y,
        "showarrow": False,
        "font": {"color": color, "size": 12},
        "xanchor": "right",
        "yanchor": "bottom",
        **where,
    }


def unit(text: str) -> dict[str, Any]:
    """The unit of the y axis, above its topmost tick."""
    return label(text, 0, 1, "var(--muted)", xref="paper", yref="paper", xanchor="left", yshift=4)


def nice_ceiling(value: float) -> float:
    """The next 1, 1.5, 2, 3, 4, 6 or 8 times a power of ten: axes stay until the data outgrow them."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 6, 8, 10) if step * power >= value * 0.999)


def line(
    points: Sequence[Point], hover: str, *, color: str, width: float = 2, dash: str = "solid", marker: int = 0
) -> Any:
    """A line through `points`, with markers of that size."""
    return {
        "type": "scatter",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "mode": "lines+markers" if marker else "lines",
        "line": {"color": color, "width": width, "dash": dash},
        "marker": {"size": marker},
        "hovertemplate": f"{hover}<extra></extra>",
    }
