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
    steps: Sequence[dict[str, Any]] = (),
) -> dict:
    """The `window_s` seconds before `back_s` seconds ago; `speeds` are pairs of Unix time and tokens a second.

    With `steps`, a line for each of them through all rows, and below it the tokens a second that it made.
    """
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
    begun = [step for step in steps if first <= step["time"] - now <= last]
    fastest = max((_tokens_per_second(step) for step in begun), default=0)
    top = nice_ceiling(1.1 * max([*(speed for _, speed in shown), fastest, 10]))
    idle = [((x + later) / 2, None) for (x, _), (later, _) in itertools.pairwise(shown) if later - x > IDLE_S]
    line = _speed(sorted([*shown, *idle], key=lambda point: point[0]))
    each = [_step_lines(begun, now, count), _step_bars(begun, now)] if begun else [line]
    return figure(
        [*(_bars(phase, bars) for phase, bars in spans.items()), *each],
        height=HEIGHT,
        x=_axis(first, last, window_s),
        y={"range": [count - 0.5, -0.5], "showgrid": False, "tickvals": [], "fixedrange": True, "domain": BARS},
        yaxis2=_speed_axis(top),
        annotations=[
            unit("a bar a request, a line a step" if begun else "a bar a request"),
            label("tokens/s of each step" if begun else "tokens/s of all", 0, SPEED[1], "var(--muted)", **_CORNER),
        ],
        barmode="overlay",
        bargap=0.3,
    )


_CORNER = {"xref": "paper", "yref": "paper", "xanchor": "left", "yshift": 2}


def _axis(first: int, last: int, window_s: int) -> dict[str, Any]:
    parts = 5 if window_s % 3 else 3
    ticks = [first + window_s * part // parts for part in range(parts + 1)]
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


def _tokens_per_second(step: dict[str, Any]) -> float:
    return 1000 * step["batch_size"] / step["step_ms"] if step["step_ms"] else 0.0


def _step_lines(steps: list[dict[str, Any]], now: float, lanes: int) -> dict[str, Any]:
    """Where each step begins: in the colour of the card, so that it shows where it cuts a bar."""
    return {
        "type": "scatter",
        "name": "steps",
        "mode": "lines",
        "x": [x for step in steps for x in (round(step["time"] - now, 3), round(step["time"] - now, 3), None)],
        "y": [y for _ in steps for y in (-0.5, lanes - 0.5, None)],
        "line": {"color": "var(--card)", "width": 1},
        "hoverinfo": "skip",
    }


def _step_bars(steps: list[dict[str, Any]], now: float) -> dict[str, Any]:
    seconds = [step["step_ms"] / 1000 for step in steps]
    return {
        "type": "bar",
        "name": "speed of steps",
        "x": [round(step["time"] - now + length / 2, 3) for step, length in zip(steps, seconds, strict=True)],
        "width": [round(length, 4) for length in seconds],
        "y": [round(_tokens_per_second(step), 1) for step in steps],
        "yaxis": "y2",
        "marker": {"color": "var(--muted)", "line": {"color": "var(--card)", "width": 1}},
        "text": [_said(step) for step in steps],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _said(step: dict[str, Any]) -> str:
    made = step["batch_size"]
    read = f", {step['prefill_tokens']} tokens of prompts read" if step["prefill_tokens"] else ""
    return f"a step of {step['step_ms']:.0f} ms<br>{made} token{'' if made == 1 else 's'} written{read}"


def _bars(phase: str, bars: list[tuple]) -> dict[str, Any]:
    shade = "-deep" if phase == "prefill" else ""
    colors = [f"var(--{stranger(entry['request'])}{shade})" for *_, entry in bars]
    marker: dict[str, Any] = {"color": colors, "cornerradius": 4, "line": {"width": 0}}
    if phase == "prefill":  # chunk by chunk
        marker |= {"cornerradius": 1, "line": {"width": 0.5, "color": "var(--card)"}}
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
