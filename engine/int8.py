"""Linear layers in 8 bits on a CPU: a quarter of the bytes to read, and integer products.

Each weight is rounded with the scale of its output channel, each activation with the scale of its own row (as in
LLM.int8(), Dettmers et al. 2022, without its outliers), so that no visitor's text decides how another's is rounded.
The sums of the products are exact integers.
"""

from typing import Any

import torch
from torch import nn

LARGEST = 127
ZERO = 128  # oneDNN's quick kernels want unsigned activations; signed ones run in a loop two hundred times slower


class Int8Linear(nn.Module):
    """A linear layer of float32 `weight` `[out, in]` with 8-bit weights and activations; float32 in and out.

    `fine` gives the activations a second byte for what the first one's rounding left: for the output layer, whose
    errors nothing evens out.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, fine: bool = False):
        super().__init__()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / LARGEST
        self.packed = torch.ops.onednn.qlinear_prepack((weight / scale[:, None]).round().to(torch.int8), None)
        # The activations' own 1 / 127 is in it, too.
        self.scale = scale / LARGEST
        self.zero_points = torch.zeros(len(scale), dtype=torch.long)
        self.bias = bias
        self.fine = fine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        largest = rows.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        y = self._fine_product(rows, largest) if self.fine else self._product(_round(rows, largest), largest)
        if self.bias is not None:
            y += self.bias
        return y.unflatten(0, x.shape[:-1])

    def _fine_product(self, rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        coarse = _round(rows, largest)
        rest = rows - (coarse.to(rows.dtype) - ZERO) * (largest / LARGEST)
        both = torch.cat([coarse, _round(rest, largest / (2 * LARGEST))])
        y, correction = self._product(both, torch.cat([largest, largest / (2 * LARGEST)])).chunk(2)
        return y.add_(correction)

    def _product(self, rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Of rounded rows `[rows, in]`, of which `largest` `[rows, 1]` was rounded to 127."""
        product: Any = torch.ops.onednn.qlinear_pointwise
        weights = (self.packed, self.scale, self.zero_points)
        y = product(rows, 1.0, ZERO, *weights, None, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(largest)


def _round(rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """To 1..255, of which 128 stands for zero: the conversion cuts off, so the half that rounds is added before."""
    return (rows * (LARGEST / largest)).add_(ZERO + 0.5).to(torch.uint8)
