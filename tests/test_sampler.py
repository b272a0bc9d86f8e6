"""Draws against their definition, and what a batch of unlike rows has to do with one another."""

import pytest
import torch

from engine.params import SamplingParams
from engine.processors import Row
from engine.sampler import choose, draw, uniform

VOCABULARY = 3000


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125, 0.0])
    draws = 20_000
    tokens = draw(probabilities.log().expand(draws, -1), uniform([7] * draws, list(range(draws))))
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[1] == counts[5] == 0
    expected = probabilities.double() * draws
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1))[probabilities > 0].sum()
    assert chi_square < 16.3, "3 degrees of freedom: above this once in a thousand"


@pytest.mark.parametrize("value", [0.0, 2**-24, 0.5, 1 - 2**-24])
def test_the_edges_of_the_uniform_number_give_possible_tokens(value):
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, 17:40_000] = 0.1
    token = int(draw(logits, torch.tensor([value])))
    assert 17 <= token < 40_000


def test_uniform_numbers_of_neighbouring_seeds_and_steps_are_unrelated():
    seeds = [seed for seed in (0, 1, 2, 2**32, 2**62) for _ in range(2000)]
    numbers = uniform(seeds, list(range(2000)) * 5).view(5, 2000).double()
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert (numbers.mean(1) - 0.5).abs().max() < 0.03
    assert (torch.corrcoef(numbers) - torch.eye(5)).abs().max() < 0.08
    assert len(set(numbers.flatten().tolist())) > 9_900


def test_uniform_numbers_are_these_on_every_machine():
    values = (uniform([0, 0, 123456789012345], [0, 1, 7]) * 2**24).long().tolist()
    assert values == [reference_bits(0, 0), reference_bits(0, 1), reference_bits(123456789012345, 7)]


def reference_bits(seed: int, step: int) -> int:
    """The same hash in Python's own integers."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    return mix(mix(mix(seed & 0xFFFFFFFF ^ 0x9E3779B9) ^ seed >> 32) ^ step) >> 8


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    histories = torch.zeros(4, 8, dtype=torch.long)
    greedy = SamplingParams(temperature=0, top_k=5)
    sampled = SamplingParams(temperature=1.5, seed=3)
    rows = [Row(p, 3, 5, slot, 1) for slot, p in enumerate([greedy, sampled, greedy, sampled])]
    choice = choose(logits, rows, histories)
    assert choice.token_ids[::2] == logits.argmax(-1)[::2].tolist()
    alone = choose(logits[1:2], [Row(sampled, 3, 5, 1, 1)], histories)
    assert choice.token_ids[1] == alone.token_ids[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    assert choice.logprobs == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(poison):
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    rows = [Row(params, 1, 0, slot, 4) for slot in range(3)]
    histories = torch.arange(12).view(3, 4)
    clean = choose(logits, rows, histories)
    logits[1, 5] = poison
    spoilt = choose(logits, rows, histories)
    assert spoilt.finite == [True, False, True]
    assert spoilt.token_ids[::2] == clean.token_ids[::2]


def test_top_tokens_are_the_models_own_best_whatever_the_processing():
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    asked = [
        SamplingParams(top_n_tokens=3, temperature=2.0, watermark=True),
        SamplingParams(),
        SamplingParams(top_n_tokens=5),
    ]
    rows = [Row(p, 3, 5, slot, 1) for slot, p in enumerate(asked)]
    choice = choose(logits, rows, torch.zeros(3, 8, dtype=torch.long))
    assert [len(tokens) for tokens in choice.top_tokens] == [3, 0, 5]
    logprobs = logits.log_softmax(-1)
    for row, tokens in enumerate(choice.top_tokens):
        values, ids = logprobs[row].topk(len(tokens))
        assert [token_id for token_id, _ in tokens] == ids.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in tokens]), values)
    assert choice.top_tokens[2][0][0] == choice.token_ids[2]
    assert choice.top_tokens[2][0][1] == pytest.approx(choice.logprobs[2], abs=1e-6)
