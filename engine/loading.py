"""Find the model and load it: a local folder, a model of the hub, or the embedded default."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import embedded, hub, weights
from engine.config import EngineConfig
from engine.errors import LoadingError
from engine.memory import is_out_of_memory
from engine.model_folder import ModelFiles, damaged, one_line, quiet
from engine.progress import Progress, no_progress
from engine.support import model_class_of, read_config, refuse_unsupported, unsupported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from engine.runner import ModelRunner

CPU_DEFAULT = embedded.MODEL_ID
GPU_DEFAULT = "HuggingFaceTB/SmolLM2-1.7B-Instruct"

# Of `ModelRunner.rehearse`: a hundred times what rounding does, a tenth of what a small mistake does.
_FAR = 1e-2


# --- finding it -------------------------------------------------------------------------------------------------


def resolve(config: EngineConfig, progress: Progress = no_progress) -> ModelFiles:
    """The files of the configured model, fetched as far as they are missing.

    `progress(stage, done, total)` counts bytes; total 0 means unknown. A named model is never replaced by another.
    Raises `LoadingError` with one line that says what to do.
    """
    weights.check_options(config, resolve_device(config))
    if config.model is None:
        if config.revision:
            raise LoadingError("KVSCOPE_REVISION belongs to a model of the hub: set KVSCOPE_MODEL, too, or unset it.")
        return _default_model(config, progress)
    path = Path(config.model).expanduser()
    if path.is_dir():
        if config.revision:
            raise LoadingError(f"KVSCOPE_REVISION cannot be had from a folder ({path}): unset it, or name a hub model.")
        files = ModelFiles(path, config.model, "local folder")
    elif path.is_file():
        raise LoadingError(f"KVSCOPE_MODEL is a file ({path}): give the folder that holds config.json and the weights.")
    elif path.is_absolute() or config.model[0] in ".~" or config.model.count("/") > 1:
        raise LoadingError(f"There is no folder {path}: set KVSCOPE_MODEL to a model folder or a hub id (owner/name).")
    else:
        folder = hub.fetch(
            config.model,
            config.hub_timeout_s,
            progress,
            revision=config.revision,
            with_code=config.trust_remote_code,
        )
        files = ModelFiles(folder, config.model, "model hub")
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
    device = resolve_device(config)
    weights.check_options(config, device)
    model_config = read_config(files, config.trust_remote_code)
    refuse_unsupported(files, model_config, model_class_of(files, model_config, config.trust_remote_code))
    dtype = _resolve_dtype(config, device, model_config)
    _require_memory(files, model_config, dtype, device)
    options = weights.reading_options(config, device, dtype)
    try:
        # Soft-capped attention (Gemma 2) has no fused kernel, and transformers refuses it only in the forward.
        capped = getattr(model_config, "attn_logit_softcapping", None)
        model: Any = _read_weights(
            files,
            "eager" if capped else "sdpa",
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            **options,
        )
        if "device_map" not in options:
            model.to(device)
    except LoadingError:
        raise
    except ImportError as error:
        raise LoadingError(f"{files.id} needs a package that is not installed ({one_line(error)}).") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise _too_big(files, device) from error
        raise LoadingError(damaged(files, str(error))) from error
    return model.requires_grad_(False).eval()


def make_runner(files: ModelFiles, model: "PreTrainedModel") -> "ModelRunner":
    """A runner that has shown that it can run the model; `LoadingError` if it cannot."""
    import torch

    from engine.runner import ModelRunner

    try:
        runner = ModelRunner(model)
        distance = runner.rehearse()
    except Exception as error:
        if is_out_of_memory(error):
            raise _too_big(files, model.device) from error
        raise LoadingError(unsupported(files, f"fails in its first steps ({one_line(error)})")) from error
    # Half precision rounds too much to tell; what is not finite fails where somebody asks for it.
    if model.dtype == torch.float32 and distance > _FAR:
        raise LoadingError(unsupported(files, "says something else with a cache than without one"))
    return runner


def resolve_device(config: EngineConfig) -> "torch.device":
    """The `torch.device` that the configuration asks for; `LoadingError` if this machine has none such.

    Of a sharded model, the kind of device only.
    """
    import torch

    name = config.device
    if name in ("auto", weights.SHARDED):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise LoadingError(f"KVSCOPE_DEVICE must be auto, cpu, cuda, cuda:N or sharded, not {config.device!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadingError(f"This machine has no GPU for KVSCOPE_DEVICE={config.device}: set it to auto or cpu.")
    return device


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


def _read_weights(files: ModelFiles, attention: str, **options: Any) -> "PreTrainedModel":
    """The model, all of whose weights came from the files; on the CPU where `options` have no `device_map`."""
    from transformers import AutoModelForCausalLM

    def read(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            files.folder, attn_implementation=attention, output_loading_info=True, local_files_only=True, **options
        )

    with quiet():
        try:
            model, report = read(attention)
        except ValueError as error:
            if "attention" not in str(error):
                raise
            model, report = read("eager")
    # transformers fills gaps with random numbers and a warning; text made of them helps nobody.
    unusable = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if unusable:
        raise LoadingError(damaged(files, f"{len(unusable)} weights are missing or misshapen, first {unusable[0]}"))
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
