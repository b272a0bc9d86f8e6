"""Weights in the order in which the CPU's matrix kernels read them: the same float32 products, sooner.

A decode step multiplies a few rows with every weight of the model. oneDNN does that faster from blocked
weights than from plain ones, and the output layer, by far the widest, gains most.
"""

import torch
from torch import nn

ROWS = 16  # what the blocking is chosen for; other numbers of rows use the same layout


class PackedLinear(nn.Module):
    """A `nn.Linear` whose weight is kept in oneDNN's blocked layout only."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a float32 model on a CPU; elsewhere nothing happens.

    Quantised layers stay as they are, and so do those of a sharded model, whose hooks fetch their weights.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            # Not its subclasses, which may compute something else.
            if type(child) is nn.Linear and _packable(child.weight) and not hasattr(child, "_hf_hook"):
                setattr(parent, name, PackedLinear(child))


def _packable(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
