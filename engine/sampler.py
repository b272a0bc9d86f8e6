"""Choosing tokens: the best one, or one drawn from the processed distribution.

There is no sampler state. Token n of a sequence is drawn with one uniform number that is a hash of
`(seed, n)`, inverted through the row's cumulative distribution in vocabulary order, so the same
seed gives the same text alone, among strangers, on every device and after a restart.
"""

from dataclasses import dataclass

import torch

from engine.processors import Row, process, warp
from engine.transfer import to_device


@dataclass(frozen=True)
class Choice:
    """Of each row: the chosen token, the model's own log-probability of it (before any processing), and `finite`: False
    where the logits held a NaN or an infinity and the choice means nothing. `top_tokens` has the model's best tokens
    of each row that asked for some: pairs of id and log-probability."""

    token_ids: list[int]
    logprobs: list[float]
    finite: list[bool]
    top_tokens: list[tuple[tuple[int, float], ...]]


def choose(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> Choice:
    """One token for every row of `logits` `[rows, vocabulary]`; `histories` `[slots, positions]` holds token ids."""
    # The only wait for the device in a step, and the only copy from it.
    columns = choose_on_device(logits, rows, histories).T.tolist()
    token_ids, logprobs, finite, *best = columns
    most = len(best) // 2
    top_tokens = list(zip(*(zip(map(int, best[n]), best[most + n], strict=True) for n in range(most)), strict=True))
    wanted = [row.params.top_n_tokens for row in rows]
    return Choice(
        [int(token_id) for token_id in token_ids],
        logprobs,
        [bool(good) for good in finite],
        [tokens[:count] for tokens, count in zip(top_tokens or [()] * len(rows), wanted, strict=True)],
    )


def choose_on_device(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """What `choose` says, still on the device, `[rows, 3 + 2 * most]`, exact in float64.

    In turn a token id, its log-probability, whether the row was finite, the best tokens' ids, their log-probabilities.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    processed = process(logits, rows, histories)
    token_ids = processed.argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.params.samples]
    if sampled:
        where = to_device(sampled, logits.device)
        chosen = processed if len(sampled) == len(rows) else processed[where]
        token_ids[where] = _sample(chosen, [rows[index] for index in sampled])
    logprobs = logits.gather(1, token_ids[:, None]) - normalizer
    columns = [token_ids[:, None], logprobs, normalizer.isfinite()]
    most = min(max(row.params.top_n_tokens for row in rows), logits.shape[-1])
    if most:
        best, ids = logits.topk(most)
        columns += [ids, best - normalizer]
    return torch.cat([column.double() for column in columns], dim=1)


def uniform(seeds: list[int], steps: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """One number in [0, 1) for each `(seed, step)`: 24 bits of a hash made of exact integer operations.

    The mixing is the finalizer of MurmurHash3, applied to the seed's two halves and the step in turn.
    """
    halves = [[seed & 0xFFFFFFFF for seed in seeds], [seed >> 32 for seed in seeds]]
    low, high, step = to_device([*halves, steps], torch.device(device))
    bits = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ step)
    return (bits >> 8).float() * 2**-24


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at its uniform number; never a token of probability 0."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # float32 sums end near 1, not at 1: scale the draw by the sum, and stay below it so that a token is found.
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # Where a row is not finite nothing is found; what is chosen there counts for nothing, but must be a token.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _sample(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    uniforms = uniform([row.seed for row in rows], [row.emitted for row in rows], logits.device)
    return draw(warp(logits, [row.params for row in rows]), uniforms)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, in 64-bit integers of which the low 32 bits count."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
