"""What is known of a model: the snapshot's `model`, and the same before anything may compute with it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import EngineConfig
from engine.kv_cache import LayerShape
from engine.model_folder import ModelFiles
from engine.runner import ModelRunner
from engine.support import context_length
from engine.tokenizer import eos_token_ids
from engine.wire import Ready


def model_facts(
    files: ModelFiles, model: PreTrainedModel, shapes: Sequence[LayerShape], config: EngineConfig, parameters: int
) -> dict:
    """What snapshots say about the model; sizes in bytes, lengths in tokens."""
    embeddings: Any = model.get_input_embeddings()
    return {
        "id": files.id,
        "name": files.id.rstrip("/").rsplit("/", 1)[-1],
        "source": files.source,
        # Of what the products read; the cache's own numbers are `bytes_per_value` wide.
        "dtype": "int8" if config.quantize == "int8" else str(model.dtype).removeprefix("torch."),
        "device": ", ".join(dict.fromkeys(str(shape.device) for shape in shapes)),
        "quantization": config.quantize,
        "threads": torch.get_num_threads(),
        "layers": len(shapes),
        "kv_heads": shapes[0].kv_heads,
        "head_dim": shapes[0].head_dim,
        "value_dim": shapes[0].value_dim,
        "bytes_per_value": shapes[0].dtype.itemsize,
        "bytes_per_token": sum(shape.bytes_per_token for shape in shapes),
        "context": min(config.max_context, config.cache_tokens, context_length(model.config)),
        "parameters": parameters,
        "vocabulary": embeddings.weight.shape[0],
    }


def ready_without_computing(files: ModelFiles, model: PreTrainedModel, config: EngineConfig) -> Ready:
    """What a worker would say of the loaded `model`, found without computing with it."""
    shapes = cache_shapes(model)
    facts = model_facts(files, model, shapes, config, model.num_parameters())
    return Ready(str(files.folder), facts, eos_token_ids(files.folder, config.trust_remote_code))


def cache_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer of `model` will cache, from a forward of its double on the meta device, which has no numbers."""
    with torch.device("meta"):
        # Mixtures of experts insist on this type there, and none of the shapes depends on it.
        double = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    return [replace(shape, dtype=model.dtype, device=model.device) for shape in ModelRunner(double).layer_shapes]
