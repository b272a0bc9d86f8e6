"""The batched, cached engine must give the naive loop's tokens, whoever joins, leaves, grows or fails."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, build
from reference import assert_greedy, run_until_done

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.params import SamplingParams
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import StartRace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build(FAMILIES["llama"]()))


def make_core(runner: ModelRunner, eos: frozenset[int] = frozenset(), **settings) -> EngineCore:
    defaults = {"max_batch_size": 4, "prefill_chunk": 16, "cache_tokens": 1024, "max_context": 256}
    return EngineCore(runner, EngineConfig(**{**defaults, **settings}), eos)


def make_sequences(count: int, seed: int = 1, **fields) -> list[Sequence]:
    """Prompts of 1 to 60 tokens, 1 to 40 new ones."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    return [
        Sequence(
            index,
            torch.randint(0, VOCABULARY, (number(1, 61),), generator=generator).tolist(),
            SamplingParams(max_new_tokens=number(1, 41)),
            seed=index,
            **fields,
        )
        for index in range(count)
    ]


def test_mixed_batch_gives_the_naive_tokens(runner):
    sequences = make_sequences(12)
    outputs = run_until_done(make_core(runner), sequences, join_every=3)
    for sequence in sequences:
        output = outputs[sequence.request_id]
        assert len(output) == sequence.params.max_new_tokens
        assert_greedy(runner, sequence.prompt_ids, output)
    assert len({tuple(output) for output in outputs.values()}) > 6, "a model that always says the same proves nothing"


def test_rows_leave_at_once_and_the_running_ones_stay_together(runner):
    core = make_core(runner, max_batch_size=4)
    for sequence in make_sequences(9):
        core.submit(sequence)
    largest = 0
    while core.has_work:
        core.step()
        running = core.scheduler.running
        assert [sequence.slot for sequence in running] == list(range(len(running)))
        slots = [sequence.slot for sequence in core.scheduler.live] + list(core.scheduler.retained)
        assert len(slots) == len(set(slots))
        largest = max(largest, len(running))
    assert largest == 4


def test_long_prompts_are_read_in_chunks_while_others_stream(runner):
    core = make_core(runner, prefill_chunk=16)
    short = Sequence(0, [1, 2, 3], SamplingParams(max_new_tokens=30), seed=0)
    long = Sequence(1, list(range(100)), SamplingParams(max_new_tokens=5), seed=0)
    core.submit(short)
    core.step()
    core.submit(long)
    records = [core.step().record for _ in range(7)]
    assert [record.prefill_tokens for record in records] == [16] * 6 + [4]
    assert all(record.batch_size == 1 for record in records), "the short one must have moved in every step"


def test_a_short_prompt_is_not_stuck_behind_a_long_one(runner):
    core = make_core(runner, prefill_chunk=32)
    long = Sequence(0, list(range(200)), SamplingParams(max_new_tokens=5), seed=0)
    short = Sequence(1, list(range(20)), SamplingParams(max_new_tokens=5), seed=0)
    core.submit(long)
    core.step()
    core.submit(short)
    first, second = core.step(), core.step()
    assert not first.tokens and [token.request_id for token in second.tokens] == [1], "20 tokens, 16 of them at once"
    assert long.cached_tokens == 32 + 16 + 28, "who came first gets at least half of each step"


def test_several_short_prompts_are_read_in_one_step(runner):
    core = make_core(runner, prefill_chunk=64)
    for sequence in (Sequence(n, list(range(n, n + 15)), SamplingParams(max_new_tokens=9), seed=0) for n in range(4)):
        core.submit(sequence)
    assert sorted(token.request_id for token in core.step().tokens) == [0, 1, 2, 3]


def test_admission_never_overruns_the_cache(runner):
    core = make_core(runner, max_batch_size=8, cache_tokens=512, max_context=512)
    sequences = make_sequences(10)
    sequences.insert(4, Sequence(99, list(range(200)), SamplingParams(max_new_tokens=200), seed=0))
    for sequence in sequences:
        core.submit(sequence)
    outputs: dict[int, list[int]] = {sequence.request_id: [] for sequence in sequences}
    admitted: list[int] = []
    while core.has_work:
        for token in core.step().tokens:
            outputs[token.request_id].append(token.token_id)
        assert core.cache.slots * core.cache.positions <= 512
        assert all(sequence.max_length <= core.cache.positions for sequence in core.scheduler.live)
        admitted += [s.request_id for s in core.scheduler.live if s.request_id not in admitted]
    in_order = [sequence.request_id for sequence in sequences if sequence.request_id in admitted]
    assert admitted == in_order, "served in order of arrival"
    for sequence in sequences:
        assert_greedy(runner, sequence.prompt_ids, outputs[sequence.request_id])


def test_next_turn_of_a_chat_reuses_its_own_cache_and_nobody_elses(runner):
    core = make_core(runner)
    first = Sequence(0, list(range(40)), SamplingParams(max_new_tokens=8), seed=0, client=1)
    said = run_until_done(core, [first])[0]
    next_prompt = first.prompt_ids + said + [7, 8, 9]
    stranger = Sequence(1, next_prompt, SamplingParams(max_new_tokens=8), seed=0, client=2)
    nobody = Sequence(2, next_prompt, SamplingParams(max_new_tokens=8), seed=0, client=None)
    own = Sequence(3, next_prompt, SamplingParams(max_new_tokens=8), seed=0, client=1)
    outputs = run_until_done(core, [stranger, nobody, own])
    assert (stranger.reused_tokens, nobody.reused_tokens) == (0, 0)
    assert own.reused_tokens == len(first.prompt_ids + said) - 1, "all but the last token, which was never computed"
    assert outputs[1] == outputs[2] == outputs[3]
    assert_greedy(runner, next_prompt, outputs[3])


def test_reuse_survives_other_visitors_coming_and_going(runner):
    core = make_core(runner, max_batch_size=3)
    chats = {client: list(range(client, client + 30)) for client in range(3)}
    reused = 0
    for turn in range(4):
        batch = [
            Sequence(10 * turn + client, ids, SamplingParams(max_new_tokens=5 + client), seed=0, client=client)
            for client, ids in chats.items()
        ]
        outputs = run_until_done(core, batch, join_every=2)
        for client, sequence in enumerate(batch):
            assert_greedy(runner, sequence.prompt_ids, outputs[sequence.request_id])
            chats[client] = sequence.token_ids + [turn, client]
            reused += sequence.reused_tokens
    assert reused > 200


def test_cancelling_frees_the_row_within_two_steps(runner):
    core = make_core(runner)
    sequences = make_sequences(2)
    sequences = [Sequence(s.request_id, s.prompt_ids, SamplingParams(max_new_tokens=100), 0) for s in sequences]
    for sequence in sequences:
        core.submit(sequence)
    for _ in range(10):
        core.step()
    core.cancel(0)
    report = core.step()
    assert [slot.request_id for slot in report.slots if slot.state == "running"] == [1]
    outputs = [token.token_id for _ in range(5) for token in core.step().tokens]
    assert_greedy(runner, sequences[1].prompt_ids, sequences[1].output_ids)
    assert len(outputs) == 5


def test_cancelling_while_waiting_or_reading(runner):
    core = make_core(runner, max_batch_size=1, prefill_chunk=16)
    reading = Sequence(0, list(range(100)), SamplingParams(max_new_tokens=5), 0)
    waiting = Sequence(1, [5], SamplingParams(max_new_tokens=5), 0)
    for sequence in (reading, waiting):
        core.submit(sequence)
    core.step()
    core.cancel(1)
    core.cancel(0)
    core.cancel(12345)
    assert not core.has_work


def test_stops_at_any_end_token_unless_ignored(runner):
    prompt = list(range(20))
    free = run_until_done(make_core(runner), [Sequence(0, prompt, SamplingParams(max_new_tokens=30), 0)])[0]
    ends = frozenset({free[12], 299})
    first = next(index for index, token in enumerate(free) if token in ends)
    core = make_core(runner, ends)
    stopping = Sequence(0, prompt, SamplingParams(max_new_tokens=30), 0)
    ignoring = Sequence(1, prompt, SamplingParams(max_new_tokens=30, ignore_eos=True), 0)
    outputs = run_until_done(core, [stopping, ignoring])
    assert outputs[0] == free[: first + 1]
    assert outputs[1] == free


def test_a_spoilt_row_fails_alone_and_its_slot_is_clean(runner, monkeypatch):
    core = make_core(runner)
    sequences = [Sequence(i, [i + 1] * 9, SamplingParams(max_new_tokens=20), 0, client=i) for i in range(3)]
    for sequence in sequences:
        core.submit(sequence)
    for _ in range(5):
        core.step()
    spoilt = core.scheduler.running[1]
    for pool in (*core.cache.keys, *core.cache.values):
        pool[spoilt.slot] = float("nan")
    report = core.step()
    assert [failure.request_id for failure in report.failures] == [spoilt.request_id]
    heirs = [Sequence(10 + i, [40 + i] * 7, SamplingParams(max_new_tokens=20), 0) for i in range(3)]
    outputs = run_until_done(core, heirs)
    for sequence in sequences:
        if sequence is not spoilt:
            assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)
            assert len(sequence.output_ids) == 20
    for sequence in heirs:
        assert_greedy(runner, sequence.prompt_ids, outputs[sequence.request_id])
    assert not any(pool.isnan().any() for pool in (*core.cache.keys, *core.cache.values))


def test_what_an_earlier_owner_left_in_a_slot_has_no_influence(runner):
    prompt, params = list(range(30)), SamplingParams(max_new_tokens=20)
    clean = run_until_done(make_core(runner), [Sequence(0, prompt, params, 0)])[0]
    core = make_core(runner)
    run_until_done(core, [Sequence(0, list(range(100)), params, 0)])
    for pool in (*core.cache.keys, *core.cache.values):
        pool.fill_(1e4)
    assert run_until_done(core, [Sequence(1, prompt, params, 0)])[1] == clean


def test_the_same_seed_gives_the_same_tokens_alone_among_strangers_and_resumed(runner):
    params = SamplingParams(max_new_tokens=40, temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.2)

    def sequence(**fields) -> Sequence:
        return Sequence(0, list(range(25)), params, seed=1234, **fields)

    alone = run_until_done(make_core(runner), [sequence()])[0]
    strangers = [
        Sequence(s.request_id + 1, s.prompt_ids, SamplingParams(max_new_tokens=30, temperature=1.3), s.seed)
        for s in make_sequences(6)
    ]
    among = run_until_done(make_core(runner), [*strangers[:3], sequence(), *strangers[3:]], join_every=4)[0]
    resumed = run_until_done(make_core(runner), [sequence(output_ids=alone[:17])])[0]
    other = run_until_done(make_core(runner), [Sequence(0, list(range(25)), params, seed=1235)])[0]
    assert among == alone
    assert alone[:17] + resumed == alone
    assert other != alone


def test_probes_measure_within_their_share_and_change_nothing(runner):
    core = make_core(runner, probe_share=0.1)
    sequences = make_sequences(4, probe=True)
    sequences = [
        Sequence(s.request_id, s.prompt_ids, SamplingParams(max_new_tokens=150), 0, probe=True) for s in sequences[:2]
    ]
    for sequence in sequences:
        core.submit(sequence)
    spent_ms = worked_ms = 0.0
    count = 0
    while core.has_work:
        report = core.step()
        worked_ms += report.record.step_ms
        spent_ms += sum(p.naive_ms + p.cached_ms for p in report.probes)
        count += len(report.probes)
    longest = max(report.naive_ms + report.cached_ms for report in report.probes) if report.probes else 0.0
    assert count > 2
    # The share may be overdrawn by the probe that is repaid afterwards.
    assert spent_ms <= 0.1 * worked_ms + 500 + longest
    for sequence in sequences:
        assert_greedy(runner, sequence.prompt_ids, sequence.output_ids)


def test_no_probes_when_switched_off(runner):
    core = make_core(runner, probe_share=0)
    core.submit(Sequence(0, [1, 2, 3], SamplingParams(max_new_tokens=60), 0, probe=True))
    assert not any(core.step().probes for _ in range(60))


def test_race_lanes_take_the_naive_tokens_beside_a_running_batch(runner):
    core = make_core(runner)
    prompt = list(range(30))
    visitor = Sequence(0, [9, 8, 7], SamplingParams(max_new_tokens=60), 0)
    core.submit(visitor)
    core.start_race(StartRace(1, prompt, 20))
    lanes: dict[str, list[int]] = {"naive": [], "cached": []}
    clocks = {"naive": 0.0, "cached": 0.0}
    states = []
    while core.has_work:
        for step in core.step().race_steps:
            states.append(step.state)
            if step.lane and not step.trial:
                unfinished = [name for name in lanes if len(lanes[name]) < 20]
                assert step.lane == min(unfinished, key=clocks.__getitem__), "the lane that is behind steps next"
                lanes[step.lane].append(step.token_id)
                clocks[step.lane] += step.step_ms
    assert lanes["naive"] == lanes["cached"]
    assert_greedy(runner, prompt, lanes["naive"])
    assert_greedy(runner, visitor.prompt_ids, visitor.output_ids)
    assert states[-1] == "finished" and len(visitor.output_ids) == 60


def test_race_waits_while_the_batch_is_busy(runner):
    core = make_core(runner, max_batch_size=2)
    for index in range(3):
        core.submit(Sequence(index, [index + 1], SamplingParams(max_new_tokens=20), 0))
    core.start_race(StartRace(9, [1, 2, 3], 5))
    steps = [step for _ in range(10) for step in core.step().race_steps]
    assert [step.state for step in steps] == ["paused"]
    rest = []
    while core.has_work:
        rest += core.step().race_steps
    assert rest[0].state == "running" and rest[-1].state == "finished"
    core.start_race(StartRace(10, [1, 2, 3], 5))
    core.cancel(10)
    assert not core.has_work
