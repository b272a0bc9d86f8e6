"""Choosing tokens: the best one, or one drawn from the processed distribution.

There is no sampler state. Token n of a sequence is drawn with one uniform number that is a hash of
`(seed, n)`, inverted through the row's cumulative distribution in vocabulary order, so the same
seed gives the same text alone, among strangers, on every device and after a restart.
"""

from dataclasses import dataclass

import torch

from engine.processors import Row, process, warp


@dataclass(frozen=True)
class Choice:
    """The chosen `token_ids` `[rows]`, the model's own log-probability of each (before any processing) `[rows]`,
    and `finite` `[rows]`: False where the logits held a NaN or an infinity and the choice means nothing.
    `top_tokens` has the model's best tokens of each row that asked for some: pairs of id and log-probability."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor
    top_tokens: list[tuple[tuple[int, float], ...]]


def choose(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> Choice:
    """One token for every row of `logits` `[rows, vocabulary]`; `histories` `[slots, positions]` holds token ids."""
    normalizer = logits.logsumexp(dim=-1)
    finite = normalizer.isfinite()
    if not finite.all():
        logits = logits.masked_fill(~finite[:, None], 0)
    processed = process(logits, rows, histories)
    token_ids = processed.argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.params.samples]
    if sampled:
        where = torch.tensor(sampled, device=logits.device)
        chosen = processed if len(sampled) == len(rows) else processed[where]
        token_ids[where] = _sample(chosen, [rows[index] for index in sampled])
    logprobs = logits.gather(1, token_ids[:, None])[:, 0] - normalizer
    return Choice(token_ids, logprobs, finite, _top_tokens(logits, normalizer, rows))


def uniform(seeds: list[int], steps: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """One number in [0, 1) for each `(seed, step)`: 24 bits of a hash made of exact integer operations.

    The mixing is the finalizer of MurmurHash3, applied to the seed's two halves and the step in turn.
    """
    low = torch.tensor([seed & 0xFFFFFFFF for seed in seeds], device=device)
    high = torch.tensor([seed >> 32 for seed in seeds], device=device)
    bits = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ torch.tensor(steps, device=device))
    return (bits >> 8).float() * 2**-24


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at its uniform number; never a token of probability 0."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # float32 sums end near 1, not at 1: scale the draw by the sum, and stay below it so that a token is found.
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _sample(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    uniforms = uniform([row.seed for row in rows], [row.emitted for row in rows], logits.device)
    return draw(warp(logits, [row.params for row in rows]), uniforms)


def _top_tokens(logits: torch.Tensor, normalizer: torch.Tensor, rows: list[Row]) -> list[tuple[tuple[int, float], ...]]:
    counts = [row.params.top_n_tokens for row in rows]
    most = min(max(counts, default=0), logits.shape[-1])
    if not most:
        return [()] * len(rows)
    values, ids = logits.topk(most)
    logprobs = (values - normalizer[:, None]).tolist()
    pairs = zip(ids.tolist(), logprobs, counts, strict=True)
    return [tuple(zip(ids_[:count], values_[:count], strict=True)) for ids_, values_, count in pairs]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, in 64-bit integers of which the low 32 bits count."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
