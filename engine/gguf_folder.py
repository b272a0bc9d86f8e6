"""From a GGUF file of a Llama-shaped model to the plain folder that stock `transformers` loads.

`transformers` can read GGUF itself, but needs `accelerate` for it, takes three times as long,
and forgets that SmolLM2 splits numbers into digits. What has to be done fits on a page: undo the
quantisation, undo llama.cpp's reordering of the rotary dimensions, and write down the
metadata under the names that `config.json` and `tokenizer.json` use. It computes with numpy alone,
so it may run in a process that must not start torch's threads.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from engine.progress import Progress

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write weights (float32), configuration, tokenizer and chat template of `gguf_file` into `folder`.

    Raises `ValueError` for an architecture or tokenizer that this page does not cover, `OSError`
    when the folder cannot be written.
    """
    import gguf

    progress("converting", 0, 0)
    reader = gguf.GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{gguf_file.name} is not a Llama-shaped model with SmolLM's tokenizer")
    config = _config(facts, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(facts))
    _save_tokenizer(facts, folder)
    _save_weights(reader.tensors, config, folder / "model.safetensors", progress)


def _config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": facts["llama.context_length"],
        # GGUF keeps it as a float32; its shortest decimal form is what the authors wrote.
        "rms_norm_eps": float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_generation_config(facts),
    }


def _generation_config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: facts[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }


def _save_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    # "smollm" is GPT-2's pattern after every digit has been set apart: "  12" is two spaces, 1 and 2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _SPECIAL_TOKEN
        ]
    )
    names = {
        role: tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **names,
    )
    wrapped.chat_template = facts["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)


def _save_weights(tensors: list[Any], config: dict[str, Any], file: Path, progress: Progress) -> None:
    """Dequantise one tensor after the other; progress counts bytes of float32."""
    import gguf
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    total = sum(int(tensor.n_elements) for tensor in tensors) * 4
    done = 0
    weights = {}
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            values = _split_rotary_halves(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = _split_rotary_halves(values, config["num_key_value_heads"])
        weights[_hf_name(tensor.name)] = np.ascontiguousarray(values)
        done += values.nbytes
        progress("converting", done, total)
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # also where the disk is full
        raise OSError(str(error)) from error
    # safetensors writes files that only their owner may read, but a cache may be filled by one
    # user (an image's builder) and read by another.
    file.chmod(0o644)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)
    if layer:
        return f"model.layers.{layer[1]}.{_TENSOR_NAMES[layer[2]]}.{layer[3]}"
    stem, suffix = name.split(".")
    return f"{_TENSOR_NAMES[stem]}.{suffix}"


def _split_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, hidden]: llama.cpp rotates neighbouring rows, `transformers` rows half a head apart."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
