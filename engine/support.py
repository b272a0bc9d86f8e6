"""Which models the engine can run: told from their configuration, before gigabytes are read."""

import inspect
import json
from typing import Any

from engine.errors import LoadingError
from engine.model_folder import ModelFiles, brings_code, damaged, one_line, quiet

# Layers whose whole state is one key and one value a position; anything else needs another cache than ours.
_CACHED_LAYERS = {"full_attention", "sliding_attention"}
# What the configs of the model families call their context; the first that is set counts.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


def read_config(files: ModelFiles, trust_remote_code: bool) -> Any:
    """The model's configuration; `LoadingError` if transformers does not know its kind."""
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        if brings_code(files.folder, "config.json"):
            raise LoadingError(code_refused(files.id, trust_remote_code, error)) from error
        try:
            kind = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            raise LoadingError(damaged(files, "config.json cannot be understood")) from error
        raise LoadingError(unsupported(files, f"is of a kind that transformers does not know ({kind!r})")) from error


def model_class_of(files: ModelFiles, config: Any, trust_remote_code: bool) -> Any:
    """The class that will be loaded: the model's own where it brings one and is trusted; None where there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own and trust_remote_code:
        try:
            return get_class_from_dynamic_module(own, files.folder, local_files_only=True)
        except Exception as error:
            raise LoadingError(code_refused(files.id, trust_remote_code, error)) from error
    if own and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LoadingError(code_refused(files.id, trust_remote_code))
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def refuse_unsupported(files: ModelFiles, config: Any, model_class: Any) -> None:
    """`LoadingError` with one line for a model whose layers our cache does not fit."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder:
        raise LoadingError(unsupported(files, "is an encoder-decoder"))
    senses = [getattr(config, f"{sense}_config", None) for sense in ("vision", "audio", "audio_encoder")]
    if any(senses) or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise LoadingError(unsupported(files, "reads images or sound"))
    if model_class is None:
        raise LoadingError(unsupported(files, f"cannot continue text ({config.model_type!r})"))
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise LoadingError(unsupported(files, "reads text in both directions"))
    if "local" in (getattr(config, "attention_layers", None) or ()):
        # GPT-Neo finds its window by the cache's length, which is not a row's own in a shared batch.
        raise LoadingError(unsupported(files, "has local attention that takes no mask"))
    other_layers = set(getattr(config, "layer_types", None) or ()) - _CACHED_LAYERS
    if getattr(model_class, "_is_stateful", False) or other_layers:
        what = ", ".join(sorted(other_layers)) or "a recurrent state"
        raise LoadingError(unsupported(files, f"has layers without an attention cache ({what})"))
    if not _takes_cache(model_class):
        raise LoadingError(unsupported(files, "has no key/value cache"))


def _takes_cache(model_class: Any) -> bool:
    # transformers is renaming the argument: 5.17 knows the first name only, 5.24 prefers the second.
    return bool({"past_key_values", "cache"} & set(inspect.signature(model_class.forward).parameters))


def unsupported(files: ModelFiles, why: str) -> str:
    return (
        f"{files.id} {why}, which this engine cannot run: set KVSCOPE_MODEL to a decoder-only text model "
        "with attention in every layer."
    )


def code_refused(name: object, trusted: bool, error: Exception | None = None) -> str:
    if trusted and error is not None:
        return f"The Python code that comes with {name} cannot be loaded ({one_line(error)}): choose another model."
    return (
        f"{name} comes with Python code of its own, which is run only if you trust it: read it, then set "
        "KVSCOPE_TRUST_REMOTE_CODE=true, or choose another KVSCOPE_MODEL."
    )


def context_length(model_config: Any, default: int = 2048) -> int:
    """Tokens that the model was made for; `default` for models that set no limit (ALiBi)."""
    for name in _CONTEXT_NAMES:
        value = getattr(model_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default
