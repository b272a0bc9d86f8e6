"""Faults that are made to happen: workers killed and stuck, and what breaks in one request on its way."""

import os
import signal
import threading
import time
from functools import partial

import pytest
from running_app import eventually

from engine import EngineStopped, GenerationError, LoadingError, SamplingParams, worker
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

WAIT_S = 120
LONG = "a long prompt " * 200


def params(seed: int, tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True, seed=seed)


# ---- workers that are killed or stuck


def test_a_worker_killed_or_stuck_while_it_reads_speaks_and_races_is_replaced(tiny_engine, monkeypatch):
    monkeypatch.setattr("engine.workers.LOADING_PATIENCE", 100)  # a busy machine takes its time to load anything
    engine = tiny_engine("process", max_context=4096, prefill_chunk=16, watchdog_s=3.0)
    prompts = ["short", "another", LONG]
    expected = [engine.submit(p, params(i, 400)).result(WAIT_S).token_ids for i, p in enumerate(prompts)]
    for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
        race = engine.compare("The lighthouse", 450)
        generations = [engine.submit(p, params(i, 400)) for i, p in enumerate(prompts)]
        *speaking, reading = generations
        for condition in (lambda race=race: race.begun, *(partial(bool, g.events) for g in speaking)):
            eventually(condition, every=0.001)
        assert 0 < reading.prefilled < len(LONG) and not race.done and not any(g.done for g in speaking)
        os.kill(engine._workers.current.pid, number)
        assert [generation.result(WAIT_S).token_ids for generation in generations] == expected
        assert all(generation.resumed for generation in generations)
        with pytest.raises(GenerationError, match="engine restarted during this race. Start it again"):
            race.result(WAIT_S)
        assert engine.snapshot()["totals"]["restarts"] == restarts
    assert engine.compare("The lighthouse", 20).result(WAIT_S)["identical"]


def test_a_stuck_thread_cannot_be_replaced_and_says_so(tiny_engine, monkeypatch):
    monkeypatch.setattr("engine.engine.PATIENCE_S", 0.05)
    engine, released, held = tiny_engine(watchdog_s=0.3), threading.Event(), threading.Event()
    monkeypatch.setattr("engine.core.choose", lambda *_: (held.set(), released.wait(WAIT_S), 1 / 0))
    generation = engine.submit("abc", params(1))
    with pytest.raises(GenerationError, match="a thread cannot be ended: the program has to be started again"):
        generation.result(WAIT_S)
    assert held.is_set()
    with pytest.raises(EngineStopped, match="does not answer any more"):
        engine.submit("abc")
    released.set()
    eventually(lambda: not any(thread.name == "kvscope-worker" for thread in threading.enumerate()))


def test_an_idle_worker_may_be_silent_and_so_may_one_that_is_not_watched(tiny_engine):
    idle, unwatched = tiny_engine(watchdog_s=0.1), tiny_engine(watchdog_s=0)
    threads = [thread for thread in threading.enumerate() if thread.name == "kvscope-watchdog"]
    assert len(threads) == 1
    assert unwatched.submit("abc", params(1)).result(WAIT_S).token_ids
    looks = []
    owing = idle._workers.owing
    idle._watchdog._owing = lambda: looks.append(owing()) or looks[-1]
    eventually(lambda: len(looks) > 30)
    assert not any(looks) and idle.ready
    assert idle.submit("abc", params(1)).result(WAIT_S).token_ids


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where, deaths", [("pass", 2), ("admission", 3)])
def test_what_every_worker_dies_of_is_given_up_and_a_bystander_goes_on(tiny_engine, monkeypatch, where, deaths):
    """It never gets as far as a report, and in the second case not even to its beginning."""
    engine = tiny_engine(max_context=4096)
    expected = engine.submit("abc", params(3, 20)).result(WAIT_S).token_ids
    step, seat = ModelRunner.step, Scheduler._seat

    def deadly_step(runner, cache, token_ids, positions, chunks):
        assert where != "pass" or not any(chunk.token_ids == [7] for chunk in chunks)
        return step(runner, cache, token_ids, positions, chunks)

    def deadly_seat(scheduler, sequence):
        assert where != "admission" or sequence.prompt_ids != [7]
        seat(scheduler, sequence)

    monkeypatch.setattr(ModelRunner, "step", deadly_step)
    monkeypatch.setattr(Scheduler, "_seat", deadly_seat)
    beside = engine.submit("beside", params(4, 4000))
    eventually(lambda: len(beside.events) > 3)
    fatal = engine.submit([7], params(1))
    with pytest.raises(GenerationError, match="died twice"):
        fatal.result(WAIT_S)
    assert beside.finish_reason == "error"
    assert engine.submit("abc", params(3, 20)).result(WAIT_S).token_ids == expected
    assert engine.snapshot()["totals"]["restarts"] == deaths


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_replacement_that_cannot_be_loaded_is_tried_again_and_nobody_waits_for_ever(tiny_engine, monkeypatch):
    engine = tiny_engine()
    expected = engine.submit("abc", params(1)).result(WAIT_S).token_ids
    made, load, step = [], worker.load, ModelRunner.step

    def fails(*_):
        made.append(time.monotonic())
        raise LoadingError("The disk is gone: bring it back.")

    monkeypatch.setattr(worker, "load", fails)
    monkeypatch.setattr(ModelRunner, "step", lambda *_: 1 / 0)
    with pytest.raises(GenerationError, match="died twice"):
        engine.submit("abc", params(1)).result(WAIT_S)
    eventually(lambda: len(made) == 3)
    assert made[1] - made[0] < 0.9 < made[2] - made[1], "the first two at once, then after a pause that grows"
    assert engine.snapshot()["worker"] == "restarting" and engine.snapshot()["error"].startswith("The disk is gone")
    monkeypatch.setattr(worker, "load", load)
    monkeypatch.setattr(ModelRunner, "step", step)
    assert engine.submit("abc", params(1)).result(WAIT_S).token_ids == expected
    assert engine.snapshot()["error"] is None


def test_a_report_that_cannot_be_taken_in_costs_the_worker_and_not_the_answers(tiny_engine, monkeypatch):
    engine = tiny_engine()
    expected = engine.submit("abc", params(1, 200)).result(WAIT_S).token_ids
    generation, record = engine.submit("abc", params(1, 200)), engine.telemetry.record

    def once(*args):
        monkeypatch.setattr(engine.telemetry, "record", record)
        raise KeyError("a bug")

    next(iter(generation))
    monkeypatch.setattr(engine.telemetry, "record", once)
    assert generation.result(WAIT_S).token_ids == expected and generation.resumed


def test_drained_requests_that_outlast_the_limit_are_told(tiny_engine):
    engine = tiny_engine(max_context=4096, drain_s=0.2)
    quick, slow, race = engine.submit("a", params(1, 2)), engine.submit("b", params(1, 4000)), engine.compare("c", 500)
    next(iter(slow))
    engine.drain()
    assert quick.result(WAIT_S).finish_reason == "length"
    for refused in (lambda: engine.submit("late"), lambda: engine.compare("late", 3)):
        with pytest.raises(EngineStopped, match="shutting down. Please come back in a minute"):
            refused()
    assert not engine.ready and engine.snapshot()["worker"] == "draining"
    engine.close()
    for request in (slow, race):
        with pytest.raises(GenerationError, match="had to shut down before this was finished"):
            request.result(WAIT_S)
