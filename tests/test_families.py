"""Every family of models, loaded as the worker loads it, gives the tokens of the stock naive loop.

Rows of mixed lengths join and leave, prompts are read in chunks, and contexts grow beyond every sliding window.
"""

from itertools import pairwise

import pytest
import torch
from families import FAMILIES, VOCABULARY, WINDOW, WINDOWED, build
from reference import StockLoop, assert_greedy, run_until_done

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import load_model, make_runner
from engine.model_folder import ModelFiles
from engine.packing import Joint, PackedLinear, Share, pack_linears
from engine.params import SamplingParams
from engine.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

EAGER = {"bloom", "mpt", "gemma2, some windows", "gemma3, soft-capped"}
# Not `nn.Linear`: GPT-2's `Conv1D`, and Falcon's own subclass.
NOTHING_PACKED_BUT_THE_HEAD = ("gpt2", "falcon")


def served(model, folder):
    """A runner over the model as the worker would have it: saved, loaded, its linear layers packed."""
    model.save_pretrained(folder)
    files = ModelFiles(folder, "tiny", "local folder")
    loaded = load_model(files, EngineConfig(device="cpu"))
    pack_linears(loaded)
    return make_runner(files, loaded)


def mixed_sequences(count=7, longest=60):
    """Prompts of 1 to `longest` tokens, the first the longest; 4 to 24 new ones."""
    generator = torch.Generator().manual_seed(1)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    lengths = [longest, *(number(1, longest) for _ in range(count - 1))]
    return [
        Sequence(
            index,
            torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(),
            SamplingParams(max_new_tokens=number(4, 24)),
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]


def generate(runner, sequences, prefill_chunk=16):
    config = EngineConfig(max_batch_size=4, prefill_chunk=prefill_chunk, cache_tokens=1024, max_context=256)
    core = EngineCore(runner, config, frozenset())
    outputs = run_until_done(core, sequences, join_every=3)
    assert all(len(outputs[s.request_id]) == s.params.max_new_tokens for s in sequences)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_the_stock_loops_tokens(family, tmp_path):
    model = build(FAMILIES[family]())
    runner = served(model, tmp_path)
    assert runner.model.config._attn_implementation == ("eager" if family in EAGER else "sdpa")
    sequences = mixed_sequences()
    outputs = generate(runner, sequences)
    stock = StockLoop(model)
    ties = sum(assert_greedy(stock, s.prompt_ids, outputs[s.request_id]) for s in sequences)
    assert ties <= 1, "tokens that are decided by rounding prove nothing"
    said = [tuple(output) for output in outputs.values()]
    assert len(set(said)) == len(said)
    changes = sum(first != second for output in said for first, second in pairwise(output))
    assert changes > 20, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("family", WINDOWED)
def test_prompts_longer_than_the_window_in_one_chunk(family, tmp_path):
    model = build(FAMILIES[family]())
    sequences = mixed_sequences(count=4)
    assert len(sequences[0].prompt_ids) > 4 * WINDOW
    outputs = generate(served(model, tmp_path), sequences, prefill_chunk=64)
    stock = StockLoop(model)
    for sequence in sequences:
        assert_greedy(stock, sequence.prompt_ids, outputs[sequence.request_id])


@pytest.mark.parametrize("family", WINDOWED)
def test_a_forgotten_window_would_be_noticed(family):
    """The same weights without a window say something else: so the tests above can tell."""
    narrow, wide = FAMILIES[family](), FAMILIES[family]()
    wide.sliding_window = 1000
    prompt = mixed_sequences()[0].prompt_ids
    difference = StockLoop(build(narrow)).naive(prompt) - StockLoop(build(wide)).naive(prompt)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_replaces_plain_linear_layers_only(family):
    model = build(FAMILIES[family]())
    before = {name: type(module) for name, module in model.named_modules()}
    pack_linears(model)
    after = {name: type(module) for name, module in model.named_modules()}
    changed = {name for name in before if after[name] is not before[name]}
    assert {before[name] for name in changed} == {torch.nn.Linear}
    assert {after[name] for name in changed} <= {PackedLinear, Share}
    assert torch.nn.Linear not in after.values()
    if family.startswith(NOTHING_PACKED_BUT_THE_HEAD):
        assert changed == {"lm_head"}


def test_layers_that_share_a_product_answer_in_any_order_and_then_hold_nothing():
    x, layers = torch.randn(5, 8), [torch.nn.Linear(8, width) for width in (4, 6)]
    weight, bias = (torch.cat([getattr(layer, name).detach() for layer in layers]) for name in ("weight", "bias"))
    joint = Joint(PackedLinear(weight, bias), [4, 6])
    for order in ((0, 1), (1, 0)):
        for index in order:
            torch.testing.assert_close(joint(x, index), layers[index](x))
        assert joint._input is None and not joint._outputs
    # Asked again before the other was: of what is there now, not of what was.
    joint(x, 0)
    torch.testing.assert_close(joint(2 * x, 0), layers[0](2 * x))
