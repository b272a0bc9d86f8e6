"""The race: every lane makes the naive loop's tokens, and its times add up."""

import threading

import pytest
import torch
from families import FAMILIES, build
from reference import assert_greedy
from transformers import DynamicCache

from engine.comparison import Lane, check_lanes, first_difference
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gap import CAUSES, LANES, LaneTimes, take_apart
from engine.params import SamplingParams
from engine.race import TRIAL_STEPS
from engine.runner import ModelRunner
from engine.wire import RaceStep, StartRace

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = list(range(30))
DRAWN = SamplingParams(temperature=0.9, top_k=40)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build(FAMILIES["llama"]()))


def make_core(runner: ModelRunner) -> EngineCore:
    return EngineCore(runner, EngineConfig(max_context=256), frozenset())


def run(runner, start: StartRace) -> list[RaceStep]:
    core = make_core(runner)
    core.start_race(start)
    steps: list[RaceStep] = []
    while core.has_work:
        steps += core.step().race_steps
    assert not [thread for thread in threading.enumerate() if thread.name == "kvscope-generate"]
    return steps


def tokens(steps: list[RaceStep]) -> dict[str, list[int]]:
    names = dict.fromkeys(step.lane for step in steps)
    return {name: [step.token_id for step in steps if step.lane == name and not step.trial] for name in names}


@pytest.mark.parametrize("warm_up", [True, False])
def test_all_lanes_make_the_naive_tokens(runner, warm_up):
    steps = run(runner, StartRace(1, PROMPT, 20, tuple(LANES), warm_up=warm_up))
    made = tokens(steps)
    assert set(made) == set(LANES) and all(ids == made["naive"] for ids in made.values())
    assert_greedy(runner, PROMPT, made["naive"])
    assert steps[-1].state == "finished" and all(step.state == "running" for step in steps[:-1])
    trials = [step.lane for step in steps if step.trial]
    assert sorted(trials) == sorted([*LANES] * TRIAL_STEPS)
    assert [step.trial for step in steps] == sorted((step.trial for step in steps), reverse=warm_up)


def test_drawn_tokens_are_the_same_in_every_lane_but_generates(runner):
    made = tokens(run(runner, StartRace(1, PROMPT, 20, tuple(LANES), DRAWN, seed=5)))
    drawn = made.pop("generate")
    assert len(drawn) == 20 and all(ids == made["naive"] for ids in made.values())
    assert made["naive"] != tokens(run(runner, StartRace(1, PROMPT, 20, ("naive", "cached"), DRAWN, seed=6)))["naive"]


def test_steps_say_what_was_forward_and_whom_they_served(runner):
    steps = [step for step in run(runner, StartRace(1, PROMPT, 6, tuple(LANES))) if not step.trial]
    assert all(0 < step.forward_ms < step.step_ms for step in steps)
    assert [step.rows for step in steps if step.lane == "shared"] == [1, 8, 8, 8, 8, 8]
    assert {step.rows for step in steps if step.lane != "shared"} == {1}
    assert all(step.logit_gap >= 0 for step in steps)


@pytest.mark.parametrize("after", range(1, 18, 4))
def test_a_cancelled_race_leaves_no_thread_behind(runner, after):
    core = make_core(runner)
    core.start_race(StartRace(1, PROMPT, 8, ("generate", "cached")))
    for _ in range(after):
        core.step()
    core.cancel(1)
    assert not core.has_work
    assert not [thread for thread in threading.enumerate() if thread.name == "kvscope-generate"]


def test_an_error_inside_generate_is_the_races(runner, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no generate")

    monkeypatch.setattr(runner.model, "generate", broken)
    core = make_core(runner)
    core.start_race(StartRace(1, PROMPT, 8, ("cached", "generate")))
    failures = []
    while core.has_work:
        failures += core.step().failures
    assert [(failure.request_id, "no generate" in failure.message) for failure in failures] == [(1, True)]


# ---- arithmetic


def times(name: str, step_ms: float, choice_ms: float = 1.0, rows: int = 1, first_ms: float = 0.0) -> LaneTimes:
    """Ten equal steps, the first of which took `first_ms` longer than its trial."""
    forwards = [step_ms - choice_ms] * 10
    forwards[0] += first_ms
    return LaneTimes(name, [ms + choice_ms for ms in forwards], forwards, [rows] * 10, [step_ms] * 2)


def test_the_gap_is_the_sum_of_its_parts():
    lanes = [
        times("shared", 24, rows=8),
        times("naive_all", 100, first_ms=50),
        times("by_hand", 30, choice_ms=2),
        times("naive", 80, first_ms=20),
        times("cached", 20),
        times("generate", 31),
    ]
    gap = take_apart(lanes, warmed_up=False)
    assert (gap["from"], gap["to"]) == ("naive_all", "shared")
    assert gap["from_s"] == pytest.approx(1.05) and gap["to_s"] == pytest.approx(0.03)
    parts = {part["cause"]: part["seconds"] for part in gap["parts"]}
    assert sum(parts.values()) == pytest.approx(gap["from_s"] - gap["to_s"])
    assert parts["first-call warm-up"] == pytest.approx(0.05)
    assert parts["logits nobody reads"] == pytest.approx(0.2)
    assert parts["reading the text again"] == pytest.approx(0.51)
    assert parts["generate()'s own code"] == pytest.approx(-0.02)
    assert parts["copying the cache"] == pytest.approx(0.11)
    assert parts["not sharing the steps"] == pytest.approx(0.19 - 0.02875)
    assert parts["choosing the tokens"] == pytest.approx(0.01 - 0.00125)


def test_what_was_not_raced_is_not_told_apart():
    gap = take_apart([times("naive", 80), times("shared", 24, rows=8)], warmed_up=True)
    assert [part["cause"] for part in gap["parts"]] == [
        "reading the text again, copying the cache, not sharing the steps",
        "choosing the tokens",
    ]
    assert set(CAUSES) < set(LANES)


def test_lanes_are_checked():
    check_lanes(["shared", "naive"])
    for wrong in ([], ["naive"], ["naive", "naive"], ["naive", "fast"], ["naive", 3]):
        with pytest.raises(ValueError, match="lanes must be at least two different ones of naive_all, naive"):
            check_lanes(wrong)


def test_where_lanes_part_is_told_with_the_distance_of_the_best_logits():
    lanes = [Lane(name, None, 3) for name in ("naive", "cached", "generate")]
    for lane, ids in zip(lanes, ([1, 2, 3], [1, 2, 4], [1, 5, 3]), strict=True):
        lane.token_ids, lane.logit_gaps = list(ids), [1.0, 0.5, 0.25]
    assert first_difference(lanes) == {"index": 2, "lanes": ["naive", "cached"], "tokens": [3, 4], "logit_gap": 0.25}
    assert first_difference([lanes[0], lanes[2]], drawn=True) is None


def test_transformers_cache_reads_only_what_is_new(runner):
    cache = DynamicCache(config=runner.model.config)
    for length in (10, 11, 30):
        expected = runner.naive(PROMPT[:length])
        assert torch.allclose(runner.append(cache, PROMPT[:length]), expected, atol=1e-4)
        assert cache.get_seq_length() == length
