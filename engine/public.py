"""Beginnings of prompts that are nobody's secret: computed by whoever comes first, then lent to everybody.

The operator declares them (a system prompt, preset prompts). What one visitor's request shares with such a text depends
on that text alone, so neither the numbers nor the time they save tell what a stranger typed.
"""

import itertools
from dataclasses import dataclass

from engine.kv_cache import KVCache, States
from engine.memory import is_out_of_memory
from engine.sequence import Sequence

MIN_REUSED_TOKENS = 16  # fewer are computed as fast as they are copied


@dataclass(frozen=True)
class Beginning:
    token_ids: list[int]
    states: States


class PublicPrefixes:
    """Copies of the public beginnings that were computed so far, beside the pool of slots."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._declared: list[list[int]] = []
        self._kept: list[Beginning] = []

    def declare(self, prompts: list[list[int]]) -> None:
        """Replace what is public."""
        self._declared = prompts
        self._kept = [kept for kept in self._kept if self._public_length(kept.token_ids) == len(kept.token_ids)]

    @property
    def tokens(self) -> int:
        """Kept, all beginnings together."""
        return sum(len(kept.token_ids) for kept in self._kept)

    @property
    def nbytes(self) -> int:
        """Of the copies themselves."""
        return sum(tensor.nbytes for kept in self._kept for pair in kept.states for tensor in pair)

    def lend(self, sequence: Sequence) -> None:
        """Fill the slot of a sequence that is being prefilled with what is kept of its beginning, if that helps.

        At least one token is left to compute, since its logits are needed.
        """
        ids = sequence.token_ids[:-1]
        kept = max(self._kept, key=lambda kept: common_prefix(kept.token_ids, ids), default=None)
        if kept is None:
            return
        length = common_prefix(kept.token_ids, ids)
        saved = length - sequence.cached_tokens
        if saved >= MIN_REUSED_TOKENS:
            self._cache.write(sequence.slot, kept.token_ids[:length], kept.states)
            sequence.cached_tokens = length
            sequence.reused_tokens += saved
            sequence.public_tokens += saved

    def keep(self, sequence: Sequence) -> None:
        """Copy the public beginning of a sequence, once it is computed, unless as much of it is kept already."""
        length = self._public_length(sequence.prompt_ids)
        if not MIN_REUSED_TOKENS <= length <= sequence.cached_tokens:
            return
        ids = sequence.prompt_ids[:length]
        if any(common_prefix(kept.token_ids, ids) == length for kept in self._kept):
            return
        try:
            states = self._cache.read(sequence.slot, length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return  # it would only have saved time
        # A copy that is not finite would spoil everybody's answers, for good.
        if not all(tensor.isfinite().all() for pair in states for tensor in pair):
            return
        self._kept = [kept for kept in self._kept if common_prefix(kept.token_ids, ids) < len(kept.token_ids)]
        self._kept.append(Beginning(ids, states))

    def computes_for(self, first: Sequence, second: Sequence) -> bool:
        """Whether `first` is about to compute a public beginning that `second` has, too, and has not been lent."""
        common = first.prompt_ids[: common_prefix(first.prompt_ids, second.prompt_ids)]
        shared = self._public_length(common)
        return shared > first.cached_tokens and shared - second.cached_tokens >= MIN_REUSED_TOKENS

    def _public_length(self, ids: list[int]) -> int:
        return max((common_prefix(declared, ids) for declared in self._declared), default=0)


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many leading ids two lists share."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)
