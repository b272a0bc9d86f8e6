"""Linear layers in 8 bits on a CPU: a quarter of the bytes to read, and integer products.

Each weight is rounded with the scale of its output channel, each activation with the scale of its own row (as in
LLM.int8(), Dettmers et al. 2022, without its outliers), so that no visitor's text decides how another's is rounded.
The sums of the products are exact integers.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from engine import kernels

FEW = 2  # rows for which weights in plain order are read faster than oneDNN reads its blocks


class Int8Linear(nn.Module):
    """A linear layer of float32 `weight` `[out, in]` with 8-bit weights and activations; float32 in and out."""

    exact = True  # a row's bits do not depend on the other rows

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / float(kernels.LARGEST)
        rounded = (weight / scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        # The activations' own 1 / 127 is in it, too.
        self.scale = scale / float(kernels.LARGEST)
        self._arrays = rounded.numpy(), self.scale.numpy()
        self.zero_points = torch.zeros(len(scale), dtype=torch.long)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels.use_threads(torch.get_num_threads())
        rows = x.flatten(0, -2).contiguous().numpy()
        return torch.from_numpy(self.multiply(rows)).unflatten(0, x.shape[:-1])

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """`[rows, in]` to `[rows, out]`."""
        codes, largest = np.empty(x.shape, np.uint8), np.empty((len(x), 1), np.float32)
        kernels.round_rows(x, codes, largest)
        y = self._product(codes, largest)
        if self.bias is not None:
            y += self.bias
        return y.numpy()

    def _product(self, codes: np.ndarray, largest: np.ndarray) -> torch.Tensor:
        if len(codes) <= FEW:
            y = np.empty((len(codes), len(self._arrays[0])), np.float32)
            kernels.multiply_few(codes, *self._arrays, largest, torch.get_num_threads(), y)
            return torch.from_numpy(y)
        product: Any = torch.ops.onednn.qlinear_pointwise
        weights = (self.packed, self.scale, self.zero_points)
        zero = int(kernels.ZERO)
        y = product(torch.from_numpy(codes), 1.0, zero, *weights, None, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(torch.from_numpy(largest))
