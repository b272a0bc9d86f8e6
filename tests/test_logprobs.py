"""What a result says beside its text: log-probabilities, the model's best tokens, and the time of each step."""

import math

import pytest
import torch
from running_app import eventually
from transformers import AutoModelForCausalLM

from engine import SamplingParams

WAIT_S = 60


@pytest.fixture(scope="module")
def logprobs_of(tiny_folder):
    """Log-probabilities `[tokens, vocabulary]` after each of some ids, by the stock model without a cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return compute


def test_prompt_logprobs_are_the_stock_models_over_chunks_of_the_prompt(tiny_engine, logprobs_of):
    engine = tiny_engine(prefill_chunk=16)
    prompt = "A prompt that is longer than two chunks of it." * 4
    result = engine.submit(prompt, SamplingParams(max_new_tokens=3, prompt_logprobs=True)).result(WAIT_S)
    ids = result.prompt_token_ids
    first, *rest = result.prompt_logprobs
    assert first is None and len(rest) == len(ids) - 1 > 160
    expected = logprobs_of(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(rest), expected, atol=1e-4, rtol=1e-4)


def test_prompt_logprobs_are_of_the_prompt_as_it_was_cut(tiny_engine, logprobs_of):
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=True, truncate=5)
    result = tiny_engine().submit("one two three", params).result(WAIT_S)
    assert result.prompt_tokens == len(result.prompt_logprobs) == 5
    expected = logprobs_of(result.prompt_token_ids)[0, result.prompt_token_ids[1]]
    assert result.prompt_logprobs[1] == pytest.approx(float(expected), abs=1e-4)


def test_prompt_logprobs_need_the_whole_prompt_although_its_beginning_is_cached(tiny_engine):
    engine = tiny_engine()
    prompt = "The same beginning, long enough to be kept."
    fields = {"max_new_tokens": 2, "ignore_eos": True}
    first = engine.submit(prompt, SamplingParams(**fields), client="me")
    first.result(WAIT_S)
    again = engine.submit(prompt, SamplingParams(**fields), client="me")
    again.result(WAIT_S)
    scored = engine.submit(prompt, SamplingParams(**fields, prompt_logprobs=True), client="me")
    assert len(scored.result(WAIT_S).prompt_logprobs) == scored.prompt_tokens
    assert (first.reused_tokens, again.reused_tokens, scored.reused_tokens) == (0, scored.prompt_tokens - 1, 0)


def test_who_does_not_ask_gets_no_prompt_logprobs_and_no_top_tokens(tiny_engine):
    result = tiny_engine().submit("abc", SamplingParams(max_new_tokens=3, ignore_eos=True)).result(WAIT_S)
    assert result.prompt_logprobs is None and result.top_tokens == [(), (), ()]


def test_a_prompt_of_one_token_has_none_to_score(tiny_engine):
    result = tiny_engine().submit([65], SamplingParams(max_new_tokens=1, prompt_logprobs=True)).result(WAIT_S)
    assert result.prompt_logprobs == [None]


def test_top_tokens_and_logprobs_are_the_models_own_whatever_was_drawn(tiny_engine, logprobs_of):
    params = SamplingParams(
        max_new_tokens=24, temperature=1.6, top_p=0.9, frequency_penalty=1.0, watermark=True, top_n_tokens=4, seed=3
    )
    result = tiny_engine().submit("Once upon a time", params).result(WAIT_S)
    everything = logprobs_of(result.prompt_token_ids + result.token_ids)[result.prompt_tokens - 1 : -1]
    for row, token_id, logprob, top in zip(
        everything, result.token_ids, result.logprobs, result.top_tokens, strict=True
    ):
        assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        values = [token.logprob for token in top]
        assert values == pytest.approx(row.topk(4).values.tolist(), abs=1e-3) and values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1.0001


def test_top_tokens_read_as_text_and_special_ones_by_name(tiny_engine):
    engine = tiny_engine()
    params = SamplingParams(max_new_tokens=1, top_n_tokens=20)
    (top,) = engine.submit("abc", params).result(WAIT_S).top_tokens
    tokenizer = engine.prompts.tokenizer
    assert len(top) == 20 and len({token.token_id for token in top}) == 20
    assert [token.text for token in top] == [tokenizer.decode([token.token_id]) for token in top]


def test_each_step_tells_its_time_in_the_model_and_outside_of_it(tiny_engine):
    result = tiny_engine().submit("abc", SamplingParams(max_new_tokens=12, ignore_eos=True)).result(WAIT_S)
    assert len(result.forward_ms) == len(result.decode_ms) == result.new_tokens == 12
    assert all(ms > 0 for ms in result.forward_ms) and all(ms >= 0 for ms in result.decode_ms)


def test_a_killed_worker_changes_no_number_of_a_result(tiny_engine):
    engine = tiny_engine(host="process")
    params = SamplingParams(
        max_new_tokens=300,
        temperature=1.0,
        typical_p=0.9,
        watermark=True,
        frequency_penalty=0.3,
        prompt_logprobs=True,
        top_n_tokens=2,
        seed=4,
        ignore_eos=True,
    )
    expected = engine.submit("Once upon a time", params).result(WAIT_S)
    generation = engine.submit("Once upon a time", params)
    eventually(lambda: len(generation.events) > 20)
    engine._workers.current.stop(60)
    result = generation.result(WAIT_S)
    assert generation.resumed and result.token_ids == expected.token_ids
    assert result.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
