"""Memory runs out, in the pass or where the pool grows: less is done at a time, and nobody gets other tokens for it."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, build
from reference import assert_greedy
from running_app import eventually
from test_core import make_core, make_sequences

from engine import kv_cache, scheduler
from engine.core import EngineCore
from engine.errors import LoadingError
from engine.kv_cache import LayerShape
from engine.memory import NO_ROOM, NO_ROOM_FOR_RACE, fitting_tokens
from engine.params import SamplingParams
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import StartRace, StepReport

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build(FAMILIES["llama"]()))


class Memory:
    """Lets a pass fail that has more than so many rows and chunks, after it has written all over the cache."""

    def __init__(self, monkeypatch, error: Exception):
        self.most, self.failed = 99, 0
        step = ModelRunner.step

        def limited(runner, cache, token_ids, positions, chunks):
            done = step(runner, cache, token_ids, positions, chunks)
            if len(token_ids) + len(chunks) > self.most:
                self.failed += 1
                raise error
            return done

        monkeypatch.setattr(ModelRunner, "step", limited)


def run(core: EngineCore, most: int = 2000) -> list[StepReport]:
    reports = []
    while core.has_work:
        reports.append(core.step())
        live = core.scheduler.live
        assert [s.slot for s in core.scheduler.running] == list(range(len(core.scheduler.running)))
        assert len({s.slot for s in live} | set(core.scheduler.retained)) == len(live) + len(core.scheduler.retained)
        assert all(0 <= s.cached_tokens <= s.length and s.max_length <= core.cache.positions for s in live)
        assert len(reports) < most
    return reports


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_the_newest_wait_again_and_everybody_has_the_naive_tokens(runner, monkeypatch, error):
    memory, core = Memory(monkeypatch, error), make_core(runner, max_batch_size=4)
    sequences = make_sequences(9)
    for sequence in sequences:
        core.submit(sequence)
    for _ in range(3):
        core.step()
    memory.most = 2
    reports = run(core)
    put_back = [number for report in reports for number in report.put_back]
    assert put_back[:2] == [3, 2], "the newest first, then the next"
    assert max(report.record.batch_size for report in reports) == 2
    assert not any(report.failures for report in reports)
    for sequence in sequences:
        assert len(sequence.output_ids) == sequence.params.max_new_tokens
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)
    assert memory.failed < 6, "who was put back is not tried again in each step"


def test_who_was_put_back_is_in_line_again_as_visitors_see_it(tiny_engine, monkeypatch):
    engine = tiny_engine()
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
    expected = engine.submit("second", params).result(60).token_ids
    first, second = engine.submit("first", params), engine.submit("second", params)
    for generation in (first, second):
        next(iter(generation))
    Memory(monkeypatch, ERRORS[0]).most = 1
    eventually(lambda: second.state == "waiting", every=0.001)
    assert second.position == 1 and second.events and not first.done
    assert second.result(60).token_ids == expected
    assert not second.resumed and engine.snapshot()["totals"]["restarts"] == 0


def test_what_is_retained_goes_first(runner, monkeypatch):
    memory, core = Memory(monkeypatch, ERRORS[0]), make_core(runner)
    for client in range(3):
        core.submit(Sequence(client, [client] * 60, SamplingParams(max_new_tokens=4), 0, client=client))
    run(core)
    assert len(core.scheduler.retained) == 3
    before = core.cache.allocated_bytes
    pair = [Sequence(10 + n, [n, 7, 9], SamplingParams(max_new_tokens=30), 0) for n in range(2)]
    for sequence in pair:
        core.submit(sequence)
    core.step()
    memory.most = 1
    monkeypatch.setattr(scheduler.Scheduler, "fitted", lambda self: setattr(memory, "most", 99))
    give_up = core.scheduler.shrink
    monkeypatch.setattr(core.scheduler, "shrink", lambda: setattr(memory, "most", 2) or give_up())
    report = core.step()
    assert core.scheduler.retained == {} and core.cache.allocated_bytes < before / 2
    assert report.put_back == [] and len(core.scheduler.running) == 2
    run(core)
    for sequence in pair:
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_who_is_alone_and_does_not_fit_is_told_and_the_next_is_served(runner, monkeypatch):
    memory, core = Memory(monkeypatch, ERRORS[1]), make_core(runner, max_batch_size=1)
    first, second = make_sequences(2)
    core.submit(first)
    core.submit(second)
    memory.most = 0
    fitting = runner.step
    monkeypatch.setattr(runner, "step", lambda cache, ids, at, chunks: fitting(cache, ids, at, chunks))
    fail = core._fail
    monkeypatch.setattr(core, "_fail", lambda *args: setattr(memory, "most", 99) or fail(*args))
    (report, *_) = run(core)
    assert [(failure.request_id, failure.message) for failure in report.failures] == [(0, NO_ROOM)]
    assert_greedy(runner, second.prompt_ids, second.output_ids)
    assert len(second.output_ids) == second.params.max_new_tokens


@pytest.mark.parametrize("fits", [0, 3])
def test_a_pool_that_cannot_grow_keeps_those_who_are_in_it(runner, monkeypatch, fits):
    """It fails in whichever layer: the layers before have grown already, the others have not."""
    core = make_core(runner, cache_tokens=8192, max_context=1024)
    small = Sequence(0, list(range(40)), SamplingParams(max_new_tokens=60), 0)
    large = Sequence(1, list(range(200)), SamplingParams(max_new_tokens=300), 0)
    core.submit(small)
    for _ in range(9):
        core.step()
    zeros, made = kv_cache._zeros, []

    def limited(shape, dim, slots, positions):
        made.append(positions)
        if positions > 128 and sum(made_ > 128 for made_ in made) > fits:
            raise ERRORS[1]
        return zeros(shape, dim, slots, positions)

    monkeypatch.setattr(kv_cache, "_zeros", limited)
    core.submit(large)
    reports = [core.step() for _ in range(10)]
    assert all(report.record.batch_size == 1 for report in reports) and core.cache.positions == 128
    monkeypatch.setattr(kv_cache, "_zeros", zeros)
    run(core)
    for sequence in (small, large):
        assert len(sequence.output_ids) == sequence.params.max_new_tokens
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


@pytest.mark.parametrize("fits", [0, 3])
def test_a_pool_that_cannot_even_shrink_is_used_as_far_as_it_goes(runner, monkeypatch, fits):
    core = make_core(runner, cache_tokens=4096, max_context=512)
    for client in range(3):
        core.submit(Sequence(client, [client] * 150, SamplingParams(max_new_tokens=4), 0, client=client))
    run(core)
    sequences = [Sequence(10 + n, [n, 7, 9], SamplingParams(max_new_tokens=30), 0) for n in range(4)]
    core.submit(sequences[0])
    core.step()
    zeros, made = kv_cache._zeros, []

    def limited(*args):
        made.append(args)
        if len(made) > fits:
            raise ERRORS[0]
        return zeros(*args)

    monkeypatch.setattr(kv_cache, "_zeros", limited)
    core.scheduler.shrink()
    assert len(made) == fits + 1
    monkeypatch.setattr(kv_cache, "_zeros", zeros)
    core.scheduler.rows = 4
    for sequence in sequences[1:]:
        core.submit(sequence)
    run(core)
    for sequence in sequences:
        assert len(sequence.output_ids) == 30
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_rows_come_back_one_by_one(runner, monkeypatch):
    monkeypatch.setattr(scheduler, "STEPS_PER_ROW", 5)
    memory, core = Memory(monkeypatch, ERRORS[0]), make_core(runner, prefill_chunk=256)
    for sequence in make_sequences(4):
        core.submit(Sequence(sequence.request_id, sequence.prompt_ids, SamplingParams(max_new_tokens=100), 0))
    core.step()
    memory.most = 2
    core.step()
    assert core.scheduler.rows == len(core.scheduler.live) == 2
    memory.most = 99
    rows = [(core.step(), len(core.scheduler.live))[1] for _ in range(14)]
    assert rows == sorted(rows) and rows[0] == 2 and rows[-1] == 4


def test_choosing_scoring_and_sharing_may_run_out_as_well(runner, monkeypatch):
    """What fails behind the pass has not happened, and what only would have saved time is left out."""
    core = make_core(runner, prefill_chunk=16)
    sequences = make_sequences(3)
    scored = SamplingParams(max_new_tokens=5, prompt_logprobs=True)
    sequences.append(Sequence(3, list(range(50)), scored, 0))
    expected = Sequence(3, list(range(50)), scored, 0)
    alone = make_core(runner, prefill_chunk=16)
    alone.submit(expected)
    run(alone)
    core.public.declare([list(range(40))])
    monkeypatch.setattr(kv_cache.KVCache, "read", lambda *_: (_ for _ in ()).throw(ERRORS[0]))
    from engine import core as module

    choose, calls = module.choose, []

    def limited(logits, rows, histories):
        calls.append(len(rows))
        if len(rows) > 1:
            raise ERRORS[0]
        return choose(logits, rows, histories)

    monkeypatch.setattr(module, "choose", limited)
    for sequence in sequences:
        core.submit(sequence)
    run(core)
    assert any(count > 1 for count in calls) and core.public.tokens == 0
    assert sequences[3].prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-3)
    for sequence in sequences:
        assert len(sequence.output_ids) == sequence.params.max_new_tokens
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_a_race_gives_way_to_answers_and_fails_alone(runner, monkeypatch):
    memory, core = Memory(monkeypatch, ERRORS[0]), make_core(runner)
    sequence = Sequence(0, [1, 2, 3], SamplingParams(max_new_tokens=40), 0, probe=True)
    core.submit(sequence)
    core.start_race(StartRace(7, list(range(20)), 30))
    core.step()
    assert core.measuring.race
    memory.most = 0
    give_up = core.measuring.give_up
    monkeypatch.setattr(core.measuring, "give_up", lambda report: setattr(memory, "most", 99) or give_up(report))
    report = core.step()
    assert [(failure.request_id, failure.message) for failure in report.failures] == [(7, NO_ROOM_FOR_RACE)]
    naive = runner.naive
    monkeypatch.setattr(runner, "naive", lambda *_, **__: (_ for _ in ()).throw(ERRORS[1]))
    core.start_race(StartRace(8, list(range(20)), 30))
    failures = [failure for report in run(core) for failure in report.failures]
    assert [(failure.request_id, failure.message) for failure in failures] == [(8, NO_ROOM_FOR_RACE)]
    assert not sequence.probe, "a naive measurement that did not fit is not tried again"
    monkeypatch.setattr(runner, "naive", naive)
    assert len(sequence.output_ids) == 40
    assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_a_cache_is_as_large_as_the_fullest_gpu_allows(monkeypatch):
    free = {torch.device("cuda", 0): 1_000_000, torch.device("cuda", 1): 300_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 10**12))
    layers = [LayerShape(2, 16, 16, torch.float16, device) for device in free]  # 128 bytes a token each
    assert fitting_tokens(100_000, layers) == int(0.8 * 300_000 / 128)
    assert fitting_tokens(500, layers) == 500
    assert fitting_tokens(100_000, [replace(layer, device=torch.device("cpu")) for layer in layers]) == 100_000
    free[layers[0].device] = 1000
    with pytest.raises(LoadingError, match="leaves no room for a cache"):
        fitting_tokens(100_000, layers)
