"""A forward of the Llama family in one ragged pass: all tokens of an engine's step in one row.

The stock forward takes one rectangle of tokens at a time, so each prompt's chunk and the decode step read all weights
again. Here the pending tokens of the running sequences and the chunks of prompts lie behind each other; only attention
looks at them apart. It uses the stock model's own weights and modules, and its logits are the stock ones but for
rounding (`ModelRunner.rehearse`). Llama: Touvron et al. 2023; grouped queries: Ainslie et al. 2023.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class Part:
    """Tokens that attend together: `ids` and `positions` `[rows, queries]`, each row of another sequence.

    `view` stores their keys and values and returns those that they may see; without one they see each other. `mask` is
    additive, by layer type where a model has several; None: plain causal, or the forward needs none (`needs_mask`).
    `every` asks for the logits of all tokens, not only of each row's last.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    view: Cache | None = None
    mask: torch.Tensor | dict[str, torch.Tensor] | None = None
    every: bool = False


def fits(model: PreTrainedModel) -> bool:
    """Whether this forward is the model's own: of the family, and not somebody's variant of it that has its name.

    Not for models whose layers lie on several devices.
    """
    known = type(model).__module__.startswith("transformers.models.") and model.config.model_type in FAMILY
    whole = not any(hasattr(module, "_hf_hook") for module in model.modules())
    return known and whole and len({p.device for p in model.parameters()}) == 1


class LeanForward:
    """Calls a model of the family, part by part where tokens look at each other, all at once where they do not.

    `CpuForward` does the same on a CPU in float32, with fewer and larger operators.
    """

    def __init__(self, model: PreTrainedModel):
        body: Any = model.model
        self._embed, self._layers, self._norm, self._rotary = body.embed_tokens, body.layers, body.norm, body.rotary_emb
        self._model = model
        self.rotation: str = self._rotary.rope_type
        self._layer_types: Any = getattr(model.config, "layer_types", None)

    def needs_mask(self, queries: int) -> bool:
        """Whether attention of that many tokens a row goes by `Part.mask`, as it always does here."""
        return True

    def __call__(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits of each part in float32, `[rows, queries, vocabulary]` with `every`, else `[rows, 1, vocabulary]`."""
        hidden = self._embed(torch.cat([part.ids.flatten() for part in parts]))
        positions = torch.cat([part.positions.flatten() for part in parts])
        turn = _rotation(*self._rotary(hidden, positions[None]))
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(
                index, layer.self_attn, _rms_norm(hidden, layer.input_layernorm), turn, parts
            )
            hidden = hidden + layer.mlp(_rms_norm(hidden, layer.post_attention_layernorm))
        hidden = _rms_norm(asked_for(hidden, parts), self._norm)
        head: Any = self._model.get_output_embeddings()  # asked for each time: packing replaces it
        return by_part(head(hidden).float(), parts)

    def _attention(
        self, index: int, attention: Any, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], parts: list[Part]
    ) -> torch.Tensor:
        """The attention block of a layer for all tokens, `[tokens, hidden]`."""
        heads = (len(x), -1, attention.head_dim)
        q, k, v = (project(x).view(heads) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            q, k = _rms_norm(q, attention.q_norm), _rms_norm(k, attention.k_norm)
        q, k = _rotate(q, *turn), _rotate(k, *turn)
        said, start = [], 0
        for part in parts:
            tokens = slice(start, start + part.ids.numel())
            keys, values = (by_row(states[tokens], part) for states in (k, v))
            if part.view is not None:
                keys, values = part.view.update(keys, values, index)
            mask = part.mask[self._layer_types[index]] if isinstance(part.mask, dict) else part.mask
            said.append(attend(by_row(q[tokens], part), keys, values, mask, attention.scaling))
            start = tokens.stop
        return attention.o_proj(torch.cat(said) if len(said) > 1 else said[0])


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """What each query of `q` `[rows, heads, queries, dim]` gathers, `[rows * queries, heads * dim]`."""
    rows, heads, queries, _ = q.shape
    kv_heads = keys.shape[1]
    if queries == 1:
        # The queries that share a head of keys stand side by side, as if they were a text: nothing is copied.
        q = q.reshape(rows, kv_heads, heads // kv_heads, -1)
        mask = mask[:, :, :1] if mask is not None else None
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale).reshape(rows, -1)
    causal = mask is None
    gathered = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    )
    return gathered.transpose(1, 2).reshape(rows * queries, -1)


def by_row(states: torch.Tensor, part: Part) -> torch.Tensor:
    """`[tokens, heads, dim]` of one part as `[rows, heads, queries, dim]`."""
    return states.unflatten(0, part.ids.shape).transpose(1, 2)


def asked_for(hidden: torch.Tensor, parts: list[Part]) -> torch.Tensor:
    """The tokens whose logits are wanted, `[some, hidden]`: as a rule each row's last."""
    pieces = hidden.split([part.ids.numel() for part in parts])
    wanted = [
        piece if part.every else piece[part.ids.shape[1] - 1 :: part.ids.shape[1]]
        for piece, part in zip(pieces, parts, strict=True)
    ]
    return torch.cat(wanted) if len(wanted) > 1 else wanted[0]


def by_part(logits: torch.Tensor, parts: list[Part]) -> list[torch.Tensor]:
    """Those of `asked_for` tokens as `[rows, queries or 1, vocabulary]` for each part."""
    counts = [part.ids.numel() if part.every else len(part.ids) for part in parts]
    return [some.unflatten(0, (len(part.ids), -1)) for some, part in zip(logits.split(counts), parts, strict=True)]


def _rms_norm(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    weight: Any = norm.weight
    epsilon: Any = norm.variance_epsilon
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines `[tokens, 1, dim]`, so that turning is a swap of halves and two products."""
    half = sin.shape[-1] // 2
    return cos[0, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[0, :, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) on `[tokens, heads, dim]`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
