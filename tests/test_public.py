"""Public beginnings: computed once for everybody, and nothing else of anybody is."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, build
from reference import assert_greedy, run_until_done
from tiny import save_tiny_model

from engine import Engine, EngineConfig, SamplingParams
from engine.core import EngineCore
from engine.runner import ModelRunner
from engine.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = [token % VOCABULARY for token in range(3, 43)]
PRESET = [*SYSTEM, *(7 * token % VOCABULARY for token in range(60))]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build(FAMILIES["llama"]()))


@pytest.fixture
def core(runner) -> EngineCore:
    config = EngineConfig(max_batch_size=8, prefill_chunk=64, cache_tokens=2048, max_context=256)
    core = EngineCore(runner, config, frozenset())
    core.public.declare([SYSTEM, PRESET])
    return core


def ask(number: int, prompt: list[int], **params) -> Sequence:
    return Sequence(number, prompt, SamplingParams(max_new_tokens=12, **params), seed=number, client=number)


def questions(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [[*SYSTEM, 1, *torch.randint(0, VOCABULARY, (20,), generator=generator).tolist()] for _ in range(count)]


def test_sixteen_that_arrive_together_compute_it_once(runner, core):
    sequences = [ask(number, prompt) for number, prompt in enumerate(questions(16))]
    for sequence in sequences:
        core.submit(sequence)
    computed, outputs = 0, {sequence.request_id: [] for sequence in sequences}
    while core.has_work:
        report = core.step()
        computed += report.record.prefill_tokens
        for token in report.tokens:
            outputs[token.request_id].append(token.token_id)
    assert computed == len(SYSTEM) + sum(len(sequence.prompt_ids) - len(SYSTEM) for sequence in sequences)
    assert [sequence.public_tokens for sequence in sequences] == [0] + [len(SYSTEM)] * 15
    for sequence in sequences:
        assert_greedy(runner, sequence.prompt_ids, outputs[sequence.request_id])


def test_what_follows_the_public_part_stays_private(runner, core):
    secret = [*SYSTEM, *range(100, 160)]
    outputs = run_until_done(core, [ask(1, secret)])
    stranger = ask(2, secret)
    outputs |= run_until_done(core, [stranger])
    assert (stranger.reused_tokens, stranger.public_tokens) == (len(SYSTEM), len(SYSTEM))
    assert core.public.tokens == len(SYSTEM)
    assert outputs[1] == outputs[2]


def test_a_longer_beginning_takes_the_place_of_a_shorter_one(runner, core):
    run_until_done(core, [ask(1, [*SYSTEM, 99, 98])])
    first, second = ask(2, [*PRESET, 1]), ask(3, [*PRESET, 2])
    outputs = run_until_done(core, [first])
    outputs |= run_until_done(core, [second, ask(4, [*SYSTEM, 97])])
    assert (first.public_tokens, second.public_tokens) == (len(SYSTEM), len(PRESET))
    assert core.public.tokens == len(PRESET), "of which the system prompt is the beginning"
    assert core.public.nbytes == len(PRESET) * core.cache.bytes_per_token
    assert_greedy(runner, second.prompt_ids, outputs[3])


def test_a_preset_that_is_the_whole_prompt_leaves_its_last_token_to_compute(runner, core):
    outputs = run_until_done(core, [ask(1, PRESET)])
    again = ask(2, PRESET)
    outputs |= run_until_done(core, [again])
    assert again.public_tokens == len(PRESET) - 1
    assert outputs[2] == outputs[1]
    assert_greedy(runner, PRESET, outputs[2])


def test_own_turns_and_public_beginnings_are_told_apart(core):
    first = ask(1, [*SYSTEM, *range(30)])
    said = run_until_done(core, [first])[1]
    turn = Sequence(2, [*first.prompt_ids, *said, 5, 6], SamplingParams(max_new_tokens=4), seed=0, client=1)
    run_until_done(core, [turn])
    assert (turn.reused_tokens, turn.public_tokens) == (len(first.prompt_ids + said) - 1, 0)


def test_penalties_see_the_tokens_that_were_lent(runner, core):
    fresh = EngineCore(runner, core.config, frozenset())
    prompt, params = [*PRESET, 4], {"repetition_penalty": 1.8, "frequency_penalty": 0.7}
    expected = run_until_done(fresh, [ask(1, prompt, **params)])[1]
    run_until_done(core, [ask(9, PRESET)])
    lent = ask(1, prompt, **params)
    assert run_until_done(core, [lent])[1] == expected
    assert lent.public_tokens == len(PRESET)


def test_log_probabilities_of_the_prompt_need_all_of_it(core):
    run_until_done(core, [ask(1, PRESET)])
    scored = ask(2, PRESET, prompt_logprobs=True)
    run_until_done(core, [scored])
    assert scored.reused_tokens == 0
    assert len(scored.prompt_logprobs) == len(PRESET)


def test_what_is_no_longer_public_is_forgotten(core):
    run_until_done(core, [ask(1, PRESET)])
    core.public.declare([SYSTEM])
    assert core.public.tokens == 0
    stranger = ask(2, PRESET)
    run_until_done(core, [stranger])
    assert stranger.reused_tokens == 0


def test_the_engine_encodes_what_is_public_and_counts_what_it_saved(tmp_path):
    chat = [{"role": "system", "content": "Answer in rhymes about the sea."}, {"role": "user", "content": "Why?"}]
    impossible = [{"role": "nobody", "content": "no template takes this"}]
    config = EngineConfig(model=str(save_tiny_model(tmp_path)), device="cpu")
    with Engine(config, host="thread", public=[impossible, chat]) as engine:
        engine.wait_ready()
        prompt = len(engine.tokenize(chat))
        for client in ("one", "two", "three"):
            engine.submit(chat, SamplingParams(max_new_tokens=4), client=client).result(timeout=60)
        snapshot = engine.snapshot()
    saved = [entry["public_tokens"] for entry in snapshot["requests"]]
    assert saved == [0, prompt - 1, prompt - 1]
    assert snapshot["totals"]["public_tokens"] == snapshot["totals"]["reused_tokens"] == sum(saved)
    assert snapshot["cache"]["public_tokens"] == prompt
    cache, size = snapshot["cache"], snapshot["model"]["bytes_per_token"]
    assert cache["allocated_bytes"] == cache["allocated_tokens"] * size, "what is shared is part of what is allocated"
