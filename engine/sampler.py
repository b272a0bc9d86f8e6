"""Choosing tokens: processing of logits and drawing, vectorised over the rows that ask for it.

There is no sampler state. Token n of a sequence is drawn with one uniform number that is a hash of
`(seed, n)`, inverted through the row's cumulative distribution in vocabulary order, so the same
seed gives the same text alone, among strangers, on every device and after a restart.

Order of processing: repetition penalty, temperature, top-k, top-p.
"""

from dataclasses import dataclass

import torch

from engine.params import SamplingParams

# top-p looks at this many best tokens first: a `topk` costs an eighth of a full sort of the vocabulary.
CANDIDATES = 1024


@dataclass(frozen=True)
class Row:
    """What the sampler must know of one row: its parameters, its seed, how many tokens it has emitted, and
    where its history lies: the first `length` ids of `slot`."""

    params: SamplingParams
    seed: int
    emitted: int
    slot: int
    length: int


@dataclass(frozen=True)
class Choice:
    """The chosen `token_ids` `[rows]`, the model's own log-probability of each (before any processing) `[rows]`,
    and `finite` `[rows]`: False where the logits held a NaN or an infinity and the choice means nothing."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor


def choose(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> Choice:
    """One token for every row of `logits` `[rows, vocabulary]`; `histories` `[slots, positions]` holds token ids."""
    normalizer = logits.logsumexp(dim=-1)
    finite = normalizer.isfinite()
    if not finite.all():
        logits = logits.masked_fill(~finite[:, None], 0)
    processed = penalize_repetition(logits, rows, histories)
    token_ids = processed.argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.params.samples]
    if sampled:
        where = torch.tensor(sampled, device=logits.device)
        token_ids[where] = _sample(processed[where], [rows[index] for index in sampled])
    logprobs = logits.gather(1, token_ids[:, None])[:, 0] - normalizer
    return Choice(token_ids, logprobs, finite)


def penalize_repetition(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens already seen (Keskar et al. 2019, CTRL)."""
    penalized = [index for index, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not penalized:
        return logits
    asking = [rows[index] for index in penalized]
    where = torch.tensor(penalized, device=logits.device)
    penalty = torch.tensor([[row.params.repetition_penalty] for row in asking], device=logits.device)
    length = torch.tensor([[row.length] for row in asking], device=logits.device)
    window = max(row.length for row in asking)
    seen = histories[torch.tensor([row.slot for row in asking], device=logits.device), :window]
    # Positions past a row's end repeat its first token, which is penalised anyway.
    seen = torch.where(torch.arange(window, device=logits.device)[None] < length, seen, seen[:, :1])
    chosen = logits[where]
    scores = chosen.gather(1, seen)
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.index_copy(0, where, chosen.scatter(1, seen, scores))


def warp(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k and top-p of each row; tokens that are ruled out get minus infinity."""
    device = logits.device
    temperature = torch.tensor([p.temperature if p.temperature else 1.0 for p in params], device=device)
    logits = logits / temperature[:, None]
    filtered = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1]
    if filtered:
        where = torch.tensor(filtered, device=device)
        logits[where] = _keep_best(logits[where], [params[index] for index in filtered])
    return logits


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


def _keep_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """top-k, then top-p over what it left, both within the best candidates of each row."""
    vocabulary = logits.shape[-1]
    count = min(max([CANDIDATES, *(p.top_k for p in params)]), vocabulary)
    best, ids = logits.topk(count)
    kept, covered = _candidates_to_keep(best, logits, params)
    if not covered:
        best, ids = logits.sort(descending=True)
        kept, _ = _candidates_to_keep(best, logits, params)
    # Ruled-out candidates are scattered as minus infinity onto a background of minus infinity.
    return torch.full_like(logits, -torch.inf).scatter(1, ids, best.masked_fill(~kept, -torch.inf))


def _candidates_to_keep(
    best: torch.Tensor, logits: torch.Tensor, params: list[SamplingParams]
) -> tuple[torch.Tensor, bool]:
    """Which of the `best` logits (descending) stay, and whether they are enough to decide that."""
    count, vocabulary = best.shape[-1], logits.shape[-1]
    k = torch.tensor([min(p.top_k or vocabulary, vocabulary) for p in params], device=best.device)
    p = torch.tensor([row.top_p for row in params], device=best.device)
    # Ties with the k-th stay, as in transformers.
    smallest = best.gather(1, (k.clamp(max=count) - 1)[:, None])
    in_top_k = (best >= smallest) | (k > count)[:, None]
    mass = best.masked_fill(~in_top_k, -torch.inf).logsumexp(-1, keepdim=True)
    everything = torch.where((k < vocabulary)[:, None], mass, logits.logsumexp(-1, keepdim=True))
    probability = (best - everything).exp().masked_fill(~in_top_k, 0)
    # A token stays if the mass of the better ones does not yet reach p (Holtzman et al. 2019).
    before = probability.cumsum(dim=-1) - probability
    kept = in_top_k & ((before < p[:, None]) | (p == 1)[:, None])
    # Without a top-k, the last candidate staying means that worse ones might, too.
    undecided = (k > count) & kept[:, -1]
    return kept, not bool(undecided.any())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, in 64-bit integers of which the low 32 bits count."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
