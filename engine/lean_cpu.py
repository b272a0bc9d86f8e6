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

Product = Callable[[np.ndarray], np.ndarray]  # [rows, in] to [rows, out]
Norm = tuple[np.ndarray, np.float32]  # weights and epsilon


def compiles(model: PreTrainedModel) -> bool:
    """Whether this forward can take the place of a `LeanForward`."""
    weight: Any = model.get_input_embeddings().weight
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and model.config.hidden_act == "silu"


@dataclass(frozen=True)
class Layer:
    """What a layer computes with. `head_norms` are those of queries and keys, one above the other, or none at all."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    input_norm: Norm
    mlp_norm: Norm
    head_norms: Norm
    head_dim: int
    groups: int
    scale: np.float32
    window: int


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
    """As `LeanForward`, by the products and norms that the model has now: packing comes before."""

    def __init__(self, model: PreTrainedModel):
        body: Any = model.model
        self._embed, self._rotary, self._norm = body.embed_tokens, body.rotary_emb, _norm(body.norm)
        self._head: Any = model.get_output_embeddings()
        self._layer_types: Any = getattr(model.config, "layer_types", None)
        self._layers = [self._layer(index, layer, model.config) for index, layer in enumerate(body.layers)]
        self._exact = all(getattr(layer.mlp.down_proj, "exact", False) for layer in body.layers)
        # Only here, for it takes a second: a lease on a GPU must not wait for a CPU's compiler.
        self._kernels: Any = import_module("engine.kernels")

    def needs_mask(self, queries: int) -> bool:
        """Whether attention of that many tokens a row goes by `Part.mask`.

        If not, it goes by positions, and the cache's views must show all its room.
        """
        return queries > 1 and not self._exact

    def __call__(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits of each part, `[rows, queries, vocabulary]` with `every`, else `[rows, 1, vocabulary]`."""
        self._kernels.use_threads(torch.get_num_threads())
        embedded = self._embed(torch.cat([part.ids.flatten() for part in parts]))
        spans = self._spans(parts, embedded)
        hidden = embedded.numpy()
        change = np.zeros_like(hidden)
        for index, layer in enumerate(self._layers):
            x = self._add_and_norm(hidden, change, layer.input_norm)
            change = self._attention(index, layer, x, spans)
            x = self._add_and_norm(hidden, change, layer.mlp_norm)
            change = self._mlp(layer, x)
        last, change = (asked_for(torch.from_numpy(x), parts).contiguous().numpy() for x in (hidden, change))
        normed = self._add_and_norm(last, change, self._norm)
        return by_part(self._head(torch.from_numpy(normed)), parts)

    def _spans(self, parts: list[Part], embedded: torch.Tensor) -> list[Span]:
        all_positions = torch.cat([part.positions.flatten() for part in parts])
        cos, sin = (turn[0].contiguous().numpy() for turn in self._rotary(embedded, all_positions[None]))
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

    def _add_and_norm(self, hidden: np.ndarray, change: np.ndarray, norm: Norm) -> np.ndarray:
        """`hidden` grows by `change`; returns its norm. All are `[tokens, hidden]`."""
        out = np.empty_like(hidden)
        self._kernels.add_and_norm(hidden, change, *norm, out)
        return out

    def _mlp(self, layer: Layer, x: np.ndarray) -> np.ndarray:
        gate_up = layer.gate_up(x)
        gated = np.empty((len(x), gate_up.shape[1] // 2), np.float32)
        self._kernels.gate(gate_up, gated)
        return layer.down(gated)

    def _attention(self, index: int, layer: Layer, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """The attention block of a layer for all tokens, `[tokens, hidden]`."""
        qkv = layer.qkv(x)
        kv_heads = qkv.shape[1] // layer.head_dim // (layer.groups + 2)
        q = np.empty((len(x), kv_heads * layer.groups, layer.head_dim), np.float32)
        said = np.empty_like(q)
        for span in spans:
            keys, values = _room(span.part, index, kv_heads, layer.head_dim)
            mine, turn = q[span.tokens], (span.cos, span.sin, span.places)
            self._kernels.place(qkv[span.tokens], *layer.head_norms, *turn, mine, keys.numpy(), values.numpy())
            if span.part.view is not None and not _in_slots(span.part):
                keys, values = span.part.view.update(keys, values, index)
            if self.needs_mask(span.part.ids.shape[1]):
                said[span.tokens] = self._attend_by_mask(index, layer, span, mine, keys, values)
            else:
                states = (keys.contiguous().numpy(), values.contiguous().numpy(), span.positions)
                threads = torch.get_num_threads()
                self._kernels.attend(mine, *states, layer.window, layer.scale, threads, said[span.tokens])
        return layer.out(said.reshape(len(x), -1))

    def _attend_by_mask(
        self, index: int, layer: Layer, span: Span, q: np.ndarray, keys: torch.Tensor, values: torch.Tensor
    ) -> np.ndarray:
        """What `q` `[tokens, heads, dim]` gathers, in its shape."""
        end, masks = span.positions[-1] + 1, span.part.mask
        mask = masks[self._layer_types[index]] if isinstance(masks, dict) else masks
        queries = by_row(torch.from_numpy(q), span.part)
        return attend(queries, keys[:, :, :end], values[:, :, :end], mask, float(layer.scale)).numpy().reshape(q.shape)

    def _layer(self, index: int, layer: Any, config: Any) -> Layer:
        attention, mlp, window = layer.self_attn, layer.mlp, getattr(config, "sliding_window", None)
        slides = self._layer_types is None or self._layer_types[index] == "sliding_attention"
        return Layer(
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=_product(attention.o_proj),
            gate_up=_joined(mlp.gate_proj, mlp.up_proj),
            down=_product(mlp.down_proj),
            input_norm=_norm(layer.input_layernorm),
            mlp_norm=_norm(layer.post_attention_layernorm),
            head_norms=_head_norms(attention),
            head_dim=attention.head_dim,
            groups=attention.num_key_value_groups,
            scale=np.float32(attention.scaling),
            window=window if window and slides else sys.maxsize,
        )


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


def _product(layer: Any) -> Product:
    return getattr(layer, "multiply", None) or (lambda x: layer(torch.from_numpy(x)).numpy())


def _joined(*layers: Any) -> Product:
    """Layers with the same input as one, their outputs side by side."""
    if isinstance(layers[0], Share):
        return _product(layers[0].joint.product)
    products = [_product(layer) for layer in layers]
    return lambda x: np.concatenate([product(x) for product in products], axis=1)


def _norm(norm: Any) -> Norm:
    return norm.weight.detach().numpy(), np.float32(norm.variance_epsilon)


def _head_norms(attention: Any) -> Norm:
    if not hasattr(attention, "q_norm"):
        return np.empty((0, 1), np.float32), np.float32(0)
    (of_queries, epsilon), (of_keys, _) = _norm(attention.q_norm), _norm(attention.k_norm)
    return np.stack([of_queries, of_keys]), epsilon
