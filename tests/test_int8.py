"""Products in 8 bits: exact sums, rows that do not know each other, and what is lost of the text."""

import math

import pytest
import torch

from demo.prompts import TWO_CLOCKS
from engine import Engine, EngineConfig, LoadingError, SamplingParams
from engine.int8 import FEW, Int8Linear
from engine.kv_cache import KVCache
from engine.loading import load_model
from engine.model_folder import ModelFiles
from engine.packing import pack_linears
from engine.runner import ModelRunner
from engine.tokenizer import load_tokenizer
from engine.weights import check_options

ROWS = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 16)[:, None]
WEIGHT = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(96, generator=torch.Generator().manual_seed(3))


def by_integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same product in whole numbers of 64 bits, scaled at the end."""
    of_rows, of_columns = (values.abs().amax(dim=1).double() / 127 for values in (x, weight))
    rows = (127.0 * x / x.abs().amax(dim=1, keepdim=True) + 0.5).floor().long()
    columns = (weight / (weight.abs().amax(dim=1, keepdim=True) / 127)).round().long()
    return ((rows @ columns.T) * of_rows[:, None] * of_columns).float()


def test_the_sums_are_exact():
    torch.testing.assert_close(Int8Linear(WEIGHT, None)(ROWS), by_integers(ROWS, WEIGHT), rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_its_neighbours():
    layer = Int8Linear(WEIGHT, BIAS)
    together = layer(ROWS.view(4, 4, 64)).view(16, 96)
    assert len(ROWS) > FEW
    assert all(torch.equal(layer(row[None])[0], of_row) for row, of_row in zip(ROWS, together, strict=True))


def test_what_is_not_finite_stays_in_its_row():
    layer = Int8Linear(WEIGHT, BIAS)
    rows = ROWS.clone()
    rows[3, 5], rows[7, 0], rows[9] = torch.nan, torch.inf, 0
    result = layer(rows)
    assert not result[[3, 7]].isfinite().any()
    torch.testing.assert_close(result[9], BIAS)
    others = [index for index in range(16) if index not in (3, 7, 9)]
    assert torch.equal(result[others], layer(ROWS)[others])


def test_the_perplexity_of_real_text_stays_within_three_percent(embedded_folder, capsys):
    ids = torch.tensor([load_tokenizer(embedded_folder)(TWO_CLOCKS)["input_ids"]])
    losses = {}
    for quantize in ("none", "int8"):
        model = load_model(ModelFiles(embedded_folder, "embedded", "test"), EngineConfig(device="cpu"))
        pack_linears(model, quantize)
        with torch.no_grad():
            losses[quantize] = model(ids, labels=ids).loss.item()
    worse = math.exp(losses["int8"] - losses["none"]) - 1
    with capsys.disabled():
        print(f"\nint8: perplexity {math.exp(losses['none']):.2f} becomes {math.exp(losses['int8']):.2f}, {worse:+.2%}")
    assert abs(worse) > 1e-6 and worse < 0.03


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"device": "cpu", "dtype": "bfloat16"}])
def test_it_is_refused_where_there_are_no_such_products(settings):
    config = EngineConfig(quantize="int8", **settings)
    with pytest.raises(LoadingError, match="KVSCOPE_QUANTIZE=int8 needs a CPU and float32"):
        check_options(config, torch.device(config.device))


STEPS, PROMPT = 500, 40


def follow(runner: ModelRunner, texts: list[list[int]], slots: int, positions: int, chunk: int) -> list[torch.Tensor]:
    """Logits of the first text at each step after its prompt, while the others go on beside it."""
    cache = KVCache(runner.layer_shapes, slots, positions)
    for slot, ids in enumerate(texts):
        for start in range(0, PROMPT, chunk):
            runner.prefill(cache, slot, start, ids[start : min(start + chunk, PROMPT)])
    ends = range(PROMPT, PROMPT + STEPS)
    return [runner.decode(cache, [ids[end] for ids in texts], [end] * len(texts))[0] for end in ends]


def test_logits_do_not_depend_on_the_batch_the_room_or_the_chunks(embedded_folder):
    """Bit for bit over 500 steps, alone and in a batch of 16, in another room, and as without a cache."""
    model = load_model(ModelFiles(embedded_folder, "embedded", "test"), EngineConfig(device="cpu"))
    pack_linears(model, "int8")
    runner = ModelRunner(model)
    ids = load_tokenizer(embedded_folder)(TWO_CLOCKS)["input_ids"]
    ids = (ids * (2 * STEPS // len(ids) + 1))[: PROMPT + STEPS]
    alone = follow(runner, [ids], slots=1, positions=PROMPT + STEPS, chunk=PROMPT)
    others = [ids[turn:] + ids[:turn] for turn in range(1, 16)]
    crowd = follow(runner, [ids, *others], slots=16, positions=1024, chunk=7)
    assert all(torch.equal(*pair) for pair in zip(alone, crowd, strict=True))
    for step in (0, 150, STEPS - 1):
        assert torch.equal(alone[step], runner.naive(ids[: PROMPT + step + 1]))


def test_an_engine_in_int8_says_so(tiny_folder):
    config = EngineConfig(device="cpu", threads=1)
    with Engine.from_pretrained(str(tiny_folder), quantization="int8", config=config, host="thread") as engine:
        results = [engine.submit([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True)) for _ in range(3)]
        assert len({tuple(result.result(30).token_ids) for result in results}) == 1
        model = engine.snapshot()["model"]
        assert (model["dtype"], model["quantization"], model["bytes_per_value"]) == ("int8", "int8", 4)
        conditions = engine.compare([5, 6, 7], new_tokens=2).result(30)["conditions"]
        assert conditions["dtype"] == "int8"
