"""The key-value cache: one preallocated pool of slots, written in place.

A slot holds the keys and values of one sequence. Joining a batch is writing into a slot and
leaving is forgetting it: nothing is concatenated, nothing is padded on the left. The running
sequences sit in slots `0..B-1`, so that a decode step reads the pool through plain views of
its first B rows. Who sits where is the scheduler's business; this module only holds tensors.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# A layer's keys and values of some tokens, each `[kv_heads, tokens, dim]`; one pair a layer.
States = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token: `kv_heads` keys of `head_dim` numbers, as many values of `value_dim`."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Per layer one key and one value tensor `[slots, kv_heads, positions, dim]`, zeroed at first.

    `token_ids` `[slots, positions]` says which token each position belongs to; the sampler reads
    a row's history from it. All layers' tensors may lie on different devices.
    """

    def __init__(self, layers: SequenceOf[LayerShape], slots: int, positions: int):
        self.shapes = list(layers)
        self.slots, self.positions = slots, positions
        self.keys = [_zeros(shape, shape.head_dim, slots, positions) for shape in layers]
        self.values = [_zeros(shape, shape.value_dim, slots, positions) for shape in layers]
        self.token_ids = torch.zeros(slots, positions, dtype=torch.long, device=layers[0].device)

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.bytes_per_token for shape in self.shapes)

    @property
    def allocated_bytes(self) -> int:
        """Of the tensors themselves, not by the formula."""
        return sum(pool.nbytes for pool in (*self.keys, *self.values))

    @property
    def allocated_tokens(self) -> int:
        return self.slots * self.positions

    def resize(self, slots: int, positions: int) -> None:
        """Another number of slots and positions; what lies in both shapes is kept.

        Layer by layer, so that the peak above the larger of the two pools is one layer. Where memory runs out halfway,
        the pool has what both shapes have in common, and some layers more.
        """
        kept = min(slots, self.slots), min(positions, self.positions)
        self.slots, self.positions = kept
        for index, shape in enumerate(self.shapes):
            self.keys[index] = _resized(self.keys[index], shape, shape.head_dim, slots, positions)
            self.values[index] = _resized(self.values[index], shape, shape.value_dim, slots, positions)
        ids = torch.zeros(slots, positions, dtype=torch.long, device=self.token_ids.device)
        ids[: kept[0], : kept[1]] = self.token_ids[: kept[0], : kept[1]]
        self.token_ids = ids
        self.slots, self.positions = slots, positions

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        """Exchange two slots of which that many leading positions matter (0: nothing to keep)."""
        for pool in (*self.keys, *self.values):
            _exchange(pool[first].transpose(0, 1), pool[second].transpose(0, 1), first_tokens, second_tokens)
        _exchange(self.token_ids[first], self.token_ids[second], first_tokens, second_tokens)

    def clear(self, slot: int) -> None:
        """Zero a slot. Masks do not stop a NaN (0 × NaN is NaN), so a spoilt slot must not be handed on as it is."""
        for pool in (*self.keys, *self.values):
            pool[slot].zero_()

    def read(self, slot: int, tokens: int) -> States:
        """A copy of what a slot holds for its first `tokens` tokens."""
        pools = zip(self.keys, self.values, strict=True)
        return [(keys[slot, :, :tokens].clone(), values[slot, :, :tokens].clone()) for keys, values in pools]

    def write(self, slot: int, token_ids: list[int], states: States) -> None:
        """Begin a slot with `token_ids`, of which `states` holds the keys and values, and maybe those of more."""
        tokens = len(token_ids)
        self.token_ids[slot, :tokens] = torch.tensor(token_ids, device=self.token_ids.device)
        for pool, copies in zip(zip(self.keys, self.values, strict=True), states, strict=True):
            for tensor, copy in zip(pool, copies, strict=True):
                tensor[slot, :, :tokens] = copy[:, :tokens]

    def prefill_view(self, slot: int, start: int, token_ids: torch.Tensor, window: int) -> Cache:
        """A cache through which a forward of `token_ids` `[n]` appends to `slot` at position `start`.

        Attention sees the first `window` positions, at least all that are written then.
        """
        end = start + len(token_ids)
        self.token_ids[slot, start:end] = token_ids
        where = (slot, slice(None), slice(start, end))
        return self._view(slice(slot, slot + 1), where, squeezed=0, seen=start, window=window)

    def decode_view(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        window: int,
        first_slot: int = 0,
        counts: torch.Tensor | None = None,
    ) -> Cache:
        """A cache through which B consecutive slots append token `token_ids[b]` at `positions[b]`, both `[B]`.

        Attention sees the first `window` positions; the attention mask says which are valid. Slots whose `counts` `[B]`
        is False stay as they are.
        """
        last_slot = first_slot + len(positions)
        slots = torch.arange(first_slot, last_slot, device=positions.device)
        if counts is not None:
            token_ids = torch.where(counts, token_ids, self.token_ids[slots, positions])
        self.token_ids[slots, positions] = token_ids
        where = (slots, slice(None), positions)
        rows = slice(first_slot, last_slot)
        return self._view(rows, where, squeezed=2, seen=window - 1, window=window, counts=counts)

    def _view(
        self, rows: slice, where: tuple, squeezed: int, seen: int, window: int, counts: torch.Tensor | None = None
    ) -> Cache:
        pools = zip(self.keys, self.values, strict=True)
        return Cache(layers=[SlotLayer(k, v, rows, where, squeezed, seen, window, counts) for k, v in pools])


class SlotLayer(CacheLayerMixin):
    """One layer of the pool as a `transformers` cache layer: `update` writes in place and returns views."""

    is_sliding = False

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys, values, rows: slice, where: tuple, squeezed: int, seen: int, window: int, counts=None):
        super().__init__()
        self.keys, self.values = keys, values
        self.rows, self.where, self.squeezed = rows, where, squeezed
        self.seen, self.window, self.counts = seen, window, counts
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store the new states; return everything attention may see, each `[rows, kv_heads, window, dim]`."""
        where = tuple(part.to(self.keys.device) if isinstance(part, torch.Tensor) else part for part in self.where)
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            new = states.squeeze(self.squeezed)
            pool[where] = new if self.counts is None else torch.where(self.counts[:, None, None], new, pool[where])
        return self.keys[self.rows, :, : self.window], self.values[self.rows, :, : self.window]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists before the first forward."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    # Older releases of transformers ask for the same number under this name.
    get_max_cache_shape = get_max_length


def _zeros(shape: LayerShape, dim: int, slots: int, positions: int) -> torch.Tensor:
    return torch.zeros(slots, shape.kv_heads, positions, dim, dtype=shape.dtype, device=shape.device)


def _resized(old: torch.Tensor, shape: LayerShape, dim: int, slots: int, positions: int) -> torch.Tensor:
    if (old.shape[0], old.shape[2]) == (slots, positions):
        return old
    new = _zeros(shape, dim, slots, positions)
    slots, positions = min(old.shape[0], slots), min(old.shape[2], positions)
    new[:slots, :, :positions] = old[:slots, :, :positions]
    return new


def _exchange(first: torch.Tensor, second: torch.Tensor, first_tokens: int, second_tokens: int) -> None:
    if not first_tokens or not second_tokens:  # a plain move, for which nothing has to be held
        first[:second_tokens], second[:first_tokens] = second[:second_tokens], first[:first_tokens]
        return
    held = first[:first_tokens].clone()
    first[:second_tokens] = second[:second_tokens]
    second[:first_tokens] = held
