"""Who waits, who is admitted, and who sits in which slot.

The slots lie in this order: running sequences at `0..B-1` (a decode step is a view of them),
then prefilling ones, retained prefixes and free slots in any order.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from engine.kv_cache import KVCache
from engine.memory import is_out_of_memory
from engine.public import MIN_REUSED_TOKENS, common_prefix
from engine.sequence import Sequence

POSITION_STEP = 64
STEPS_PER_ROW = 500


@dataclass(eq=False)
class Retained:
    """Keys and values of a sequence that has left, kept until the slot is needed.

    Of a finished one: its client's next turn starts there. Of a parked one: there it goes on.
    """

    client: int | None
    request_id: int
    token_ids: list[int]
    released: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, sequence: Sequence) -> "Retained":
        return cls(sequence.client, sequence.request_id, sequence.token_ids[: sequence.cached_tokens])

    def may_serve(self, sequence: Sequence) -> bool:
        same_client = self.client is not None and self.client == sequence.client
        return same_client or self.request_id == sequence.request_id


@dataclass
class Scheduler:
    """Serves requests in order of arrival, as long as slots and cache positions suffice.

    Admission reserves what a sequence can grow to, so a running sequence never lacks room: the pool
    holds `slots x positions` tokens, of which `max_tokens` is the most, and a longer sequence
    leaves room for fewer slots.
    """

    cache: KVCache
    max_batch_size: int
    max_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    retained: dict[int, Retained] = field(default_factory=dict)  # by slot

    def __post_init__(self) -> None:
        self.rows = self.max_batch_size  # that may be live together: fewer for a while after memory has run out
        self._fitted = 0  # steps since then

    @property
    def live(self) -> list[Sequence]:
        return self.running + self.prefilling

    def admit_next(self) -> Sequence | None:
        """Move the first waiting sequence into a slot if it fits, else None: it holds up those behind it."""
        if not self.waiting or len(self.live) >= self.rows or not self._make_room(self.waiting[0]):
            return None
        sequence = self.waiting.popleft()
        self._seat(sequence)
        self.prefilling.append(sequence)
        return sequence

    def start_running(self, sequence: Sequence) -> None:
        """A prefilled sequence joins the batch: it moves to the first slot behind the running ones."""
        self._swap(sequence.slot, len(self.running))
        self.prefilling.remove(sequence)
        self.running.append(sequence)

    def release(self, sequence: Sequence, *, retain: bool) -> None:
        """A sequence leaves. The last running row takes its place, so that the running rows stay together."""
        retain = retain and sequence.client is not None and sequence.cached_tokens >= MIN_REUSED_TOKENS
        if not retain:
            sequence.cached_tokens = 0
        if sequence in self.running:
            last, hole = self.running[-1], sequence.slot
            self._swap(hole, last.slot)
            self.running[hole] = last
            self.running.pop()
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if retain:
            self.retained[sequence.slot] = Retained.of(sequence)

    def shrink(self) -> bool:
        """Memory has run out: forget what is retained, and admit nobody beside those who are here. Whether it helped.

        If there is not even memory to move to a smaller pool, the larger one stays.
        """
        self.rows, self._fitted = max(len(self.live), 1), 0
        self.retained.clear()
        before = self.cache.allocated_bytes
        needed = max((sequence.max_length for sequence in self.live), default=1)
        try:
            self._reshape(self.rows, min(self.cache.positions, _double_until(needed, POSITION_STEP)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return self.cache.allocated_bytes < before

    def put_back_newest(self) -> Sequence | None:
        """Who came last waits again, first in line, to go on with the same tokens; None for one that is alone."""
        if len(self.live) < 2:
            return None
        newest = max(self.live, key=lambda sequence: sequence.request_id)
        self.release(newest, retain=False)
        self.waiting.appendleft(newest)
        return newest

    def fitted(self) -> None:
        """Memory sufficed for a step. After many of them one more row is tried again."""
        self._fitted += 1
        if self._fitted % STEPS_PER_ROW == 0:
            self.rows = min(self.rows + 1, self.max_batch_size)

    def park(self) -> None:
        """Nobody runs or waits any more, but what they have cached is retained, also of those without a client."""
        self.waiting.clear()
        for sequence in self.live:
            self.retained[sequence.slot] = Retained.of(sequence)
        self.running.clear()
        self.prefilling.clear()

    def _make_room(self, sequence: Sequence) -> bool:
        """Shape the pool so that `sequence` fits beside the live ones; False if it cannot."""
        needed = max(s.max_length for s in [*self.live, sequence])
        least_slots = len(self.live) + 1
        doubled, tightest = _double_until(needed, POSITION_STEP), _round_up(needed, POSITION_STEP)
        shapes = (max(self.cache.positions, doubled), doubled, tightest)
        positions = next((p for p in shapes if p * least_slots <= self.max_tokens), None)
        if positions is None:
            return False
        # Retained prefixes are worth a slot while memory is to be had.
        wanted = min(least_slots + len(self.retained), 2 * self.max_batch_size)
        slots = min(max(self.cache.slots, _double_until(wanted, 1)), self.max_tokens // positions)
        if (slots, positions) != (self.cache.slots, self.cache.positions):
            self._reshape(slots, positions)
        return True

    def _reshape(self, slots: int, positions: int) -> None:
        occupied = {s.slot for s in self.live}
        for slot in [slot for slot, kept in self.retained.items() if slot >= slots or len(kept.token_ids) > positions]:
            del self.retained[slot]
        for sequence in [s for s in self.prefilling if s.slot >= slots]:
            target = next(slot for slot in range(slots) if slot not in occupied)
            occupied.add(target)
            self.retained.pop(target, None)
            self._swap(sequence.slot, target)
        self.cache.resize(slots, positions)

    def _seat(self, sequence: Sequence) -> None:
        slot, reused = self._reusable(sequence)
        if slot is None:
            slot = self._empty_slot()
        else:
            del self.retained[slot]
        sequence.slot, sequence.cached_tokens = slot, reused
        sequence.reused_tokens, sequence.public_tokens = reused, 0

    def _reusable(self, sequence: Sequence) -> tuple[int | None, int]:
        """The slot whose retained tokens share the longest beginning with the sequence, and how long that is.

        Only within one client, or what was the sequence's own when it was parked: neither timing nor counters may tell
        what a stranger typed. At least one token is left to compute, since its logits are needed; all of them, for
        log-probabilities of the prompt.
        """
        if sequence.params.prompt_logprobs and not sequence.output_ids:
            return None, 0
        ids = sequence.token_ids[:-1]
        own = [(slot, kept) for slot, kept in self.retained.items() if kept.may_serve(sequence)]
        lengths = {slot: common_prefix(ids, kept.token_ids) for slot, kept in own}
        best = max(lengths, key=lambda slot: lengths[slot], default=None)
        if best is None or lengths[best] < MIN_REUSED_TOKENS:
            return None, 0
        return best, lengths[best]

    def _empty_slot(self) -> int:
        taken = {s.slot for s in self.live} | set(self.retained)
        # From the running rows on upwards: the sequence will then often be where it has to be to join them.
        for slot in range(len(self.running), self.cache.slots):
            if slot not in taken:
                return slot
        oldest = min(self.retained, key=lambda slot: self.retained[slot].released)
        del self.retained[oldest]
        return oldest

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        by_slot = {s.slot: s for s in self.live}
        tokens = [self._tokens_in(slot, by_slot) for slot in (first, second)]
        self.cache.swap(first, second, *tokens)
        kept_first, kept_second = self.retained.pop(first, None), self.retained.pop(second, None)
        if kept_first:
            self.retained[second] = kept_first
        if kept_second:
            self.retained[first] = kept_second
        for old, new in ((first, second), (second, first)):
            if old in by_slot:
                by_slot[old].slot = new

    def _tokens_in(self, slot: int, by_slot: dict[int, Sequence]) -> int:
        if slot in by_slot:
            return by_slot[slot].cached_tokens
        return len(self.retained[slot].token_ids) if slot in self.retained else 0


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _double_until(value: int, step: int) -> int:
    while step < value:
        step *= 2
    return step
