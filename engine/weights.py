"""In which form the weights are kept, and on which devices: quantised, or spread over several GPUs."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import LoadingError

if TYPE_CHECKING:
    import torch

SHARDED = "sharded"
BITSANDBYTES = ("8bit", "4bit")


def check_options(config: EngineConfig, device: "torch.device") -> None:
    """`LoadingError` with one line if this machine cannot do what the settings ask for; quick, before any download."""
    import torch

    setting = f"KVSCOPE_QUANTIZE={config.quantize}"
    needed = []
    if config.quantize == "int8":
        if device.type != "cpu" or config.dtype not in ("auto", "float32"):
            advice = "set KVSCOPE_DEVICE=cpu and leave KVSCOPE_DTYPE unset"
            raise LoadingError(f"{setting} needs a CPU and float32: {advice}.")
    elif config.quantize != "none":
        if device.type != "cuda":
            raise LoadingError(f"{setting} needs a GPU, and this is {device}: unset it, or choose a smaller model.")
        needed = ["bitsandbytes", "accelerate"]
    elif config.device == SHARDED:
        setting, needed = f"KVSCOPE_DEVICE={SHARDED}", ["accelerate"]
    if config.device == SHARDED and torch.cuda.device_count() == 0:
        raise LoadingError(f"This machine has no GPU for KVSCOPE_DEVICE={SHARDED}: set it to auto or cpu.")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise LoadingError(f"{setting} needs a package that is not installed: pip install {' '.join(missing)}.")


def reading_options(config: EngineConfig, device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    """What `from_pretrained` has to be told; nothing for whole weights on one device."""
    options: dict[str, Any] = {}
    if config.device == SHARDED:
        options["device_map"] = "auto"
    elif config.quantize in BITSANDBYTES:
        options["device_map"] = {"": device}
    if config.quantize in BITSANDBYTES:
        options["quantization_config"] = quantization(config.quantize, dtype)
    return options


def quantization(kind: str, dtype: "torch.dtype") -> Any:
    """How bitsandbytes is to keep the linear layers, `kind` "8bit" or "4bit", and compute with them in `dtype`."""
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
