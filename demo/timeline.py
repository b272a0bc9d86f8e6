"""The batch over time: a bar a request in a lane of its own, and under it how many tokens a second all got."""

import itertools
from collections.abc import Sequence
from typing import Any

from demo.lanes import phases
from demo.plot import figure, label, nice_ceiling, unit

HEIGHT = 232
FEWEST_LANES = 6
STRANGERS = 4
IDLE_S = 3.0  # nothing is sampled while nothing runs, and no line is drawn across it
BARS, SPEED = [0.34, 1.0], [0.0, 0.2]  # of the height
NAMES = {"waiting": "waiting", "prefill": "reading its prompt", "decode": "generating"}


def stranger(request: int) -> str:
    """The muted colour of somebody else's request, the same in every figure."""
    return f"stranger-{request % STRANGERS + 1}"


def timeline(
    requests: Sequence[dict[str, Any]],
    speeds: Sequence[tuple[float, float]],
    lanes: dict[int, int],
    now: float,
    window_s: int,
    back_s: int = 0,
) -> dict:
    """The `window_s` seconds before `back_s` seconds ago; `speeds` are pairs of Unix time and tokens a second."""
    first, last = -back_s - window_s, -back_s
    spans: dict[str, list[tuple]] = {phase: [] for phase in NAMES}
    for entry in requests:
        if entry["request"] in lanes:
            for phase, start, end in phases(entry, now):
                begin, stop = max(start - now, first), min(end - now, last)
                if stop > begin:
                    spans[phase].append((begin, stop - begin, lanes[entry["request"]], entry))
    count = max(FEWEST_LANES, max(lanes.values(), default=0) + 1)
    shown = [(round(time - now, 2), round(speed, 1)) for time, speed in speeds if first <= time - now <= last]
    top = nice_ceiling(1.1 * max((speed for _, speed in shown), default=10))
    idle = [((x + later) / 2, None) for (x, _), (later, _) in itertools.pairwise(shown) if later - x > IDLE_S]
    return figure(
        [
            *(_bars(phase, bars) for phase, bars in spans.items()),
            _speed(sorted([*shown, *idle], key=lambda point: point[0])),
        ],
        height=HEIGHT,
        x=_axis(first, last, window_s),
        y={"range": [count - 0.5, -0.5], "showgrid": False, "tickvals": [], "fixedrange": True, "domain": BARS},
        yaxis2=_speed_axis(top),
        annotations=[unit("a bar a request"), label("tokens/s of all", 0, SPEED[1], "var(--muted)", **_CORNER)],
        barmode="overlay",
        bargap=0.3,
    )


_CORNER = {"xref": "paper", "yref": "paper", "xanchor": "left", "yshift": 2}


def _axis(first: int, last: int, window_s: int) -> dict[str, Any]:
    ticks = [first + window_s * part // 3 for part in range(4)]
    return {"range": [first, last], "tickvals": ticks, "ticktext": [_ago(tick) for tick in ticks], "anchor": "y2"}


def _ago(seconds: int) -> str:
    if not seconds:
        return "now"
    minutes, rest = divmod(-seconds, 60)
    return f"−{minutes}:{rest:02d} min" if minutes else f"−{rest} s"


def _speed_axis(top: float) -> dict[str, Any]:
    plain = {"gridcolor": "var(--line)", "zeroline": False, "tickfont": {"color": "var(--muted)", "size": 12}}
    return {**plain, "domain": SPEED, "range": [0, top], "tickvals": [0, top], "fixedrange": True, "anchor": "x"}


def _speed(points: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "speed",
        "mode": "lines",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "yaxis": "y2",
        "line": {"color": "var(--muted)", "width": 2},
        "hovertemplate": "%{y:.0f} tokens/s<extra></extra>",
    }


def _bars(phase: str, bars: list[tuple]) -> dict[str, Any]:
    shade = "-deep" if phase == "prefill" else ""
    colors = [f"var(--{stranger(entry['request'])}{shade})" for *_, entry in bars]
    marker: dict[str, Any] = {"color": colors, "cornerradius": 4, "line": {"width": 0}}
    if phase == "waiting":
        marker["line"] = {"width": 1, "color": colors}
        marker["pattern"] = {"shape": "/", "fgcolor": colors, "bgcolor": "var(--card)", "size": 8, "solidity": 0.15}
    if phase == "decode":
        crossed = ["x" if entry["finish_reason"] == "cancelled" else "" for *_, entry in bars]
        marker["pattern"] = {"shape": crossed, "fgcolor": "var(--card)", "size": 8, "solidity": 0.2}
    hover = f"{NAMES[phase]} %{{x:.1f}} s<br>%{{customdata[1]}} tokens read, %{{customdata[2]}} written<extra></extra>"
    return {
        "type": "bar",
        "name": phase,
        "orientation": "h",
        "base": [round(start, 2) for start, *_ in bars],
        "x": [round(length, 2) for _, length, *_ in bars],
        "y": [lane for *_, lane, _ in bars],
        "marker": marker,
        "customdata": [[e["client"], e["prompt_tokens"], e["tokens"], e["request"]] for *_, e in bars],
        "hovertemplate": hover,
    }
