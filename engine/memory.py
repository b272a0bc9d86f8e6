"""How much cache a GPU has room for, and what is said when memory runs out."""

from collections import Counter
from typing import TYPE_CHECKING

from engine.errors import LoadingError

if TYPE_CHECKING:
    from engine.kv_cache import LayerShape

NO_ROOM = "This does not fit into the memory that is left, even alone. Please shorten the text or ask for fewer tokens."
NO_ROOM_FOR_RACE = "The race ended: beside the answers there is no memory left for it. Start it again later."
NO_ROOM_FOR_CACHE = "The model fills the GPU and leaves no room for a cache: choose a smaller one, or KVSCOPE_QUANTIZE."

LEAST_TOKENS = 64
CACHE_SHARE = 0.8  # of a GPU's free memory; the rest is for what a step computes


def fitting_tokens(wanted: int, layers: "list[LayerShape]") -> int:
    """As many of the `wanted` positions as every GPU has room for now, for those of the layers that lie on it.

    `LoadingError` if that is next to nothing.
    """
    import torch

    bytes_per_token: Counter[torch.device] = Counter()
    for layer in layers:
        if layer.device.type == "cuda":
            bytes_per_token[layer.device] += layer.bytes_per_token
    free = {device: CACHE_SHARE * torch.cuda.mem_get_info(device)[0] for device in bytes_per_token}
    tokens = min([wanted, *(int(free[device] / count) for device, count in bytes_per_token.items())])
    if tokens < LEAST_TOKENS:
        raise LoadingError(NO_ROOM_FOR_CACHE)
    return tokens


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: Python's, or torch's on a GPU or a CPU, which says so in words only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
