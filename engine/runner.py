"""Forwards of the model: a step of all running rows and chunks of prompts, or naively everything again."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from engine.graphs import DecodeGraphs, can_record
from engine.kv_cache import KVCache, LayerShape
from engine.lean import LeanForward, Part, fits
from engine.lean_cpu import CpuForward, compiles
from engine.masks import attention_mask, is_plain
from engine.stopwatch import Stopwatch
from engine.transfer import to_device

WINDOW_STEP = 64  # so that shapes repeat


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens that a step appends to `slot` from position `start`; `every` asks for all their logits."""

    slot: int
    start: int
    token_ids: list[int]
    every: bool = False


class ModelRunner:
    """Runs any decoder-only `transformers` model over the slots of a `KVCache`.

    `device` is where token ids go in, logits come out and the first layer's cache lies; other layers may lie
    elsewhere. `layer_shapes` says what each layer caches for one token; `stopwatch` adds up the time inside the model.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        embeddings: Any = model.get_input_embeddings()
        self.device = _computing_device(embeddings)
        self.vocabulary: int = embeddings.weight.shape[0]
        accepted = inspect.signature(model.forward).parameters
        # Renamed in transformers: 5.17 knows the old name only, 5.24 warns of it. Only here both are known.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted
        self.layer_shapes = self._layer_shapes()
        # The embeddings of a sharded model may lie elsewhere; its hooks move the ids there and the logits back.
        self.device = self.layer_shapes[0].device
        self.stopwatch = Stopwatch(self.device)
        self.lean = _lean(model)  # None: the stock forward, one part after another
        self._graphs = DecodeGraphs(self.decode_padded) if can_record(self.lean, self.device) else None

    def rehearse(self) -> float:
        """Chunked prefill and a decode step of two rows: how far their logits are from the naive ones.

        The largest distance over the standard deviation of the naive logits: some 1e-5 for a model in float32 whose
        positions, masks and cache are understood, and about 1 for another.
        """
        ids = [17 * position % self.vocabulary for position in range(7)]
        short = ids[:3]
        cache = KVCache(self.layer_shapes, slots=2, positions=WINDOW_STEP)
        self.prefill(cache, 0, 0, ids[:2])
        self.prefill(cache, 0, 2, ids[2:-1])
        self.prefill(cache, 1, 0, short[:-1])
        batched = self.decode(cache, [ids[-1], short[-1]], [len(ids) - 1, len(short) - 1])
        naive = self._stock(torch.tensor([ids]), every=True)[0, [len(ids) - 1, len(short) - 1]]
        self.stopwatch.take_ms()
        return float((batched - naive).abs().max() / naive.std())

    def step(
        self, cache: KVCache, token_ids: list[int], positions: list[int], chunks: list[Chunk]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The first B slots and some chunks together: what `decode` and for each chunk `prefill` return.

        In one pass, where the model allows it.
        """
        if not chunks:
            return self.decode(cache, token_ids, positions), []
        rows = [self._rows(cache, token_ids, positions)] if token_ids else []
        logits = self._run([*rows, *(self._chunk(cache, chunk) for chunk in chunks)])
        last = [of[0] if chunk.every else of[0, -1] for of, chunk in zip(logits[len(rows) :], chunks, strict=True)]
        return (logits[0][:, -1] if rows else None), last

    def prefill(self, cache: KVCache, slot: int, start: int, token_ids: list[int]) -> torch.Tensor:
        """Append `token_ids` to `slot` from position `start`; logits `[vocabulary]` after the last of them."""
        return self._run([self._chunk(cache, Chunk(slot, start, token_ids))])[0][0, -1]

    def decode(self, cache: KVCache, token_ids: list[int], positions: list[int], first_slot: int = 0) -> torch.Tensor:
        """One token for each of B slots from `first_slot` on, row b at `positions[b]`; logits `[B, vocabulary]`."""
        if self._graphs and first_slot == 0:
            graphs = self._graphs
            return self.stopwatch.run(lambda: graphs.decode(cache, token_ids, positions))
        return self._run([self._rows(cache, token_ids, positions, first_slot)])[0][:, -1]

    @torch.no_grad()
    def decode_padded(self, cache: KVCache, inputs: torch.Tensor, window: int) -> torch.Tensor:
        """Logits `[B, vocabulary]` of B slots of which not all count; `inputs` `[3, B]`: ids, positions, 1 or 0.

        Depends on nothing but the device's memory, so that it can be recorded (`DecodeGraphs`).
        """
        ids, positions, counts = inputs
        view = cache.decode_view(ids, positions, window, counts=counts.bool())
        return self._forward([self._decode_part(ids, positions, view, window)])[0][:, -1]

    def positions_read(self, cache: KVCache, lengths: list[int]) -> int:
        """Of all slots together, in a decode step of rows of these lengths."""
        return len(lengths) * self._window(cache, max(lengths)) if self._needs_mask(1) else sum(lengths)

    def naive(self, token_ids: list[int], *, every: bool = False) -> torch.Tensor:
        """Logits `[vocabulary]` after `token_ids`, computed without any cache: the whole prefix, every time.

        With `every`, logits `[tokens, vocabulary]` after each of them.
        """
        ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(len(token_ids), device=self.device)[None]
        logits = self._run([Part(ids, positions, None, self._mask(positions, 0), every)])[0][0]
        return logits if every else logits[-1]

    def append(self, cache: DynamicCache, token_ids: list[int]) -> torch.Tensor:
        """Logits `[vocabulary]` after `token_ids`, of which `transformers`' own cache holds the beginning."""
        cached = cache.get_seq_length()
        ids = torch.tensor([token_ids[cached:]], device=self.device)
        positions = torch.arange(cached, len(token_ids), device=self.device)[None]
        if self.lean and is_plain(self.model.config, len(token_ids)):
            return self._run([Part(ids, positions, cache, self._mask(positions, cached))])[0][0, -1]
        mask = torch.ones(1, len(token_ids), dtype=torch.bool, device=self.device)
        return self.stopwatch.run(lambda: self._stock(ids, cache, positions, mask))[0, -1]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            # The logits end on this device, and nothing of a forward outlasts them on another one.
            torch.cuda.synchronize(self.device)

    def _layer_shapes(self) -> list[LayerShape]:
        """What each layer caches for one token, seen in a forward of one token rather than guessed from the config."""
        cache: Any = DynamicCache(config=self.model.config)
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        # With a mask that leaves nothing to look up in the numbers: a model on the meta device has none.
        mask = attention_mask(self.model.config, first, 1, self.model.dtype)
        self._stock(first, cache=cache, positions=first, mask=mask)
        return [
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
            for keys, values in ((layer.keys, layer.values) for layer in cache.layers)
        ]

    def _rows(self, cache: KVCache, token_ids: list[int], positions: list[int], first_slot: int = 0) -> Part:
        """The pending tokens of B consecutive slots."""
        ids, where = to_device([token_ids, positions], self.device)
        window = self._window(cache, max(positions) + 1) if self._needs_mask(1) else cache.positions
        return self._decode_part(ids, where, cache.decode_view(ids, where, window, first_slot), window)

    def _window(self, cache: KVCache, longest: int) -> int:
        """Positions that a decode step reads of every row by a mask, if the longest holds that many tokens."""
        return min(-(-longest // WINDOW_STEP) * WINDOW_STEP, cache.positions)

    def _decode_part(self, ids: torch.Tensor, positions: torch.Tensor, view: Cache, window: int) -> Part:
        rows = positions[:, None]
        needed = self._needs_mask(1)
        mask = attention_mask(self.model.config, rows, window, self.model.dtype) if needed else None
        return Part(ids[:, None], rows, view, mask)

    def _chunk(self, cache: KVCache, chunk: Chunk) -> Part:
        end = chunk.start + len(chunk.token_ids)
        ids = torch.tensor(chunk.token_ids, device=self.device)
        positions = torch.arange(chunk.start, end, device=self.device)[None]
        window = end if self._needs_mask(len(ids)) else cache.positions
        view = cache.prefill_view(chunk.slot, chunk.start, ids, window)
        return Part(ids[None], positions, view, self._mask(positions, chunk.start), chunk.every)

    def _needs_mask(self, queries: int) -> bool:
        return self.lean is None or self.lean.needs_mask(queries)

    def _mask(self, positions: torch.Tensor, start: int) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """For the tokens from `start` on of one text; None where they need none."""
        queries = positions.shape[1]
        end = start + queries
        # From the beginning, plain causal attention will do, for which there are faster kernels than for masks.
        if not self._needs_mask(queries) or (start == 0 and is_plain(self.model.config, end)):
            return None
        return attention_mask(self.model.config, positions, end, self.model.dtype)

    def _run(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits of each part, `[rows, queries or 1, vocabulary]`."""
        with torch.no_grad():
            return self.stopwatch.run(lambda: self._forward(parts))

    def _forward(self, parts: list[Part]) -> list[torch.Tensor]:
        return self.lean(parts) if self.lean else [self._stock_part(part) for part in parts]

    def _stock_part(self, part: Part) -> torch.Tensor:
        if part.view is None:  # nothing but the model itself, which makes its own mask
            return self._stock(part.ids, every=part.every)
        return self._stock(part.ids, part.view, part.positions, part.mask, every=part.every)

    @torch.no_grad()
    def _stock(self, ids: torch.Tensor, cache=None, positions=None, mask=None, every: bool = False) -> torch.Tensor:
        """Logits `[rows, 1, vocabulary]` after the last ids, or with `every` `[rows, ids, vocabulary]`, in float32."""
        arguments: dict[str, Any] = {"input_ids": ids.to(self.device), "use_cache": cache is not None}
        if not every:
            arguments.update(self._last_logits_only)
        if cache is not None:
            arguments[self._cache_argument] = cache
        if positions is not None and self._takes_positions:
            arguments["position_ids"] = positions
        if mask is None:
            mask = torch.ones(ids.shape, dtype=torch.bool, device=self.device)
        logits = self.model(attention_mask=mask, **arguments).logits
        return logits.float() if every else logits[:, -1:].float()


def _lean(model: PreTrainedModel) -> LeanForward | CpuForward | None:
    if not fits(model):
        return None
    return CpuForward(model) if compiles(model) else LeanForward(model)


def _computing_device(module: Any) -> torch.device:
    """Where a module computes. Weights that `accelerate` offloads lie on the meta device, and its hook knows better."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return module.weight.device if device is None else torch.device(device)
