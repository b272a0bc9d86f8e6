"""Nothing of one visitor reaches another: not by the cache, what is left or spoilt in it, nor by what is shown."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from families import FAMILIES, VOCABULARY, build
from reference import assert_greedy, run_until_done
from running_app import eventually
from test_core import make_core

from engine import SamplingParams
from engine.core import EngineCore
from engine.lean import LeanForward
from engine.runner import ModelRunner
from engine.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

WAIT_S = 60
NAN = float("nan")


@pytest.fixture(scope="module", params=["llama", "llama, on a GPU", "gpt2", "mistral, window", "bloom"])
def any_runner(request) -> ModelRunner:
    """The ragged forwards with and without windows, and the stock one with positions learnt and as biases."""
    runner = ModelRunner(build(FAMILIES[request.param.removesuffix(", on a GPU")]()))
    if request.param.endswith(", on a GPU"):  # by the forward that it would use
        runner.lean = LeanForward(runner.model)
    return runner


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build(FAMILIES["llama"]()))


def held(core: EngineCore) -> dict[int, int]:
    """How many leading tokens of each slot belong to somebody."""
    live = {sequence.slot: sequence.cached_tokens for sequence in core.scheduler.live}
    return {**{slot: len(kept.token_ids) for slot, kept in core.scheduler.retained.items()}, **live}


def fill_unused(core: EngineCore, value: float) -> None:
    """Everything in the pool that is nobody's."""
    mine = held(core)
    for pool in (*core.cache.keys, *core.cache.values):
        for slot in range(core.cache.slots):
            pool[slot, :, mine.get(slot, 0) :] = value


def spoil(core: EngineCore, sequence: Sequence) -> None:
    for pool in (*core.cache.keys, *core.cache.values):
        pool[sequence.slot, :, : sequence.cached_tokens] = NAN


def alone(runner: ModelRunner, sequence: Sequence) -> list[int]:
    """What it is told by an engine that has never seen anybody else."""
    params = sequence.params
    fresh = Sequence(0, list(sequence.prompt_ids), params, sequence.seed)
    return run_until_done(make_core(runner, max_context=512), [fresh])[0]


class Crowd:
    """Visitors with a secret each, who come, ask on where they left off, and leave in the middle, by one dice."""

    def __init__(self, visitors: int, turns: int):
        self.dice = random.Random(5)
        self.sequences: list[Sequence] = []
        self._chats = {visitor: self._secret() for visitor in range(visitors)}
        self._to_come = [visitor for visitor in range(visitors) for _ in range(turns)]
        self.dice.shuffle(self._to_come)

    def _secret(self) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(self.dice.choice((3, 20, 45, 70)))]

    def come(self, running: set[int | None]) -> Iterator[Sequence]:
        """Whoever asks next, unless its last question is still being answered."""
        visitor = next((visitor for visitor in self._to_come if visitor not in running), None)
        if visitor is None:
            return
        self._to_come.remove(visitor)
        earlier = [sequence for sequence in self.sequences if sequence.client == visitor]
        prompt = [*(earlier[-1].token_ids if earlier else self._chats[visitor]), *self._secret()[:9]]
        sampled = {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2} if self.dice.random() < 0.5 else {}
        params = SamplingParams(max_new_tokens=self.dice.randrange(5, 30), **sampled)
        self.sequences.append(Sequence(len(self.sequences), prompt, params, seed=len(self.sequences), client=visitor))
        yield self.sequences[-1]

    @property
    def over(self) -> bool:
        return not self._to_come


def test_nobody_is_told_anything_but_what_an_engine_of_their_own_would_say(any_runner):
    core = make_core(any_runner, max_batch_size=4, cache_tokens=4096, max_context=512)
    crowd, failed, left = Crowd(visitors=9, turns=4), set(), set()
    while core.has_work or not crowd.over:
        if crowd.dice.random() < 0.3:
            for sequence in crowd.come({s.client for s in [*core.scheduler.live, *core.scheduler.waiting]}):
                core.submit(sequence)
        live = core.scheduler.live
        if len(live) > 2 and crowd.dice.random() < 0.03:
            left.add(live[0].request_id)
            core.cancel(live[0].request_id)
        elif len(live) > 2 and crowd.dice.random() < 0.02 and live[1].cached_tokens:
            spoil(core, live[1])
        fill_unused(core, crowd.dice.choice((1e4, -1e4)))
        failed |= {failure.request_id for failure in core.step().failures}
        assert not any(pool.isnan().any() for pool in (*core.cache.keys, *core.cache.values))
    assert len(crowd.sequences) == 36 and len(failed) > 1 and len(left) > 2
    assert sum(sequence.reused_tokens > 0 for sequence in crowd.sequences) > 9
    for sequence in crowd.sequences:
        whole = sequence.request_id not in failed | left
        expected = alone(any_runner, sequence)
        assert sequence.output_ids == (expected if whole else expected[: len(sequence.output_ids)])


@pytest.mark.parametrize("victim", [1, 2], ids=["speaks", "reads"])
def test_a_spoilt_row_or_chunk_fails_at_once_beside_rows_and_chunks_and_leaves_a_clean_slot(runner, victim):
    """In one ragged pass with two rows and two chunks of prompts; each is where its neighbours' numbers are made."""
    assert runner.lean
    core = make_core(runner, prefill_chunk=32)
    sequences = [Sequence(n, [n + 1] * 9, SamplingParams(max_new_tokens=40), 0, client=n) for n in range(2)]
    sequences += [Sequence(n, list(range(n, n + 100)), SamplingParams(max_new_tokens=9), 0, client=n) for n in (2, 3)]
    for sequence in sequences[:2]:
        core.submit(sequence)
    core.step()
    for sequence in sequences[2:]:
        core.submit(sequence)
    core.step()
    assert len(core.scheduler.running) == len(core.scheduler.prefilling) == 2
    spoil(core, sequences[victim])
    report = core.step()
    assert [failure.request_id for failure in report.failures] == [victim]
    assert "not finite" in report.failures[0].message
    assert report.record.batch_size == 2 and report.record.prefill_tokens == 32
    heirs = [Sequence(10 + n, [40 + n] * 70, SamplingParams(max_new_tokens=9), 0) for n in range(3)]
    run_until_done(core, heirs)
    for sequence in [*sequences[:victim], *sequences[victim + 1 :], *heirs]:
        assert len(sequence.output_ids) == sequence.params.max_new_tokens
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_a_public_beginning_is_not_kept_as_a_fault_has_left_it(runner):
    """It would be lent to everybody, for good."""
    core = make_core(runner, prefill_chunk=32)
    public = list(range(50))
    core.public.declare([public])
    first = Sequence(0, [*public, 7], SamplingParams(max_new_tokens=5), 0)
    core.submit(first)
    core.step()
    spoil(core, first)
    assert [failure.request_id for failure in core.step().failures] == [0] and core.public.tokens == 0
    # One that no logit has shown.
    core.submit(second := Sequence(1, [*public, 8], SamplingParams(max_new_tokens=5), 0))
    core.step()
    second.cached_tokens = 50
    core.cache.keys[0][second.slot, 0, 3, 0] = NAN
    core.public.keep(second)
    assert core.public.tokens == 0


# ---- what is shown


def numbers_in_a_row(value: Any) -> Iterator[list[int]]:
    """Every list of whole numbers, however deep."""
    if isinstance(value, list | tuple) and len(value) > 2 and all(type(part) is int for part in value):
        yield list(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from numbers_in_a_row(part)


def test_snapshots_history_and_logs_have_lengths_and_times_only(tiny_engine, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    engine = tiny_engine(max_context=4096, max_batch_size=4)
    secrets = [f"my {n}. secret is {chr(ord('q') + n) * 9}" for n in range(8)]
    shown = []
    params = SamplingParams(max_new_tokens=80, ignore_eos=True, stop="never", prompt_logprobs=True, top_n_tokens=2)
    generations = [engine.submit(s, params, client=f"visitor {s}", probe=True) for s in secrets]
    race = engine.compare(secrets[0], 30, client=secrets[1])
    engine.submit([{"role": "user", "content": secrets[2]}], SamplingParams(max_new_tokens=2000)).cancel()
    while not all(generation.done for generation in generations):
        shown.append(engine.snapshot())
        generations[-1].wait(0.1)
    race.result(WAIT_S)
    eventually(lambda: not engine.snapshot()["queue"]["running"])
    shown += [engine.snapshot(), engine.timeline(10, 0), engine.timeline(60, 0)]
    assert len(shown) > 3 and any(len(snapshot.get("requests", [])) == 9 for snapshot in shown)
    text = json.dumps(shown) + caplog.text + "".join(capfd.readouterr())
    assert not [word for word in ("secret", "visitor", *(s[-9:] for s in secrets)) if word in text]
    for generation in generations:
        assert len(generation.text) > 20 and json.dumps(generation.text)[1:-1] not in text
    assert list(numbers_in_a_row(shown)) == []


def test_who_types_what_somebody_else_has_typed_cannot_tell(tiny_engine):
    """Same lengths, same steps, same counters as for a text that nobody has typed before."""
    engine = tiny_engine(max_context=4096, prefill_chunk=32)
    secret, other = "s" * 50 + "the number is 4711" * 5, "o" * 50 + "nobody has said so" * 5
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    def ask(text: str, client: str) -> dict[str, Any]:
        before = engine.snapshot()["totals"]
        generation = engine.submit(text, params, client=client)
        generation.result(WAIT_S)
        eventually(lambda: not engine.snapshot()["queue"]["running"])
        span, totals = generation.span(), engine.snapshot()["totals"]
        counted = {name: totals[name] - before[name] for name in totals}
        return {**counted, "chunks": [tokens for _, tokens in span["chunks"]], "reused": span["reused_tokens"]}

    first, stranger, another = ask(secret, "ann"), ask(secret, "bob"), ask(other, "cy")
    assert first == stranger == another
    assert stranger["chunks"] == [32, 32, 32, 32, 12] and stranger["reused"] == 0
    assert ask(secret, "ann")["reused"] == 139, "her own"
    assert ask(secret, "cy") == stranger
