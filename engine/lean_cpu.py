"""`LeanForward` on a CPU in float32: matrix products by oneDNN, all between them by `engine.kernels`.

The stock forward starts some fifty small operators a layer, this one nine. Attention reads just the positions that a
token may see. With rounded weights (`Int8Linear`) nothing depends on the batch, the cache's room or a prompt's chunks:
the products are sums of whole numbers. In float32 a product's bits do depend on how many rows it has, so nothing is
lost there by letting a flash kernel (Dao et al. 2022) attend for whole chunks, which it does sooner.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.kv_cache import SlotLayer
from engine.lean import Part, asked_for, attend, by_part, by_row
from engine.packing import Share

NO_NORMS = np.empty((0, 1), np.float32)


def compiles(model: PreTrainedModel) -> bool:
    """Whether this forward can take the place of a `LeanForward`."""
    weight: Any = model.get_input_embeddings().weight
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and model.config.hidden_act == "silu"


@dataclass(frozen=True)
class Span:
    """A part, which of all tokens are its own, and what the kernels need of each: its turn, and where it is written."""

    part: Part
    tokens: slice
    positions: np.ndarray
    places: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class CpuForward:
    """As `LeanForward`."""

    def __init__(self, model: PreTrainedModel):
        body: Any = model.model
        self._embed, self._layers, self._norm, self._rotary = body.embed_tokens, body.layers, body.norm, body.rotary_emb
        self._model = model
        self._layer_types: Any = getattr(model.config, "layer_types", None)
        self._window: int | None = getattr(model.config, "sliding_window", None)
        # Only here, for it takes a second: a lease on a GPU must not wait for a CPU's compiler.
        self._kernels: Any = import_module("engine.kernels")

    def needs_mask(self, queries: int) -> bool:
        """Whether attention of that many tokens a row goes by `Part.mask`.

        If not, it goes by positions, and the cache's views must show all its room.
        """
        return queries > 1 and not getattr(self._layers[0].mlp.down_proj, "exact", False)

    def __call__(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits of each part, `[rows, queries, vocabulary]` with `every`, else `[rows, 1, vocabulary]`."""
        hidden = self._embed(torch.cat([part.ids.flatten() for part in parts]))
        spans = self._spans(parts, hidden)
        change = torch.zeros_like(hidden)
        for index, layer in enumerate(self._layers):
            x = self._add_and_norm(hidden, change, layer.input_layernorm)
            change = self._attention(index, layer.self_attn, x, spans)
            x = self._add_and_norm(hidden, change, layer.post_attention_layernorm)
            change = self._mlp(layer.mlp, x)
        last, change = (asked_for(states, parts).contiguous() for states in (hidden, change))
        head: Any = self._model.get_output_embeddings()  # asked for each time: packing replaces it
        return by_part(head(self._add_and_norm(last, change, self._norm)), parts)

    def _spans(self, parts: list[Part], hidden: torch.Tensor) -> list[Span]:
        all_positions = torch.cat([part.positions.flatten() for part in parts])
        cos, sin = (turn[0].contiguous().numpy() for turn in self._rotary(hidden, all_positions[None]))
        spans, start = [], 0
        for part in parts:
            tokens = slice(start, start + part.ids.numel())
            positions = all_positions[tokens].numpy()
            # Another cache takes the new tokens' states by themselves.
            here = _in_slots(part) or part.view is None
            places = positions if here else (part.positions - part.positions[:, :1]).flatten().numpy()
            spans.append(Span(part, tokens, positions, places, cos[tokens], sin[tokens]))
            start = tokens.stop
        return spans

    def _add_and_norm(self, hidden: torch.Tensor, change: torch.Tensor, norm: Any) -> torch.Tensor:
        """`hidden` grows by `change`; returns its norm. All are `[tokens, hidden]`."""
        out, epsilon = torch.empty_like(hidden), np.float32(norm.variance_epsilon)
        self._kernels.add_and_norm(hidden.numpy(), change.numpy(), norm.weight.detach().numpy(), epsilon, out.numpy())
        return out

    def _mlp(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        gate_up = _joined(mlp.gate_proj, mlp.up_proj)(x)
        gated = torch.empty(len(x), gate_up.shape[1] // 2)
        self._kernels.gate(gate_up.numpy(), gated.numpy())
        return mlp.down_proj(gated)

    def _attention(self, index: int, attention: Any, x: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """The attention block of a layer for all tokens, `[tokens, hidden]`."""
        qkv, dim = _joined(attention.q_proj, attention.k_proj, attention.v_proj)(x), attention.head_dim
        kv_heads = qkv.shape[1] // dim // (attention.num_key_value_groups + 2)
        q = torch.empty(len(x), kv_heads * attention.num_key_value_groups, dim)
        said = torch.empty_like(q)
        norms = _head_norms(attention)
        for span in spans:
            keys, values = _room(span.part, index, kv_heads, dim)
            turn = (span.cos, span.sin, span.places)
            arrays = (part.numpy() for part in (q[span.tokens], keys, values))
            self._kernels.place(qkv[span.tokens].numpy(), *norms, *turn, *arrays)
            if span.part.view is not None and not _in_slots(span.part):
                keys, values = span.part.view.update(keys, values, index)
            self._attend(index, span, q[span.tokens], keys, values, attention.scaling, said[span.tokens])
        return attention.o_proj(said.flatten(1))

    def _attend(
        self,
        index: int,
        span: Span,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        said: torch.Tensor,
    ) -> None:
        """What `q` `[tokens, heads, dim]` gathers of `keys` and `values` `[rows, kv_heads, room, dim]` into `said`."""
        if self.needs_mask(span.part.ids.shape[1]):
            end = span.positions[-1] + 1
            mask = span.part.mask[self._layer_types[index]] if isinstance(span.part.mask, dict) else span.part.mask
            gathered = attend(by_row(q, span.part), keys[:, :, :end], values[:, :, :end], mask, scale)
            said.flatten(1).copy_(gathered)
            return
        arrays = (q.numpy(), keys.contiguous().numpy(), values.contiguous().numpy(), span.positions)
        window, threads = self._window_of(index), torch.get_num_threads()
        self._kernels.attend(*arrays, window, np.float32(scale), threads, said.numpy())

    def _window_of(self, index: int) -> int:
        """How many tokens a token of this layer may see, itself included."""
        slides = self._layer_types is None or self._layer_types[index] == "sliding_attention"
        return self._window if self._window and slides else sys.maxsize


def _in_slots(part: Part) -> bool:
    """Whether keys and values go straight to slots that all count."""
    layer = part.view.layers[0] if part.view is not None else None
    return isinstance(layer, SlotLayer) and layer.counts is None


def _room(part: Part, index: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a part's keys and values of a layer are written, each `[rows, kv_heads, room, dim]`."""
    if part.view is not None and _in_slots(part):
        layer: Any = part.view.layers[index]
        return layer.keys[layer.rows], layer.values[layer.rows]
    rows, queries = part.ids.shape
    return torch.empty(rows, kv_heads, queries, dim), torch.empty(rows, kv_heads, queries, dim)


def _joined(*layers: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layers with the same input as one, their outputs side by side."""
    if isinstance(layers[0], Share):
        return layers[0].joint.product
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


def _head_norms(attention: Any) -> tuple[np.ndarray, np.float32]:
    """Weights `[2, dim]` and epsilon of the norms that some models apply to each head's queries and keys."""
    if not hasattr(attention, "q_norm"):
        return NO_NORMS, np.float32(0)
    weights = torch.stack([attention.q_norm.weight, attention.k_norm.weight])
    return weights.detach().numpy(), np.float32(attention.q_norm.variance_epsilon)
