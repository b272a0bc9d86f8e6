"""The ragged forwards give the stock forward's logits, for every model that they take the place of."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, WINDOW, build
from transformers import LlamaForCausalLM

from engine.kv_cache import KVCache
from engine.lean import FAMILY, LeanForward, fits
from engine.lean_cpu import CpuForward
from engine.runner import Chunk, ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

SERVED = [family for family in FAMILIES if FAMILIES[family]().model_type in FAMILY]


def served_by(forward: type, family: str) -> ModelRunner:
    runner = ModelRunner(build(FAMILIES[family]()))
    runner.lean = forward(runner.model)
    return runner


@pytest.fixture(
    params=[(forward, family) for forward in (CpuForward, LeanForward) for family in SERVED],
    ids=lambda of: f"{of[0].__name__}, {of[1]}",
)
def runner(request) -> ModelRunner:
    """By the CPU's forward, and by the one that a GPU would use, here on a CPU."""
    return served_by(*request.param)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def stock(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return runner.model(torch.tensor([ids]), use_cache=False).logits[0].float()


def near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits - expected).abs().max() < 1e-4 * expected.std()


def test_these_families_take_part():
    assert {FAMILIES[family]().model_type for family in SERVED} == FAMILY


def test_rows_and_chunks_in_one_pass_are_what_each_is_alone(runner):
    assert runner.lean is not None
    texts = [text(seed, length) for seed, length in ((1, 31), (2, 5), (3, 3 * WINDOW), (4, 40))]
    cache = KVCache(runner.layer_shapes, slots=4, positions=64)
    runner.prefill(cache, 0, 0, texts[0][:-1])
    runner.prefill(cache, 1, 0, texts[1][:-1])
    runner.prefill(cache, 3, 0, texts[3][:17])
    chunks = [Chunk(2, 0, texts[2]), Chunk(3, 17, texts[3][17:], every=True)]
    rows, (whole, rest) = runner.step(cache, [texts[0][-1], texts[1][-1]], [30, 4], chunks)
    near(rows[0], stock(runner, texts[0])[-1])
    near(rows[1], stock(runner, texts[1])[-1])
    near(whole, stock(runner, texts[2])[-1])
    near(rest, stock(runner, texts[3])[17:])
    assert cache.token_ids[2, : len(texts[2])].tolist() == texts[2]


def test_without_a_cache_it_is_the_naive_forward(runner):
    ids = text(5, 3 * WINDOW)
    near(runner.naive(ids), stock(runner, ids)[-1])
    near(runner.naive(ids, every=True), stock(runner, ids))
    near(runner.naive(ids[:1]), stock(runner, ids[:1])[-1])


def test_chunks_alone_and_rows_alone(runner):
    ids = text(6, 20)
    cache = KVCache(runner.layer_shapes, slots=2, positions=64)
    rows, (first, second) = runner.step(cache, [], [], [Chunk(0, 0, ids[:9]), Chunk(1, 0, ids)])
    assert rows is None
    near(first, stock(runner, ids[:9])[-1])
    near(second, stock(runner, ids)[-1])
    rows, chunks = runner.step(cache, [ids[9], 7], [9, 20], [])
    assert chunks == []
    near(rows, torch.stack([stock(runner, ids[:10])[-1], stock(runner, [*ids, 7])[-1]]))


def test_the_compiled_forward_takes_float32_on_a_cpu_with_the_activation_that_it_knows():
    config = FAMILIES["llama"]()
    assert type(ModelRunner(build(config)).lean) is CpuForward
    assert type(ModelRunner(build(config).bfloat16()).lean) is LeanForward
    config.hidden_act = "gelu"
    other = ModelRunner(build(config))
    assert type(other.lean) is LeanForward
    ids = text(7, 12)
    near(other.naive(ids), stock(other, ids)[-1])


def test_no_row_is_read_further_than_it_goes_except_by_mask():
    lengths = [3, 300, 5, 9]
    for forward, read in ((CpuForward, sum(lengths)), (LeanForward, 4 * 320)):
        runner = served_by(forward, "llama")
        cache = KVCache(runner.layer_shapes, slots=4, positions=400)
        assert runner.positions_read(cache, lengths) == read
        cache.keys[0][2, :, 5:], cache.values[0][2, :, 5:] = 1e30, 1e30
        clean = KVCache(runner.layer_shapes, slots=4, positions=400)
        logits = [runner.decode(some, [1, 2, 3, 4], [n - 1 for n in lengths]) for some in (cache, clean)]
        assert torch.equal(*logits)


def test_other_models_and_models_in_parts_keep_the_stock_forward():
    assert not fits(build(FAMILIES["granite"]()))
    model = build(FAMILIES["llama"]())
    assert fits(model)

    class Variant(LlamaForCausalLM):
        """Code that came with a model's files: what its forward does is its own."""

    assert not fits(Variant(model.config))
    model.model.layers[0]._hf_hook = object()
    assert not fits(model)
    assert ModelRunner(model).lean is None
