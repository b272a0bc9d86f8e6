"""The sampler against the processors of transformers, and its draws against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.params import SamplingParams
from engine.processors import CANDIDATES, Row, process, warp
from engine.sampler import choose, draw, uniform

VOCABULARY = 3000


def reference_warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    row = logits[None]
    if params.temperature:
        row = TemperatureLogitsWarper(params.temperature)(None, row)
    if params.top_k:
        row = TopKLogitsWarper(params.top_k)(None, row)
    if params.top_p < 1:
        row = TopPLogitsWarper(params.top_p)(None, row)
    return row[0]


one_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.9, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 1024, 1025, 2999, 3000, 5000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3, 5.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(one_row, min_size=1, max_size=6), seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 2.0, 9.0])
)
def test_filters_equal_those_of_transformers(rows, seed, scale):
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale
    warped = warp(logits.clone(), rows)
    for index, params in enumerate(rows):
        expected = reference_warp(logits[index], params)
        kept, expected_kept = warped[index] > -torch.inf, expected > -torch.inf
        differing = (kept != expected_kept).nonzero()[:, 0]
        if len(differing):
            # top-p cuts where a float32 sum crosses p: only tokens at that very edge may differ.
            assert_at_the_edge(logits[index], params, differing)
        both = kept & expected_kept
        torch.testing.assert_close(warped[index][both], expected[both])


def assert_at_the_edge(logits: torch.Tensor, params: SamplingParams, differing: torch.Tensor) -> None:
    scaled = reference_warp(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k)).double()
    probability = scaled.softmax(-1)
    for token in differing:
        better = probability[probability > probability[token]].sum()
        assert abs(float(better) - params.top_p) < 1e-5


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(one_row, min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_repetition_penalty_equals_that_of_transformers_and_never_counts_padding(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCABULARY, generator=generator) * 3
    histories = torch.randint(0, VOCABULARY, (8, 64), generator=generator)
    lengths = torch.randint(1, 65, (len(rows),), generator=generator).tolist()
    slots = torch.randperm(8, generator=generator)[: len(rows)].tolist()
    asked = [Row(p, 0, 0, slot, length) for p, slot, length in zip(rows, slots, lengths, strict=True)]
    penalized = process(logits, asked, histories)
    for index, row in enumerate(asked):
        ids = histories[row.slot, : row.length][None]
        expected = logits[index : index + 1]
        if row.params.repetition_penalty != 1:
            expected = RepetitionPenaltyLogitsProcessor(row.params.repetition_penalty)(ids, expected)
        torch.testing.assert_close(penalized[index], expected[0])


def test_top_p_beyond_the_candidates_sorts_everything():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 0.01
    params = SamplingParams(temperature=1.0, top_p=0.9)
    kept = (warp(logits.clone(), [params]) > -torch.inf).sum()
    assert kept > CANDIDATES
    assert kept == (reference_warp(logits[0], params) > -torch.inf).sum()


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
    assert choice.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    alone = choose(logits[1:2], [Row(sampled, 3, 5, 1, 1)], histories)
    assert choice.token_ids[1] == alone.token_ids[0]
    expected = logits.log_softmax(-1).gather(1, choice.token_ids[:, None])[:, 0]
    torch.testing.assert_close(choice.logprobs, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(poison):
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    rows = [Row(params, 1, 0, slot, 4) for slot in range(3)]
    histories = torch.arange(12).view(3, 4)
    clean = choose(logits, rows, histories)
    logits[1, 5] = poison
    spoilt = choose(logits, rows, histories)
    assert spoilt.finite.tolist() == [True, False, True]
    assert spoilt.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
