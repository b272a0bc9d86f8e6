"""Linear layers in 8 bits on a CPU: a quarter of the bytes to read, and integer products.

Each weight is rounded with the scale of its output channel, each activation with the scale of its own row (as in
LLM.int8(), Dettmers et al. 2022, without its outliers), so that no visitor's text decides how another's is rounded.
The sums of the products are exact integers.
"""

from typing import Any

import torch
from torch import nn

from engine import kernels

FEW = 2  # rows for which weights in plain order are read faster than oneDNN reads its blocks


class Int8Linear(nn.Module):
    """A linear layer of float32 `weight` `[out, in]` with 8-bit weights and activations; float32 in and out.

    `fine` gives the activations a second byte for what the first one's rounding left: for the output layer, whose
    errors nothing evens out.
    """

    exact = True  # a row's bits do not depend on the other rows

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, fine: bool = False):
        super().__init__()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / float(kernels.LARGEST)
        self.weight = (weight / scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(self.weight, None)
        # The activations' own 1 / 127 is in it, too.
        self.scale = scale / float(kernels.LARGEST)
        self.zero_points = torch.zeros(len(scale), dtype=torch.long)
        self.bias = bias
        self.fine = fine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2).contiguous()
        halves = 2 if self.fine else 1
        codes = torch.empty(halves * rows.shape[0], rows.shape[1], dtype=torch.uint8)
        largest = torch.empty(len(codes), 1)
        kernels.round_rows(rows.numpy(), codes.numpy(), largest.numpy())
        y = self._product(codes, largest)
        if self.fine:
            y, correction = y.chunk(2)
            y += correction
        if self.bias is not None:
            y += self.bias
        return y.unflatten(0, x.shape[:-1])

    def _product(self, codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        if len(codes) <= FEW:
            y = torch.empty(len(codes), len(self.scale))
            arrays = (part.numpy() for part in (codes, self.weight, self.scale, largest))
            kernels.multiply_few(*arrays, torch.get_num_threads(), y.numpy())
            return y
        product: Any = torch.ops.onednn.qlinear_pointwise
        weights = (self.packed, self.scale, self.zero_points)
        y = product(codes, 1.0, int(kernels.ZERO), *weights, None, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(largest)
