"""The processors against those of transformers, alone and mixed; where it has none, against the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from engine.params import SamplingParams
from engine.processors import CANDIDATES, Row, process, warp
from engine.sampler import choose

VOCABULARY = 3000
SLOTS, POSITIONS = 8, 64


def reference_process(logits: torch.Tensor, row: Row, ids: torch.Tensor) -> torch.Tensor:
    """One row's `logits` `[1, vocabulary]` after its history `ids` `[1, length]`, by transformers or by definition."""
    params = row.params
    if params.watermark:
        logits = WatermarkLogitsProcessor(logits.shape[-1], "cpu")(ids, logits)
    if params.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, logits)
    if params.frequency_penalty:
        # OpenAI's definition: so much less for each time that the token was seen.
        logits = logits - params.frequency_penalty * torch.bincount(ids[0], minlength=logits.shape[-1])
    if row.allowed is not None:
        allowed = [bool(row.allowed[token // 8] >> token % 8 & 1) for token in range(logits.shape[-1])]
        logits = logits.masked_fill(~torch.tensor(allowed), -torch.inf)
    return logits


def reference_warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    row = logits[None]
    if params.temperature:
        row = TemperatureLogitsWarper(params.temperature)(None, row)
    if params.top_k:
        row = TopKLogitsWarper(params.top_k)(None, row)
    if params.top_p < 1:
        row = TopPLogitsWarper(params.top_p)(None, row)
    if params.typical_p < 1:
        row = TypicalLogitsWarper(params.typical_p)(None, row)
    return row[0]


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.9, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 1024, 1025, 2999, 3000, 5000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0, 1.0]),
    typical_p=st.sampled_from([0.01, 0.2, 0.5, 0.95, 1.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3, 5.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3, 2.0]),
    watermark=st.booleans(),
)


@st.composite
def batches(draw):
    """Rows that mix everything, with histories of unlike lengths in slots of their own, and logits for them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    params = draw(st.lists(any_params, min_size=1, max_size=6))
    slots = torch.randperm(SLOTS, generator=generator)[: len(params)].tolist()
    rows = [
        Row(p, 0, 0, slot, draw(st.integers(1, POSITIONS)), draw(st.sampled_from([None, None, allowed_tokens(slot)])))
        for p, slot in zip(params, slots, strict=True)
    ]
    # Few different ids, so that counts are above one; past a row's length lies what an earlier owner left.
    histories = torch.randint(0, draw(st.sampled_from([5, VOCABULARY])), (SLOTS, POSITIONS), generator=generator)
    logits = torch.randn(len(rows), VOCABULARY, generator=generator) * draw(st.sampled_from([0.1, 2.0, 9.0]))
    return logits, rows, histories


def allowed_tokens(seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (math.ceil(VOCABULARY / 32) * 4,), generator=generator).tolist())


@settings(max_examples=60, deadline=None)
@given(batches())
def test_processing_equals_that_of_transformers_and_never_counts_padding(batch):
    logits, rows, histories = batch
    before = logits.clone()
    processed = process(logits, rows, histories)
    assert torch.equal(logits, before), "the model's own logits are needed afterwards"
    for index, row in enumerate(rows):
        expected = reference_process(logits[index : index + 1], row, histories[row.slot, : row.length][None])
        torch.testing.assert_close(processed[index], expected[0])


@settings(max_examples=80, deadline=None)
@given(batches())
def test_the_whole_way_equals_that_of_transformers(batch):
    logits, rows, histories = batch
    processed = process(logits, rows, histories)
    warped = warp(processed.clone(), [row.params for row in rows])
    for index, row in enumerate(rows):
        expected = reference_warp(processed[index], row.params)
        kept, expected_kept = warped[index] > -torch.inf, expected > -torch.inf
        assert kept.any()
        differing = (kept != expected_kept).nonzero()[:, 0]
        if len(differing):
            # top-p and typical-p cut where a float32 sum crosses p: only tokens at that very edge may differ.
            assert_at_the_edge(processed[index], row.params, differing)
        both = kept & expected_kept
        torch.testing.assert_close(warped[index][both], expected[both])


def assert_at_the_edge(logits: torch.Tensor, params: SamplingParams, differing: torch.Tensor) -> None:
    scaled = reference_warp(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k)).double()
    probability = scaled.softmax(-1)
    for token in differing:
        better = float(probability[probability > probability[token]].sum())
        if abs(better - params.top_p) < 1e-5:
            return  # what typical-p makes of that one token more or less cannot be compared
    without = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    logprobs = reference_warp(logits, without).double().log_softmax(-1)
    distance = (logprobs - (logprobs * logprobs.exp()).nansum()).abs()
    order = distance.sort().values
    for token in differing:
        nearer = float(logprobs.exp()[distance < distance[token]].sum())
        neighbours = float((order - distance[token]).abs().topk(2, largest=False).values[1])
        assert abs(nearer - params.typical_p) < 1e-5 or neighbours < 1e-5, "neither at the edge nor a tie"


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"typical_p": 0.9}])
def test_what_the_candidates_do_not_cover_is_sorted_whole(fields):
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 0.01
    params = SamplingParams(temperature=1.0, **fields)
    kept = (warp(logits.clone(), [params]) > -torch.inf).sum()
    assert kept > CANDIDATES
    assert kept == (reference_warp(logits[0], params) > -torch.inf).sum()


def test_all_that_tie_with_the_last_of_top_k_stay_however_many():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :10] = -1.0
    params = SamplingParams(temperature=1.0, top_k=5)
    assert int((warp(logits, [params]) > -torch.inf).sum()) == VOCABULARY - 10


def test_a_watermark_is_found_by_the_detector_of_transformers_and_only_where_there_is_one():
    config = LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0)
    detector = WatermarkDetector(config, device="cpu", watermarking_config=WatermarkingConfig())
    marked, plain = (sampled_text(SamplingParams(temperature=1.0, watermark=asked)) for asked in (True, False))
    found = detector(torch.tensor([marked, plain]), z_threshold=3.0, return_dict=True)
    assert found.prediction.tolist() == [True, False]
    assert found.z_score[0] > 6 and abs(found.z_score[1]) < 3


def sampled_text(params: SamplingParams, length: int = 100) -> list[int]:
    """Tokens drawn from the same flat distribution again and again."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(8))
    history = torch.zeros(1, length + 1, dtype=torch.long)
    history[0, 0] = 1
    for step in range(length):
        row = Row(params, seed=4, emitted=step, slot=0, length=step + 1)
        history[0, step + 1] = choose(logits, [row], history).token_ids[0]
    return history[0].tolist()


def test_greedy_rows_are_penalised_too():
    logits = torch.tensor([[3.0, 2.9, 0.0], [3.0, 2.9, 0.0], [3.0, 2.9, 0.0]])
    params = [SamplingParams(frequency_penalty=0.2), SamplingParams(repetition_penalty=1.1), SamplingParams()]
    rows = [Row(p, 0, 0, 0, 1) for p in params]
    assert choose(logits, rows, torch.zeros(1, 4, dtype=torch.long)).token_ids == [1, 1, 0]
