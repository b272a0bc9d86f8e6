"""Find the model and load it: a local folder, a model of the hub, or the embedded default.

torch and transformers are imported inside the functions that need them: the front process loads the tokenizer with
`load_tokenizer`, and starts seconds earlier without torch.
"""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import embedded, hub
from engine.config import EngineConfig
from engine.errors import LoadingError
from engine.progress import Progress, no_progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU_DEFAULT = embedded.MODEL_ID
GPU_DEFAULT = "HuggingFaceTB/SmolLM2-1.7B-Instruct"

# Layers whose whole state is one key and one value a position; anything else needs another cache than ours.
_CACHED_LAYERS = {"full_attention", "sliding_attention"}
# What the configs of the model families call their context; the first that is set counts.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files lie, and where they came from."""

    folder: Path
    id: str
    source: str  # "local folder", "model hub" or `embedded.SOURCE`


# --- finding it -------------------------------------------------------------------------------------------------


def resolve(config: EngineConfig, progress: Progress = no_progress) -> ModelFiles:
    """The files of the configured model, fetched as far as they are missing.

    `progress(stage, done, total)` counts bytes; total 0 means unknown. A named model is never replaced by another.
    Raises `LoadingError` with one line that says what to do.
    """
    if config.model is None:
        return _default_model(config, progress)
    path = Path(config.model).expanduser()
    if path.is_dir():
        files = ModelFiles(path, config.model, "local folder")
    elif path.is_file():
        raise LoadingError(f"KVSCOPE_MODEL is a file ({path}): give the folder that holds config.json and the weights.")
    elif path.is_absolute() or config.model[0] in ".~" or config.model.count("/") > 1:
        raise LoadingError(f"There is no folder {path}: set KVSCOPE_MODEL to a model folder or a hub id (owner/name).")
    else:
        files = ModelFiles(hub.fetch(config.model, config.hub_timeout_s, progress), config.model, "model hub")
    _check_folder(files)
    return files


def _default_model(config: EngineConfig, progress: Progress) -> ModelFiles:
    on_cpu = resolve_device(config).type == "cpu"
    # A second start should not wait for the hub, least of all for one that did not answer the first time.
    if not (on_cpu and embedded.exists(config.cache_folder)):
        model_id = CPU_DEFAULT if on_cpu else GPU_DEFAULT
        try:
            files = ModelFiles(hub.fetch(model_id, config.hub_timeout_s, progress), model_id, "model hub")
            _check_folder(files)
            return files
        except LoadingError:
            pass  # Nobody asked for this model by name: the embedded one will do.
    return ModelFiles(embedded.ensure(config.cache_folder, progress), embedded.MODEL_ID, embedded.SOURCE)


def _check_folder(files: ModelFiles) -> None:
    if not (files.folder / "config.json").is_file():
        raise LoadingError(
            f"{files.folder} is not a model folder, it has no config.json: set KVSCOPE_MODEL to one "
            "that `save_pretrained` wrote."
        )
    if not any(next(files.folder.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        raise LoadingError(
            f"{files.folder} has no weights (*.safetensors or *.bin): fetch the model again, or choose another "
            "KVSCOPE_MODEL."
        )


# --- loading it -------------------------------------------------------------------------------------------------


def load_model(files: ModelFiles, config: EngineConfig) -> "PreTrainedModel":
    """The model on its device, in eval mode and without gradients; `LoadingError` if the engine cannot run it."""
    import torch

    device = resolve_device(config)
    model_config = _model_config(files)
    _refuse_unsupported(files, model_config)
    dtype = _resolve_dtype(config, device, model_config)
    _require_memory(files, model_config, dtype, device)
    try:
        # Soft-capped attention (Gemma 2) has no fused kernel, and transformers refuses it only in the forward.
        capped = getattr(model_config, "attn_logit_softcapping", None)
        model: Any = _read_weights(files, dtype, "eager" if capped else "sdpa")
        model.to(device)
    except LoadingError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise _too_big(files, device) from error
        raise LoadingError(_damaged(files, str(error))) from error
    return model.requires_grad_(False).eval()


def resolve_device(config: EngineConfig) -> "torch.device":
    """The `torch.device` that the configuration asks for; `LoadingError` if this machine has none such."""
    import torch

    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise LoadingError(f"KVSCOPE_DEVICE must be auto, cpu, cuda or cuda:N, not {config.device!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadingError(f"This machine has no GPU for KVSCOPE_DEVICE={config.device}: set it to auto or cpu.")
    return device


def _model_config(files: ModelFiles) -> Any:
    from transformers import AutoConfig

    try:
        with _quiet():
            return AutoConfig.from_pretrained(files.folder)
    except Exception as error:
        try:
            kind = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            raise LoadingError(_damaged(files, "config.json cannot be understood")) from error
        raise LoadingError(_unsupported(files, f"is of a kind that transformers does not know ({kind!r})")) from error


def _refuse_unsupported(files: ModelFiles, config: Any) -> None:
    """Everything that can be told before gigabytes are read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder:
        raise LoadingError(_unsupported(files, "is an encoder-decoder"))
    if any(getattr(config, f"{sense}_config", None) is not None for sense in ("vision", "audio")):
        raise LoadingError(_unsupported(files, "reads images or sound"))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LoadingError(_unsupported(files, f"cannot continue text ({config.model_type!r})"))
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise LoadingError(_unsupported(files, "reads text in both directions"))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    other_layers = set(getattr(config, "layer_types", None) or ()) - _CACHED_LAYERS
    if getattr(model_class, "_is_stateful", False) or other_layers:
        what = ", ".join(sorted(other_layers)) or "a recurrent state"
        raise LoadingError(_unsupported(files, f"has layers without an attention cache ({what})"))
    if not _takes_cache(model_class):
        raise LoadingError(_unsupported(files, "has no key/value cache"))


def _takes_cache(model_class: Any) -> bool:
    # transformers is renaming the argument: 5.17 knows the first name only, 5.24 prefers the second.
    return bool({"past_key_values", "cache"} & set(inspect.signature(model_class.forward).parameters))


def _resolve_dtype(config: EngineConfig, device: "torch.device", model_config: Any) -> "torch.dtype":
    import torch

    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    stored = _stored_dtype(model_config)
    if stored == torch.float16 or not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def _stored_dtype(model_config: Any) -> "torch.dtype":
    import torch

    stored = getattr(model_config, "dtype", None)
    return getattr(torch, stored, torch.float32) if isinstance(stored, str) else stored or torch.float32


def _read_weights(files: ModelFiles, dtype: "torch.dtype", attention: str) -> "PreTrainedModel":
    """The model on the CPU, all of whose weights came from the files."""
    from transformers import AutoModelForCausalLM

    def read(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            files.folder, dtype=dtype, attn_implementation=attention, output_loading_info=True, local_files_only=True
        )

    with _quiet():
        try:
            model, report = read(attention)
        except ValueError as error:
            if "attention" not in str(error):
                raise
            model, report = read("eager")
    # transformers fills gaps with random numbers and a warning; text made of them helps nobody.
    unusable = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if unusable:
        raise LoadingError(_damaged(files, f"{len(unusable)} weights are missing or misshapen, first {unusable[0]}"))
    return model


def _require_memory(files: ModelFiles, model_config: Any, dtype: "torch.dtype", device: "torch.device") -> None:
    """Linux kills a process that takes too much before Python can say anything: so look first."""
    if device.type != "cpu" or not Path("/proc/meminfo").exists():
        return
    kind = "*.safetensors" if next(files.folder.glob("*.safetensors"), None) else "*.bin"
    on_disk = sum(file.stat().st_size for file in files.folder.glob(kind))
    needed = on_disk * dtype.itemsize // _stored_dtype(model_config).itemsize
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if needed > int(meminfo["MemAvailable"].split()[0]) * 1024:
        raise _too_big(files, device, needed)


def _too_big(files: ModelFiles, device: "torch.device", needed: int = 0) -> LoadingError:
    size = f" (its weights take {needed / 1e9:.1f} GB)" if needed else ""
    return LoadingError(
        f"{files.id} does not fit into the memory of {device}{size}: choose a smaller KVSCOPE_MODEL, "
        "or a smaller KVSCOPE_DTYPE."
    )


def _unsupported(files: ModelFiles, why: str) -> str:
    return (
        f"{files.id} {why}, which this engine cannot run: set KVSCOPE_MODEL to a decoder-only text model "
        "with attention in every layer."
    )


def _damaged(files: ModelFiles, detail: str) -> str:
    detail = " ".join(detail.split())[:200]
    return f"The files of {files.id} in {files.folder} are damaged or do not fit together ({detail}): fetch them again."


# --- its tokenizer and numbers ----------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, with a pad token; `LoadingError` if there is none."""
    try:
        with _quiet():
            tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise LoadingError(
            f"{folder} has no usable tokenizer ({reason}): it needs tokenizer.json and tokenizer_config.json."
        ) from error
    if tokenizer.pad_token_id is None:
        _add_pad_token(tokenizer, _read_json(folder / "config.json"))
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """`AutoTokenizer` imports torch; where it would only pick the generic class, that is loaded without it."""
    generic = ("PreTrainedTokenizerFast", "TokenizersBackend")
    named = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if named in generic and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _add_pad_token(tokenizer: "PreTrainedTokenizerBase", config: dict[str, Any]) -> None:
    """The model's own pad token, else its end-of-sequence, else a new one."""
    pad = config.get("pad_token_id")
    if isinstance(pad, int) and 0 <= pad < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    elif tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's, else the config's, else the tokenizer's; or none."""
    for name in ("generation_config.json", "config.json"):
        ids = _as_ids(_read_json(folder / name).get("eos_token_id"))
        if ids:
            return ids
    return _as_ids(load_tokenizer(folder).eos_token_id)


def _as_ids(value: int | list[int] | None) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(id for id in ids if isinstance(id, int) and id >= 0)


def context_length(model_config: Any, default: int = 2048) -> int:
    """Tokens that the model was made for; `default` for models that set no limit (ALiBi)."""
    for name in _CONTEXT_NAMES:
        value = getattr(model_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class _quiet:
    """Within it transformers logs errors only and draws no bars; afterwards it is as talkative as before."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._before = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc_info: object) -> None:
        from transformers.utils import logging

        verbosity, bars = self._before
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
