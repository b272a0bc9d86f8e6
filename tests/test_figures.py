"""The figures are pure functions: data in, Plotly figure out."""

import itertools
import json
import re

import plotly.graph_objects as go
import pytest

from demo import figures, race_figures
from demo.lanes import assign_lanes, phases
from demo.plot import nice_ceiling
from demo.race_figures import TITLES
from demo.speed import Measurements, crossing, explanation, speed_value
from demo.timeline import timeline

NOW = 1_000.0
MB = 1_000_000


def span(request: int, queued: float, ended: float | None = None, client: int = 1) -> dict:
    return {
        "request": request,
        "client": client,
        "queued": NOW + queued,
        "prefill": NOW + queued + 1,
        "decode": NOW + queued + 2,
        "ended": None if ended is None else NOW + ended,
        "prompt_tokens": 10,
        "chunks": [],
        "tokens": 20,
        "finish_reason": None,
    }


def sample(time: float, used: dict[str, int], retained: int = 0, public: int = 0) -> dict:
    kept = {"retained_bytes": retained, "public_bytes": public}
    return {"time": NOW + time, "allocated_bytes": 10 * MB, "used": used, **kept}


def snapshot(requests: list[dict], history: list[dict]) -> dict:
    slot = {"slot": 0, "state": "running", "request": 2, "client": 7, "tokens": 3}
    return {
        "time": NOW,
        "model": {"bytes_per_token": MB},
        "cache": {"allocated_bytes": 10 * MB, "slots": [slot], "public_tokens": 1},
        "requests": requests,
        "history": history,
    }


def cache_figure() -> dict:
    history = [
        sample(-20, {"1": MB}),
        sample(-15, {"1": 2 * MB, "2": MB}),
        sample(-10, {"2": 2 * MB}, retained=2 * MB, public=MB),
    ]
    return figures.cache(snapshot([span(1, -21, -12), span(2, -16, client=7)], history))


def test_stacked_areas_stand_on_common_places_and_hold_the_measured_values():
    public, kept, first, second, reserved = cache_figure()["data"]
    assert (max(public["y"]), max(kept["y"])) == (1, 2)
    assert list(public["x"]) == list(kept["x"]) == list(first["x"]) == list(second["x"])
    at = dict(zip(first["x"], first["y"], strict=True))
    assert (at[-20.0], at[-15.0], at[-10.0], at[0.0]) == (1, 2, 0, 0)
    at = dict(zip(second["x"], second["y"], strict=True))
    assert (at[-20.0], at[-15.0], at[-10.0], at[0.0]) == (0, 1, 2, 3)
    assert second["meta"] == {"client": 7}
    assert max(reserved["y"]) == 10


def test_a_request_comes_and_goes_at_once():
    _, _, first, *_ = cache_figure()["data"]
    rising = [y for x, y in zip(first["x"], first["y"], strict=True) if -20.02 < x < -20]
    falling = [y for x, y in zip(first["x"], first["y"], strict=True) if -15 < x < -14.98]
    assert rising == [0.0] and falling == [0.0]


def test_the_axis_holds_what_is_used_and_names_what_it_leaves_out():
    figure = cache_figure()
    low, high = figure["layout"]["yaxis"]["range"]
    assert low == 0 and high >= 10
    assert any(note["text"] == "reserved" for note in figure["layout"]["annotations"])
    assert figures.cache({**snapshot([], []), "cache": {"allocated_bytes": 0, "slots": [], "public_tokens": 0}}) is None


def test_every_request_has_a_lane_of_its_own_for_its_whole_life():
    requests = [span(1, -25, -5), span(2, -20), span(3, -4)]
    lanes = assign_lanes(requests, {}, NOW)
    assert lanes[1] != lanes[2]
    assert lanes[3] == lanes[1], "the lane is free again"
    later = assign_lanes(requests[1:], lanes, NOW + 30)
    assert later[2] == lanes[2] and later[3] == lanes[3]


def test_bars_tell_waiting_reading_and_writing_apart():
    requests = [span(1, -20, -5), span(2, -10, client=7)]
    figure = timeline(requests, [], assign_lanes(requests, {}, NOW), NOW, 30)
    bars = {trace["name"]: trace for trace in figure["data"]}
    assert list(bars["waiting"]["x"]) == list(bars["prefill"]["x"]) == [1, 1]
    assert list(bars["decode"]["x"]) == [13, 8]
    assert [row[0] for row in bars["decode"]["customdata"]] == [1, 7]
    assert [phase for phase, *_ in phases(requests[0], NOW)] == ["waiting", "prefill", "decode"]


def test_a_prompt_is_drawn_chunk_by_chunk():
    read = {**span(1, -20), "chunks": [(NOW - 19, 128), (NOW - 18.5, 128), (NOW - 18.2, 40)]}
    figure = timeline([read], [], {1: 0}, NOW, 30)
    (chunks,) = [trace for trace in figure["data"] if trace["name"] == "prefill"]
    assert list(chunks["base"]) == [-19, -18.5, -18.2] and list(chunks["x"]) == [0.5, 0.3, 0.2]


def test_a_few_seconds_are_drawn_step_by_step():
    steps = [
        {"time": NOW - 3, "step_ms": 100.0, "batch_size": 2, "prefill_tokens": 0},
        {"time": NOW - 2, "step_ms": 400.0, "batch_size": 1, "prefill_tokens": 64},
        {"time": NOW - 9, "step_ms": 100.0, "batch_size": 1, "prefill_tokens": 0},
    ]
    figure = timeline([span(1, -8)], [(NOW - 3, 5.0)], {1: 0}, NOW, 5, steps=steps)
    *_, lines, bars = figure["data"]
    assert lines["x"] == [-3, -3, None, -2, -2, None]
    assert (bars["x"], bars["width"], bars["y"]) == ([-2.95, -1.8], [0.1, 0.4], [20, 2.5])
    assert bars["text"][1] == "a step of 400 ms<br>1 token written, 64 tokens of prompts read"


def test_scrolled_back_the_timeline_shows_what_was_then():
    requests = [{**span(1, -200, -100), "finish_reason": "cancelled"}, span(2, -90, -70), span(3, -20)]
    lanes = assign_lanes(requests, {}, NOW - 60, 120)
    figure = timeline(requests, [(NOW - 300, 1.0), (NOW - 100, 20.0), (NOW - 5, 3.0)], lanes, NOW, 120, back_s=60)
    bars = {trace["name"]: trace for trace in figure["data"]}
    assert bars["decode"]["base"] == [-180, -88] and bars["decode"]["x"] == [80, 18]
    assert bars["decode"]["marker"]["pattern"]["shape"] == ["x", ""]
    assert [row[3] for row in bars["decode"]["customdata"]] == [1, 2]
    assert (bars["speed"]["x"], bars["speed"]["y"]) == ([-100], [20.0])
    (*_, speed) = timeline([], [(NOW - 20, 5.0), (NOW - 10, 6.0), (NOW - 9, 7.0)], {}, NOW, 30)["data"]
    assert speed["y"] == [5.0, None, 6.0, 7.0]
    assert figure["layout"]["xaxis"]["ticktext"] == ["−3:00 min", "−2:20 min", "−1:40 min", "−1:00 min"]


def test_speed_shows_measured_points_only():
    figure = figures.speed([(100, 200.0), (50, 100.0)], [(50, 30.0), (100, 31.0)], [(60, 80.0)], others=3)
    shared, cached, naive = figure["data"]
    assert list(naive["x"]) == [50, 100] and list(naive["y"]) == [100, 200]
    assert list(cached["y"]) == [30, 31] and list(shared["y"]) == [80]
    names = [note["text"] for note in figure["layout"]["annotations"]]
    assert {"without the cache", "with the cache", "step shared with 3 others"} <= set(names)
    json.dumps(figure, allow_nan=False, default=list)


def test_one_spoilt_measurement_is_not_what_is_shown():
    lengths, naive, cached = (100, 116, 132, 148), (90.0, 100.0, 1100.0, 120.0), (30.0, 30.0, 31.0, 32.0)
    measured = Measurements(list(zip(lengths, naive, strict=True)), list(zip(lengths, cached, strict=True)))
    shown = speed_value(measured)
    assert (shown["at"], shown["naive_ms"], shown["cached_ms"], shown["ratio"]) == ("at 148 tokens", 120, 32, 3.75)
    assert shown["measured"] == "middle of the last 3"
    first = speed_value(Measurements(measured.naive[:1], measured.cached[:1]))
    assert (first["ratio"], first["measured"]) == (3, "measured once")


def test_a_cache_that_does_not_pay_is_not_talked_up():
    assert "does not pay yet" in explanation(20, 30.0, 31.0, None)
    crossed_at = crossing([(100, 20.0), (200, 40.0)], [(100, 30.0), (200, 30.0)])
    assert "crossed at 150" in explanation(200, 90.0, 31.0, crossed_at)


@pytest.mark.parametrize(("value", "ceiling"), [(0, 1), (0.9, 1), (1.2, 1.5), (61, 80), (450, 600), (999, 1000)])
def test_axes_end_at_round_numbers(value, ceiling):
    assert nice_ceiling(value) == pytest.approx(ceiling)


def lane(name: str, *step_ms: float) -> dict:
    return {"name": name, "step_ms": list(step_ms)}


def test_the_races_clocks_add_up_and_its_steps_stand_at_their_lengths():
    lanes = [lane("naive", 100.0, 200.0, 300.0), lane("cached", 50.0)]
    naive, cached = race_figures.clocks(lanes, 4)["data"]
    assert list(naive["y"]) == pytest.approx([0, 0.1, 0.3, 0.6]) and list(cached["y"]) == pytest.approx([0, 0.05])
    (naive,) = race_figures.steps(lanes, 10, 4)["data"]
    assert (naive["x"], naive["y"]) == ([11, 12], [200.0, 300.0])


def test_names_at_the_ends_of_lines_keep_apart():
    lanes = [lane(name, *[100.0 + n] * 4) for n, name in enumerate(TITLES)]
    names = race_figures.clocks(lanes, 4)["layout"]["annotations"][1:]
    top = race_figures.clocks(lanes, 4)["layout"]["yaxis"]["range"][1]
    heights = sorted(race_figures.PLOT * name["y"] / top + name["yshift"] for name in names)
    assert len(names) == len(TITLES)
    assert all(above - below >= race_figures.LINE - 0.01 for below, above in itertools.pairwise(heights))


def test_the_gap_is_a_staircase_from_lane_to_lane():
    parts = [{"cause": "a", "seconds": 3.0}, {"cause": "b", "seconds": -0.5}]
    taken_apart = {"from": "naive", "to": "cached", "from_s": 4.0, "to_s": 1.5, "parts": parts}
    (bars,) = race_figures.gap(taken_apart)["data"]
    assert bars["base"] == [0, 1.0, 1.5, 0] and bars["x"] == [4.0, 3.0, -0.5, 1.5]
    assert bars["text"][2] == "−0.50 s"


def test_the_gaps_axis_holds_a_step_above_the_first_lane():
    parts = [{"cause": "a", "seconds": -1.0}, {"cause": "b", "seconds": 3.5}]
    taken_apart = {"from": "naive", "to": "cached", "from_s": 4.0, "to_s": 1.5, "parts": parts}
    assert race_figures.gap(taken_apart)["layout"]["xaxis"]["range"] == [0, 5.0]


def test_plotly_accepts_every_property_of_every_figure():
    """The figures are plain data; here plotly's own schema checks them (it knows no CSS variables)."""
    requests = [span(1, -20, -5), span(2, -10, client=7)]
    probes = [{"length": 40, "naive_ms": 90.0, "cached_ms": 30.0}]
    drawn = [
        cache_figure(),
        timeline(requests, [(NOW - 5, 12.0)], assign_lanes(requests, {}, NOW), NOW, 30),
        figures.speed([(100, 200.0)], [(50, 30.0)], [(60, 80.0)], others=3),
        figures.speed_of_others(probes),
        race_figures.clocks([lane("naive", 100.0, 200.0), lane("shared", 50.0)], 4),
        race_figures.steps([lane("naive", 100.0, 200.0), lane("shared", 50.0)], 10, 4),
        race_figures.gap({"from": "naive", "to": "cached", "from_s": 4.0, "to_s": 1.5, "parts": []}),
    ]
    for figure in drawn:
        text = json.dumps(figure, allow_nan=False)
        go.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", text)))
