"""The decode step as a GPU records it: the device's memory alone decides what it does, and padding leaves no trace.

A recording itself needs a GPU (tests/gpu). What it takes for granted is shown on the meta device, where there are no
numbers: whoever asks for one, or for a shape that depends on some, gets an error.
"""

import pytest
import torch
from families import FAMILIES, VOCABULARY, build
from test_lean import SERVED, near, served_by, stock, text
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from engine.graphs import can_record, padded, recorded_shape
from engine.kv_cache import KVCache
from engine.lean import LeanForward
from engine.params import SamplingParams
from engine.processors import Row
from engine.runner import ModelRunner
from engine.sampler import choose_on_device

pytestmark = pytest.mark.usefixtures("one_thread")
META = torch.device("meta")


class NothingFromTheHost(TorchDispatchMode):
    """A recording would repeat for ever what is copied from the host while it is made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in args:
            assert not isinstance(value, torch.Tensor) or value.device == META, f"{func} reads from {value.device}"
        return func(*args, **(kwargs or {}))


def on_meta(family: str) -> ModelRunner:
    return ModelRunner(build(FAMILIES[family]()).to(META))


@pytest.mark.parametrize("family", SERVED)
def test_a_decode_step_asks_nothing_and_takes_nothing_from_the_host(family):
    runner = on_meta(family)
    cache = KVCache(runner.layer_shapes, slots=4, positions=64)
    inputs = padded([1, 2, 3], [20, 5, 0], rows=4).to(META)
    with NothingFromTheHost():
        logits = runner.decode_padded(cache, inputs, 64)
    assert logits.shape == (4, VOCABULARY) and logits.device == META


def test_one_that_asks_is_found_out():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).max().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).nonzero()
    with pytest.raises(AssertionError, match="reads from cpu"), NothingFromTheHost():
        torch.zeros(3, device=META) + torch.zeros(3, device="cpu").to(META)


def test_choosing_asks_nothing_of_the_device():
    """But for a watermark, whose permutation is made on the host."""
    asked = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, top_n_tokens=5),
        SamplingParams(temperature=1.2, top_p=0.5, typical_p=0.6, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(temperature=1, typical_p=0.9),
    ]
    every_token = bytes([255]) * (-(-VOCABULARY // 8))
    rows = [Row(params, 3, 5, slot, 9, every_token) for slot, params in enumerate(asked)]
    histories = torch.zeros(4, 64, dtype=torch.long, device=META)
    assert choose_on_device(torch.zeros(4, VOCABULARY, device=META), rows, histories).shape == (4, 3 + 2 * 5)


@pytest.mark.parametrize("family", SERVED)
def test_rows_that_do_not_count_leave_no_trace(family):
    runner = served_by(LeanForward, family)
    texts = [text(1, 31), text(2, 9)]
    cache = KVCache(runner.layer_shapes, slots=4, positions=64)
    for slot, ids in enumerate(texts):
        runner.prefill(cache, slot, 0, ids[:-1])
    others = [text(3, 20), text(4, 12)]
    for slot, ids in enumerate(others, start=2):
        runner.prefill(cache, slot, 0, ids)
    before = [cache.read(slot, 64) for slot in (2, 3)]
    inputs = padded([ids[-1] for ids in texts], [len(ids) - 1 for ids in texts], rows=4)
    logits = runner.decode_padded(cache, inputs, 64)
    for row, ids in enumerate(texts):
        near(logits[row], stock(runner, ids)[-1])
    for slot, states in zip((2, 3), before, strict=True):
        for old, new in zip(states, cache.read(slot, 64), strict=True):
            assert all(torch.equal(*pair) for pair in zip(old, new, strict=True))
    assert [cache.token_ids[slot, : len(ids)].tolist() for slot, ids in enumerate([*texts, *others])] == texts + others
    assert not cache.token_ids[2:, 20:].any()


def test_shapes_are_few_and_fit():
    runner = on_meta(SERVED[0])
    cache = KVCache(runner.layer_shapes, slots=12, positions=1000)
    shapes = {recorded_shape(rows, longest, cache) for rows in range(1, 13) for longest in range(1, 1001)}
    assert shapes == {(rows, window) for rows in (1, 2, 4, 8, 12) for window in (256, 512, 1000)}
    for rows in range(1, 13):
        for longest in (1, 256, 257, 1000):
            most, window = recorded_shape(rows, longest, cache)
            assert rows <= most and longest <= window


def test_what_is_not_recorded():
    lean = on_meta(SERVED[0]).lean
    assert can_record(lean, torch.device("cuda"))
    assert not can_record(lean, torch.device("cpu")) and not can_record(None, torch.device("cuda"))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    dynamic = ModelRunner(build(LlamaConfig(vocab_size=VOCABULARY, rope_parameters=scaled, **shape)))
    assert not can_record(dynamic.lean, torch.device("cuda"))
