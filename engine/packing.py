"""Weights in the order in which the CPU's matrix kernels read them: the same float32 products, sooner.

A decode step multiplies a few rows with every weight of the model. oneDNN does that faster from blocked
weights than from plain ones, the output layer, by far the widest, gains most, and layers that read the same
input are multiplied at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS = 16  # what the blocking is chosen for; other numbers of rows use the same layout
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear layer, `weight` `[out, in]`, that keeps its weight in oneDNN's blocked layout only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Joint:
    """Several layers as one product: the first that is asked computes for all, and each takes its columns once."""

    def __init__(self, product: nn.Module, out_features: list[int]):
        self.product, self._out_features = product, out_features
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if x is not self._input or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(self.product(x).split(self._out_features, dim=-1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None  # a long prompt's states must not be held until the next step
        return output


class Share(nn.Module):
    """One layer's place in a `Joint`."""

    def __init__(self, joint: Joint, index: int):
        super().__init__()
        self.joint, self._index = joint, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joint(x, self._index)


def pack_linears(model: Any, quantize: str = "none") -> bool:
    """Replace every linear layer of a float32 model on a CPU, by `Int8Linear` if `quantize` is "int8".

    Returns whether there was any; elsewhere nothing happens. Quantised layers stay as they are, and so do those of a
    sharded model, whose hooks fetch their weights.
    """
    if not torch.backends.mkldnn.is_available():
        return False

    def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        if quantize != "int8":
            return PackedLinear(weight, bias)
        from engine.int8 import Int8Linear  # only here, for its kernels take a second to import

        return Int8Linear(weight, bias)

    any_packed = False
    for parent in list(model.modules()):
        for names in SAME_INPUT:
            _join(parent, names, packed)
        for name, child in parent.named_children():
            if _packable(child):
                linear: Any = child
                setattr(parent, name, packed(linear.weight.detach(), linear.bias))
                any_packed = True
    return any_packed


def _join(parent: nn.Module, names: tuple[str, ...], packed: Callable[..., nn.Module]) -> None:
    """Let the layers of these names share one product, where they are all there and alike."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    if not all(_packable(layer) for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    joint = Joint(packed(weight, bias), [layer.out_features for layer in layers])
    for index, name in enumerate(names):
        setattr(parent, name, Share(joint, index))


def _packable(layer: Any) -> bool:
    # Not a subclass, which may compute something else.
    if type(layer) is not nn.Linear or hasattr(layer, "_hf_hook"):
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
