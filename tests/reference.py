"""The plain truth that the engine is held against: a naive loop, and what counts as a tie."""

import torch
from transformers import PreTrainedModel

from engine.runner import ModelRunner
from engine.sequence import Sequence

# Two float32 forwards of different shapes differ by about 1e-5 of a logit's size; a gap below this is a tie.
TIE = 1e-3


class StockLoop:
    """An unchanged `transformers` model without any cache: the whole prefix, every time."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @torch.no_grad()
    def naive(self, token_ids: list[int]) -> torch.Tensor:
        """Logits `[vocabulary]` after `token_ids`."""
        return self.model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].float()


@torch.no_grad()
def assert_greedy(runner: ModelRunner | StockLoop, prompt_ids: list[int], output_ids: list[int]) -> int:
    """Every token must be the naive loop's choice after the tokens before it; returns how many were ties.

    A token that is not the best must be measured to be tied with it. The loop goes on from the engine's
    token, so that what follows a tie is checked, too.
    """
    ids, ties = list(prompt_ids), 0
    for index, token_id in enumerate(output_ids):
        logits = runner.naive(ids)
        best = int(logits.argmax())
        if best != token_id:
            gap = float(logits[best] - logits[token_id])
            assert gap < TIE, f"token {index} is {token_id}, the naive loop takes {best}, {gap:.4f} logits better"
            ties += 1
        ids.append(token_id)
    return ties


def run_until_done(core, sequences: list[Sequence], join_every: int = 0) -> dict[int, list[int]]:
    """Step until all sequences ended; with `join_every`, one more joins every so many steps."""
    outputs: dict[int, list[int]] = {sequence.request_id: [] for sequence in sequences}
    pending = list(sequences)
    for turn in range(100_000):
        if pending and (not join_every or turn % join_every == 0):
            core.submit(pending.pop(0))
            if not join_every:
                continue
        if not core.has_work and not pending:
            return outputs
        for token in core.step().tokens:
            if token.request_id in outputs:
                outputs[token.request_id].append(token.token_id)
    raise AssertionError("the core did not finish")
