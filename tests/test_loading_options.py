"""Settings that change how a model is loaded: code of its own, quantised weights, several devices."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from families import FAMILIES, build
from reference import StockLoop, assert_greedy, run_until_done
from tiny import byte_level_tokenizer, save_tiny_model

from engine import Engine, SamplingParams, loading, weights
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import LoadingError
from engine.loading import load_model, make_runner, resolve
from engine.model_folder import ModelFiles
from engine.packing import PackedLinear, pack_linears
from engine.sequence import Sequence
from engine.tokenizer import load_tokenizer


def files_of(folder):
    return ModelFiles(Path(folder), str(folder), "local folder")


def message_of(error):
    """The error's one line."""
    text = str(error.value)
    assert "\n" not in text and 20 < len(text) < 600
    return text


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- code that comes with the model ---

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own-kind"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def code_cache(tmp_path_factory):
    """Where transformers copies a model's code to. One for all tests: Python keeps the package it found first."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield
        sys.path[:] = [path for path in sys.path if path != folder]


@pytest.fixture
def own_folder(tmp_path, code_cache):
    """A Llama under another name, whose configuration, model and tokenizer are classes in the folder."""
    folder = save_tiny_model(tmp_path / "own_model")
    for name, code in (("configuration", CONFIGURATION), ("modeling", MODELING), ("tokenization", TOKENIZATION)):
        (folder / f"{name}_own.py").write_text(code)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit(folder / "config.json", model_type="own-kind", architectures=["OwnForCausalLM"], auto_map=classes)
    tokenizer = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    return folder


def test_a_models_own_code_is_refused_unless_trusted(own_folder):
    with pytest.raises(LoadingError) as error:
        load_model(files_of(own_folder), EngineConfig(device="cpu"))
    assert "KVSCOPE_TRUST_REMOTE_CODE=true" in message_of(error)
    with pytest.raises(LoadingError) as error:
        load_tokenizer(own_folder)
    assert "KVSCOPE_TRUST_REMOTE_CODE=true" in message_of(error)


def test_a_model_whose_configuration_alone_is_known_is_refused_unless_trusted(own_folder):
    """The family cannot continue text by itself; only the code in the folder can."""
    classes = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit(own_folder / "config.json", model_type="clip", auto_map=classes)
    with pytest.raises(LoadingError) as error:
        load_model(files_of(own_folder), EngineConfig(device="cpu"))
    assert "KVSCOPE_TRUST_REMOTE_CODE=true" in message_of(error)


def test_a_known_family_needs_no_trust_for_code_beside_it(own_folder):
    edit(own_folder / "config.json", model_type="llama")
    model = load_model(files_of(own_folder), EngineConfig(device="cpu"))
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"


def test_trusted_code_serves_the_whole_way(own_folder, tiny_engine):
    config = EngineConfig(model=str(own_folder), device="cpu", threads=1, trust_remote_code=True)
    with Engine.from_pretrained(config=config, host="thread") as engine:
        assert type(engine.prompts.tokenizer).__name__ == "OwnTokenizer"
        result = engine.submit("abc", SamplingParams(max_new_tokens=10)).result(60)
    assert result.token_ids == tiny_engine().submit("abc", SamplingParams(max_new_tokens=10)).result(60).token_ids


@pytest.mark.parametrize("file", ["modeling_own.py", "configuration_own.py"])
def test_trusted_code_that_fails_is_told(own_folder, file):
    (own_folder / file).write_text("raise RuntimeError('needs the moon')")
    with pytest.raises(LoadingError) as error:
        load_model(files_of(own_folder), EngineConfig(device="cpu", trust_remote_code=True))
    assert "needs the moon" in message_of(error) and "TRUST" not in message_of(error)


def test_trusted_code_without_a_cache_is_refused(own_folder):
    body = "    def forward(self, input_ids, attention_mask=None):\n        raise NotImplementedError\n"
    with (own_folder / "modeling_own.py").open("a") as file:
        file.write(body)
    with pytest.raises(LoadingError) as error:
        load_model(files_of(own_folder), EngineConfig(device="cpu", trust_remote_code=True))
    assert "no key/value cache" in message_of(error)


def test_a_model_that_fails_in_its_first_steps_is_refused(tiny_folder, monkeypatch):
    model = load_model(files_of(tiny_folder), EngineConfig(device="cpu"))
    forward = model.forward

    def no_more_than_one(input_ids, cache=None, **kwargs):
        if input_ids.shape[1] > 1:
            raise RuntimeError("one at a time,\nplease")
        return forward(input_ids, cache=cache, **kwargs)

    monkeypatch.setattr(model, "forward", no_more_than_one)
    with pytest.raises(LoadingError) as error:
        make_runner(files_of(tiny_folder), model)
    assert "first steps (one at a time,)" in message_of(error)


def test_a_model_whose_cache_is_misunderstood_is_refused(tiny_folder, monkeypatch):
    """It counts positions by the cache's length, like TrOCR's decoder, which is not a row's own in a shared batch."""
    model = load_model(files_of(tiny_folder), EngineConfig(device="cpu"))
    forward = model.forward

    def own_positions(input_ids, cache=None, position_ids=None, **kwargs):
        return forward(input_ids, cache=cache, **kwargs)

    monkeypatch.setattr("engine.runner.fits", lambda _: False)  # as of a model that only its own forward knows
    assert make_runner(files_of(tiny_folder), model).rehearse() < 1e-4
    monkeypatch.setattr(model, "forward", own_positions)
    with pytest.raises(LoadingError) as error:
        make_runner(files_of(tiny_folder), model)
    assert "with a cache than without" in message_of(error)


def test_half_precision_is_served(tiny_folder):
    model = load_model(files_of(tiny_folder), EngineConfig(device="cpu", dtype="bfloat16"))
    assert make_runner(files_of(tiny_folder), model).layer_shapes[0].dtype == torch.bfloat16


# --- quantised weights ---


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_quantised_weights_need_a_gpu(tiny_folder, kind):
    config = EngineConfig(model=str(tiny_folder), device="cpu", quantize=kind)
    for attempt in (lambda: load_model(files_of(tiny_folder), config), lambda: resolve(config)):
        with pytest.raises(LoadingError) as error:
            attempt()
        assert f"KVSCOPE_QUANTIZE={kind} needs a GPU" in message_of(error)


def test_quantised_weights_need_bitsandbytes(monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    with pytest.raises(LoadingError) as error:
        weights.check_options(EngineConfig(quantize="4bit"), torch.device("cuda"))
    assert "KVSCOPE_QUANTIZE=4bit" in message_of(error) and message_of(error).endswith("pip install bitsandbytes.")


def test_what_transformers_is_told_of_quantised_weights():
    device = torch.device("cuda", 1)
    options = weights.reading_options(EngineConfig(quantize="8bit"), device, torch.float16)
    assert options["device_map"] == {"": device} and options["quantization_config"].load_in_8bit
    options = weights.reading_options(EngineConfig(quantize="4bit", device="sharded"), device, torch.float16)
    told = options["quantization_config"]
    assert options["device_map"] == "auto" and told.load_in_4bit
    assert (told.bnb_4bit_quant_type, told.bnb_4bit_compute_dtype) == ("nf4", torch.float16)
    assert weights.reading_options(EngineConfig(), device, torch.float16) == {}


def test_the_engines_argument_is_the_setting(tiny_folder):
    config = EngineConfig(model=str(tiny_folder), device="cpu")
    with pytest.raises(LoadingError, match="KVSCOPE_QUANTIZE=8bit needs a GPU"):
        Engine.from_pretrained(quantization="8bit", config=config, host="thread")
    with pytest.raises(ValueError, match="quantization must be None, 'int8', '8bit' or '4bit', not '2bit'"):
        Engine.from_pretrained(quantization="2bit", config=config, host="thread")


def test_packing_leaves_quantised_layers_alone():
    class Linear4bit(torch.nn.Linear):
        pass

    whole_numbers = torch.nn.Linear(8, 8)
    whole_numbers.weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Linear4bit(8, 8), whole_numbers)
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, Linear4bit, torch.nn.Linear]


# --- several devices ---


def test_sharding_needs_a_gpu(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LoadingError) as error:
        resolve(EngineConfig(model=str(tiny_folder), device="sharded"))
    assert "no GPU for KVSCOPE_DEVICE=sharded" in message_of(error)


def test_sharding_needs_accelerate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(LoadingError) as error:
        weights.check_options(EngineConfig(device="sharded"), torch.device("cuda"))
    assert "KVSCOPE_DEVICE=sharded" in message_of(error) and message_of(error).endswith("pip install accelerate.")


MAPS = {
    "every part on the CPU": ({"model": "cpu", "lm_head": "cpu"}, None),
    "a layer on disk": (
        {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
         "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
        "model.layers.1.mlp.up_proj.weight",
    ),
    "embeddings and output on disk": (
        {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
         "lm_head": "disk"},
        "model.embed_tokens.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_a_model_in_parts_gives_the_stock_loops_tokens(name, tmp_path, monkeypatch):
    """Weights on disk lie on the meta device and visit the CPU for each forward: like layers on other GPUs."""
    device_map, away = MAPS[name]
    options = {"device_map": device_map, "offload_folder": str(tmp_path / "offload")}
    monkeypatch.setattr(weights, "reading_options", lambda *args: options)
    stock = build(FAMILIES["llama"]())
    stock.save_pretrained(tmp_path / "model")
    model = load_model(files_of(tmp_path / "model"), EngineConfig(device="cpu"))
    assert hasattr(model, "_hf_hook") == (away is not None)
    if away:
        assert model.get_parameter(away).device.type == "meta"
        before = [type(module) for module in model.modules()]
        pack_linears(model)
        assert [type(module) for module in model.modules()] == before
    runner = make_runner(files_of(tmp_path), model)
    assert runner.device.type == "cpu" and {shape.device.type for shape in runner.layer_shapes} == {"cpu"}
    core = EngineCore(runner, EngineConfig(max_batch_size=3, prefill_chunk=16, max_context=256), frozenset())
    prompts = [list(range(40)), [5], list(range(100, 120))]
    sequences = [Sequence(i, ids, SamplingParams(max_new_tokens=9), seed=i) for i, ids in enumerate(prompts)]
    outputs = run_until_done(core, sequences, join_every=2)
    for sequence in sequences:
        assert len(outputs[sequence.request_id]) == 9
        assert_greedy(StockLoop(stock), sequence.prompt_ids, outputs[sequence.request_id])


def test_a_cache_in_parts_lies_where_each_layer_computes():
    """Two devices of which this machine has one: `meta` computes nothing, but says where everything would be."""
    from engine.kv_cache import KVCache, LayerShape

    cpu, other = torch.device("cpu"), torch.device("meta")
    cache = KVCache([LayerShape(2, 8, 4, torch.float32, device) for device in (cpu, other)], slots=3, positions=64)
    view = cache.decode_view(torch.tensor([1, 2]), torch.tensor([5, 9]), window=64)
    for layer, device in zip(view.layers, (cpu, other), strict=True):
        keys, values = layer.update(torch.ones(2, 2, 1, 8, device=device), torch.ones(2, 2, 1, 4, device=device))
        assert (keys.device.type, values.device.type) == (device.type, device.type)
        assert keys.shape == (2, 2, 64, 8) and values.shape == (2, 2, 64, 4)
    assert cache.keys[0][1, :, 9].sum() == 16 and cache.keys[0].sum() == 32
    cache.resize(slots=4, positions=128)
    cache.swap(0, 1, 6, 10)
    assert [pool.device.type for pool in cache.keys + cache.values] == ["cpu", "meta"] * 2
    assert cache.bytes_per_token == 2 * 2 * (8 + 4) * 4 and cache.keys[0][0, :, 9].sum() == 16


def test_loading_options_do_not_reach_an_ordinary_model(tiny_folder):
    model = load_model(files_of(tiny_folder), EngineConfig(device="cpu"))
    assert not hasattr(model, "_hf_hook") and model.device.type == "cpu"
    assert load_tokenizer(tiny_folder).get_vocab() == byte_level_tokenizer().get_vocab()
    assert loading.resolve_device(EngineConfig(device="cpu")) == torch.device("cpu")
