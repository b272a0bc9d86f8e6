"""The decode step as CUDA graphs: recorded once for each shape, then replayed by one call.

A decode step of a small model is some thousand kernels of a few microseconds; started one by one, they keep the host
longer than the GPU. Shapes are rounded up to powers of two, so a few recordings serve every batch. A shape's first step
is computed as always, which is also the warm-up that a recording needs; so nobody waits for shapes that never come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine.kv_cache import KVCache
from engine.lean import LeanForward
from engine.lean_cpu import CpuForward

WINDOW_STEP = 256
# These derive their frequencies from the longest position at hand, which the host has to ask for.
UNREADY_ROTATIONS = frozenset({"dynamic", "longrope"})

# As `ModelRunner.decode_padded`.
Compute = Callable[[KVCache, torch.Tensor, int], torch.Tensor]


def can_record(lean: LeanForward | CpuForward | None, device: torch.device) -> bool:
    """Whether the device and the model's forward allow it: all shapes known beforehand, no question to the host."""
    return isinstance(lean, LeanForward) and device.type == "cuda" and lean.rotation not in UNREADY_ROTATIONS


@dataclass(frozen=True)
class Recording:
    graph: Any  # torch.cuda.CUDAGraph, which a build without CUDA does not have
    inputs: torch.Tensor
    logits: torch.Tensor


@dataclass
class Recordings:
    """Of one cache, by rows and window; None for a shape that has been seen once. They read and write at `place`."""

    place: torch.Tensor
    by_shape: dict[tuple[int, int], Recording | None] = field(default_factory=dict)


class DecodeGraphs:
    """Decode steps over the first slots of a `KVCache`."""

    def __init__(self, compute: Compute):
        self._compute = compute
        self._recordings: WeakKeyDictionary[KVCache, Recordings] = WeakKeyDictionary()

    def decode(self, cache: KVCache, token_ids: list[int], positions: list[int]) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of the pending tokens, valid until the next call."""
        recordings = self._recordings_of(cache)
        shape = rows, window = recorded_shape(len(token_ids), max(positions) + 1, cache)
        inputs = padded(token_ids, positions, rows, pinned=True)
        if shape not in recordings:
            recordings[shape] = None
            logits = self._compute(cache, inputs.to(cache.keys[0].device, non_blocking=True), window)
            return logits[: len(token_ids)]
        recording = recordings[shape] = recordings[shape] or self._record(cache, rows, window)
        recording.inputs.copy_(inputs, non_blocking=True)
        recording.graph.replay()
        return recording.logits[: len(token_ids)]

    def _recordings_of(self, cache: KVCache) -> dict[tuple[int, int], Recording | None]:
        found = self._recordings.get(cache)
        if found is None or found.place is not cache.keys[0]:  # else they would write where it no longer is
            found = self._recordings[cache] = Recordings(cache.keys[0])
        return found.by_shape

    def _record(self, cache: KVCache, rows: int, window: int) -> Recording:
        inputs = torch.zeros(3, rows, dtype=torch.long, device=cache.keys[0].device)  # of rows that do not count
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile: the one of a race's `generate()`.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._compute(cache, inputs, window)
        return Recording(graph, inputs, logits)


def recorded_shape(rows: int, longest: int, cache: KVCache) -> tuple[int, int]:
    """Rows and window of the recording that serves that many rows, the longest of them of `longest` tokens."""
    window = max(WINDOW_STEP, 1 << (longest - 1).bit_length())
    return min(1 << (rows - 1).bit_length(), cache.slots), min(window, cache.positions)


def padded(token_ids: list[int], positions: list[int], rows: int, *, pinned: bool = False) -> torch.Tensor:
    """The inputs of a step of `rows` rows, of which only the first count."""
    rest = [0] * (rows - len(token_ids))
    counts = [1] * len(token_ids)
    return torch.tensor([token_ids + rest, positions + rest, counts + rest], pin_memory=pinned)
