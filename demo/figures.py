"""Data in, Plotly figure out: pure functions, one a figure.

Traces and bars of a request carry its client's number in `meta` or `customdata`, so that each browser
can paint its own in the colour that means "you" and everybody can be sent the same figure.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from demo.lanes import WINDOW_S
from demo.plot import Point, figure, label, line, line_label, nice_ceiling, unit
from demo.timeline import stranger

FEWEST_MB = 8
EDGE_S = 0.01
SAME_PLACE = 0.35
NEAR_AXIS = 0.15  # of the highest point
MS_AT = "%{y:.0f} ms at %{x} tokens"


def speed(naive: Iterable[Point], cached: Iterable[Point], shared: Iterable[Point] = (), others: int = 0) -> dict:
    """Milliseconds a token against tokens in context: measured points, and the step that was shared."""
    naive, cached, shared = sorted(naive), sorted(cached), sorted(shared)
    x_top = _whole_axis(x for x, _ in [*naive, *cached, *shared])
    # A shared step that had to read somebody's prompt may leave the picture; the usual one stays in it.
    usual = [(0, median(y for _, y in shared))] if shared else []
    slowest = max((y for _, y in [*naive, *cached, *usual]), default=100)
    labels = []
    if naive:
        labels.append(line_label("without the cache", naive, x_top, "var(--naive)", "bottom"))
    if cached:
        # Under its line, away from the other one, unless the axis is there.
        side = "bottom" if cached[-1][1] < NEAR_AXIS * slowest else "top"
        labels.append(line_label("with the cache", cached, x_top, "var(--cached)", side))
    # Two names on one place cannot be read; of the shared step the line under the pointer tells as well.
    if shared and others and not (naive and abs(shared[-1][1] - naive[-1][1]) < SAME_PLACE * naive[-1][1]):
        name = f"step shared with {others} other{'s' if others > 1 else ''}"
        own = line_label(name, shared, x_top, "var(--muted)", "bottom")
        labels.append({**own, "bgcolor": "var(--card)"})  # its line is no smooth one
    traces = [
        line(shared, MS_AT, color="var(--muted)", width=1),
        line(cached, MS_AT, color="var(--cached)", marker=5),
        line(naive, MS_AT, color="var(--naive)", dash="4px,4px", marker=8),
    ]
    return _milliseconds(traces, x_top, slowest, labels)


def speed_of_others(probes: Sequence[dict[str, Any]]) -> dict:
    """Points measured in all conversations of the last while, for a page on which nobody has spoken."""
    traces = [
        {
            "type": "scatter",
            "x": [probe["length"] for probe in probes],
            "y": [probe[f"{lane}_ms"] for probe in probes],
            "mode": "markers",
            "marker": {"color": f"var(--{lane})", "size": 6, "opacity": 0.6},
            "hovertemplate": f"{MS_AT}<extra></extra>",
        }
        for lane in ("naive", "cached")
    ]
    slowest = max((max(probe["naive_ms"], probe["cached_ms"]) for probe in probes), default=100)
    return _milliseconds(traces, _whole_axis(probe["length"] for probe in probes), slowest, [])


def _whole_axis(lengths: Iterable[float]) -> int:
    return 128 * max(1, math.ceil(max(lengths, default=0) / 128))


def _milliseconds(traces: list[Any], x_top: int, slowest: float, labels: list[dict[str, Any]]) -> dict:
    return figure(
        traces,
        height=192,
        x={"range": [0, x_top], "nticks": 5},
        y={"range": [0, nice_ceiling(1.15 * slowest)], "nticks": 4},
        annotations=[unit("ms a token, by tokens in context"), *labels],
    )


def cache(snapshot: dict[str, Any]) -> dict | None:
    """Bytes in use over the last half minute, stacked by request, under the line of what is reserved."""
    now = snapshot["time"]
    history = [*(entry for entry in snapshot["history"] if entry["time"] > now - WINDOW_S - 1), _present(snapshot)]
    if not any(entry["allocated_bytes"] for entry in history):
        return None
    clients = {entry["request"]: entry["client"] for entry in snapshot["requests"]}
    lives = {
        request: _life(history, request, now) for request in sorted({r for e in history for r in e["used"]}, key=int)
    }
    # Stacked areas need the same places on the axis: every sample, and the edges of every request's life.
    places = sorted({e["time"] - now for e in history} | {x for life in lives.values() for x, _ in life})
    traces = [
        _kept(places, history, now, "public_bytes", "public beginnings, for everybody", "."),
        _kept(places, history, now, "retained_bytes", "kept for the next turn", "/"),
    ]
    for request, life in lives.items():
        color = f"var(--{stranger(int(request))})"
        traces.append(
            _area(
                places,
                life,
                "%{y:.1f} MB<extra></extra>",
                line={"color": color, "width": 0},
                fillcolor=color,
                meta={"client": clients.get(int(request))},
            )
        )
    reserved = max(entry["allocated_bytes"] for entry in history) / 1e6
    used = max((sum(entry["used"].values()) + _kept_bytes(entry)) / 1e6 for entry in history)
    traces.append(
        {
            "type": "scatter",
            "x": [entry["time"] - now for entry in history],
            "y": [entry["allocated_bytes"] / 1e6 for entry in history],
            "mode": "lines",
            "line": {"color": "var(--muted)", "width": 1.5, "dash": "4px,4px"},
            "hoverinfo": "skip",
        }
    )
    shown = reserved <= 4 * max(used, FEWEST_MB)
    top = nice_ceiling(1.1 * max(used, reserved if shown else 0, FEWEST_MB))
    labels = [unit("MB"), *_names_of_kept(history[-1], top)]
    name = "reserved" if shown else f"↑ {reserved:,.0f} MB reserved"
    y, shift = (reserved, 2) if shown else (top, -16)
    return figure(
        traces,
        height=160,
        x=_seconds_axis(),
        y={"range": [0, top], "nticks": 4},
        annotations=[*labels, label(name, 0, y, "var(--muted)", yshift=shift, bgcolor="var(--card)")],
    )


def _kept(places: Sequence[float], history: Sequence[dict], now: float, part: str, name: str, shape: str) -> dict:
    """Bytes that wait for somebody to go on from them."""
    return _area(
        places,
        [(entry["time"] - now, entry[part] / 1e6) for entry in history],
        f"{name}: %{{y:.1f}} MB<extra></extra>",
        line={"color": "var(--muted)", "width": 0},
        fillpattern={"shape": shape, "fgcolor": "var(--muted)", "bgcolor": "var(--soft)", "size": 6},
    )


def _kept_bytes(entry: dict[str, Any]) -> int:
    return entry["public_bytes"] + entry["retained_bytes"]


def _names_of_kept(last: dict[str, Any], top: float) -> list[dict[str, Any]]:
    """Of each kind of kept bytes, where it is high enough now to be named."""
    heights = {"public": last["public_bytes"] / 1e6, "kept for next turns": last["retained_bytes"] / 1e6}
    base, names = 0.0, []
    for name, height in heights.items():
        if height > 0.12 * top:
            names.append(label(name, 0, base, "var(--muted)", bgcolor="var(--card)", xshift=-4, yshift=4))
        base += height
    return names


def _present(snapshot: dict[str, Any]) -> dict[str, Any]:
    slots = [slot for slot in snapshot["cache"]["slots"] if slot["tokens"]]
    size = (snapshot["model"] or {}).get("bytes_per_token", 0)
    used = {str(s["request"]): s["tokens"] * size for s in slots if s["state"] in ("running", "prefilling")}
    kept = sum(slot["tokens"] * size for slot in slots if slot["state"] == "retained")
    reserved = snapshot["cache"]["allocated_bytes"]
    public = snapshot["cache"]["public_tokens"] * size
    return {
        "time": snapshot["time"],
        "used": used,
        "retained_bytes": kept,
        "public_bytes": public,
        "allocated_bytes": reserved,
    }


def _life(history: Sequence[dict[str, Any]], request: str, now: float) -> list[Point]:
    """Megabytes of one request at each sample; it comes and goes at once, so upright edges stand at both ends."""
    points = [(e["time"] - now, e["used"][request] / 1e6) for e in history if request in e["used"]]
    return [(points[0][0] - EDGE_S, 0.0), *points, (points[-1][0] + EDGE_S, 0.0)]


def _area(places: Sequence[float], points: Sequence[Point], hover: str, **style: Any) -> dict[str, Any]:
    """A layer of the stack, with a value at every place: its own line between its points, nothing outside them."""
    values = np.interp(places, [x for x, _ in points], [y for _, y in points], left=0, right=0)
    return {
        "type": "scatter",
        "x": [round(x, 2) for x in places],
        "y": [round(y, 3) for y in values.tolist()],
        "mode": "lines",
        "stackgroup": "bytes",
        "hovertemplate": hover,
        **style,
    }


def _seconds_axis() -> dict[str, Any]:
    return {
        "range": [-WINDOW_S, 0],
        "tickvals": [-30, -20, -10, 0],
        "ticktext": ["−30 s", "−20 s", "−10 s", "now"],
    }
