"""What changes logits before a token is chosen, vectorised over the rows that ask for it.

In this order: watermark, repetition penalty, frequency penalty, grammar (`process`, for greedy rows, too); then
temperature, top-k, top-p, typical-p (`warp`, for sampled rows).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.params import SamplingParams
from engine.transfer import to_device

# top-p and typical-p look at this many tokens first: a `topk` costs an eighth of a full sort of the vocabulary.
CANDIDATES = 1024
TIES = 64
# The defaults of transformers' WatermarkingConfig, so that its detector needs nothing but the text.
GREEN_SHARE, GREEN_BIAS, GREEN_KEY = 0.25, 2.0, 15_485_863


@dataclass(frozen=True)
class Row:
    """What the sampler must know of one row: its parameters, its seed, how many tokens it has emitted, and
    where its history lies: the first `length` ids of `slot`. `allowed` has a bit for each token that its grammar
    admits (none: all of them)."""

    params: SamplingParams
    seed: int
    emitted: int
    slot: int
    length: int
    allowed: bytes | None = None


def process(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """What comes before temperature, each processor for the rows that ask for it; `logits` stay as they are."""
    for asks, processor in PROCESSORS:
        asking = [index for index, row in enumerate(rows) if asks(row)]
        change = partial(processor, rows=[rows[index] for index in asking], histories=histories)
        logits = for_rows(logits, asking, change)
    return logits


def for_rows(logits: torch.Tensor, asking: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`logits` with some rows changed; nothing is copied where none or all of them ask."""
    if not asking:
        return logits
    if len(asking) == len(logits):
        return change(logits)
    where = to_device(asking, logits.device)
    return logits.index_copy(0, where, change(logits[where]))


def watermark(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """Favour a quarter of the vocabulary that the last token picks (Kirchenbauer et al. 2023, algorithm 2).

    The permutation comes from torch's generator on the CPU, whatever the device: a text is marked alike everywhere.
    """
    bias = torch.zeros(logits.shape)
    generator = torch.Generator()
    where = to_device([[row.slot, row.length - 1] for row in rows], histories.device)
    for index, last in enumerate(histories[where[:, 0], where[:, 1]].tolist()):
        generator.manual_seed(GREEN_KEY * last)
        vocabulary = torch.randperm(logits.shape[-1], generator=generator)
        bias[index, vocabulary[: int(GREEN_SHARE * len(vocabulary))]] = GREEN_BIAS
    return logits + bias.to(logits.device)


def penalize_repetition(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens already seen (Keskar et al. 2019, CTRL)."""
    penalty = to_device([[row.params.repetition_penalty] for row in rows], logits.device)
    seen, valid = _seen(rows, histories)
    # Positions past a row's end repeat its first token, which is penalised anyway.
    seen = torch.where(valid, seen, seen[:, :1])
    scores = logits.gather(1, seen)
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.scatter(1, seen, scores)


def penalize_frequency(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """Subtract the penalty as often as a token was seen (OpenAI's definition)."""
    penalty = to_device([[row.params.frequency_penalty] for row in rows], logits.device)
    seen, valid = _seen(rows, histories)
    counts = torch.zeros_like(logits).scatter_add(1, seen, valid.to(logits.dtype))
    return logits - penalty * counts


def obey_grammar(logits: torch.Tensor, rows: list[Row], histories: torch.Tensor) -> torch.Tensor:
    """Minus infinity for every token that the row's grammar does not admit."""
    packed = torch.stack([torch.frombuffer(bytearray(row.allowed or b""), dtype=torch.uint8) for row in rows])
    bits = packed.to(logits.device)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)


PROCESSORS: list[tuple[Callable[[Row], bool], Callable[..., torch.Tensor]]] = [
    (lambda row: row.params.watermark, watermark),
    (lambda row: row.params.repetition_penalty != 1, penalize_repetition),
    (lambda row: row.params.frequency_penalty != 0, penalize_frequency),
    (lambda row: row.allowed is not None, obey_grammar),
]


def warp(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p and typical-p of each row; tokens that are ruled out get minus infinity."""
    logits = logits / to_device([[p.temperature if p.temperature else 1.0] for p in params], logits.device)
    filtered = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1]
    logits = for_rows(logits, filtered, lambda chosen: _keep_best(chosen, [params[index] for index in filtered]))
    typical = [index for index, p in enumerate(params) if p.typical_p < 1]
    return for_rows(
        logits, typical, lambda chosen: _keep_typical(chosen, [params[index].typical_p for index in typical])
    )


def _keep_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """top-k, then top-p over what it left, both within the best candidates of each row."""
    # Some more than k: ties with the k-th stay, as in transformers.
    count = _candidates(max(p.top_k + TIES if p.top_k else CANDIDATES for p in params), logits)
    best, ids = logits.topk(count)
    kept = _candidates_to_keep(best, logits, params)
    # Where the last candidate stays, worse ones might, too.
    if count < logits.shape[-1] and bool(kept[:, -1].any()):
        best, ids = logits.sort(descending=True)
        kept = _candidates_to_keep(best, logits, params)
    # Ruled-out candidates are scattered as minus infinity onto a background of minus infinity.
    return torch.full_like(logits, -torch.inf).scatter(1, ids, best.masked_fill(~kept, -torch.inf))


def _candidates_to_keep(best: torch.Tensor, logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Which of the `best` logits (descending) stay."""
    count = best.shape[-1]
    k = to_device([[p.top_k or count] for p in params], best.device).clamp(max=count)
    p = to_device([[row.top_p] for row in params], best.device)
    in_top_k = best >= best.gather(1, k - 1)
    mass = best.masked_fill(~in_top_k, -torch.inf).logsumexp(dim=-1, keepdim=True)
    if not all(row.top_k for row in params):
        unlimited = to_device([[row.top_k == 0] for row in params], best.device)
        mass = torch.where(unlimited, logits.logsumexp(dim=-1, keepdim=True), mass)
    probability = (best - mass).exp().masked_fill(~in_top_k, 0)
    # A token stays if the mass of the better ones does not yet reach p (Holtzman et al. 2019).
    before = probability.cumsum(dim=-1) - probability
    return in_top_k & ((before < p) | (p == 1))


def _keep_typical(logits: torch.Tensor, mass: list[float]) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, until `mass` is reached (Meister et al. 2022)."""
    logprobs = logits.log_softmax(dim=-1)
    probability = logprobs.exp()
    entropy = -(logprobs * probability).nansum(dim=-1, keepdim=True)
    distance = (logprobs + entropy).abs()
    limit = to_device(mass, logits.device)[:, None]
    count = _candidates(CANDIDATES, logits)
    nearest, ids = distance.topk(count, largest=False)
    if count < logits.shape[-1] and bool((probability.gather(1, ids).sum(dim=-1, keepdim=True) < limit).any()):
        nearest, ids = distance.sort()
    reached = (probability.gather(1, ids).cumsum(dim=-1) < limit).sum(dim=-1, keepdim=True)
    # Ties with the last one stay, as in transformers.
    furthest = nearest.gather(1, reached.clamp(max=nearest.shape[-1] - 1))
    return logits.masked_fill(distance > furthest, -torch.inf)


def _candidates(wanted: int, logits: torch.Tensor) -> int:
    """How many tokens to look at first. A GPU has sorted all sooner than its host can ask whether those suffice."""
    return min(wanted, logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[-1]


def _seen(rows: list[Row], histories: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of each row's history, prompt included, and which of them count: shorter rows end in padding."""
    window = max(row.length for row in rows)
    seen = histories[to_device([row.slot for row in rows], histories.device), :window]
    length = to_device([[row.length] for row in rows], histories.device)
    return seen, torch.arange(window, device=histories.device)[None] < length
