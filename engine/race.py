"""Naive against cached decoding, measured in the serving process: the race, and the probes.

Both run between two steps of the shared batch, one exclusive step at a time, so nobody's
measurement holds somebody else's work and other visitors keep streaming.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import Probe, RaceStep, StartRace


def timed_ms(runner: ModelRunner, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """A forward's result and its exclusive milliseconds, the device synchronised before and after."""
    runner.synchronize()
    started = time.perf_counter()
    logits = forward()
    runner.synchronize()
    return logits, 1000 * (time.perf_counter() - started)


@dataclass
class NaiveLane:
    """Recomputes the whole prefix for every token; asks for the last position's logits only."""

    runner: ModelRunner
    token_ids: list[int]

    def forward(self) -> torch.Tensor:
        return self.runner.naive(self.token_ids)


@dataclass
class CachedLane:
    """Reads the prompt once into a cache of its own, then one token a step: the engine's own prefill and decode."""

    runner: ModelRunner
    token_ids: list[int]
    cache: KVCache
    cached_tokens: int = 0

    def forward(self) -> torch.Tensor:
        new = self.token_ids[self.cached_tokens :]
        start, self.cached_tokens = self.cached_tokens, len(self.token_ids)
        if start == 0:
            return self.runner.prefill(self.cache, 0, 0, new)
        return self.runner.decode(self.cache, new, [start])[0]


class Race:
    """Both lanes on one prompt, greedily, for the same number of tokens, end-of-sequence ignored.

    Each lane's clock is the sum of its exclusive step times; the lane whose clock is behind steps
    next, so the race looks like the race it is. Both lanes are warmed up by steps that are not counted.
    """

    def __init__(self, start: StartRace, runner: ModelRunner):
        self.request_id, self.target, self.runner = start.request_id, start.new_tokens, runner
        cache = KVCache(runner.layer_shapes, slots=1, positions=len(start.prompt_ids) + start.new_tokens)
        self.lanes: dict[str, NaiveLane | CachedLane] = {
            "naive": NaiveLane(runner, list(start.prompt_ids)),
            "cached": CachedLane(runner, list(start.prompt_ids), cache),
        }
        self.clocks_ms = dict.fromkeys(self.lanes, 0.0)
        self.tokens = dict.fromkeys(self.lanes, 0)
        self.paused = False
        runner.naive(start.prompt_ids)
        runner.prefill(cache, 0, 0, start.prompt_ids)
        runner.decode(cache, start.prompt_ids[-1:], [len(start.prompt_ids)])

    @property
    def finished(self) -> bool:
        return all(count == self.target for count in self.tokens.values())

    def step(self) -> RaceStep:
        """One token of the lane that is behind."""
        unfinished = [name for name in self.lanes if self.tokens[name] < self.target]
        name = min(unfinished, key=lambda lane: self.clocks_ms[lane])
        lane = self.lanes[name]
        logits, step_ms = timed_ms(self.runner, lane.forward)
        best = logits.topk(2)
        token_id = int(best.indices[0])
        lane.token_ids.append(token_id)
        self.clocks_ms[name] += step_ms
        self.tokens[name] += 1
        state = "finished" if self.finished else "running"
        return RaceStep(self.request_id, state, name, token_id, step_ms, float(best.values[0] - best.values[1]))


def probe(runner: ModelRunner, cache: KVCache, sequence: Sequence) -> Probe:
    """Measure a naive forward and a cached step, batch of one, of a sequence that is about to decode.

    The cached step writes the pending token's keys and values where the shared step, which must
    follow, writes them again: the sequence is left as it was.
    """
    ids = sequence.token_ids
    position = len(ids) - 1
    _, naive_ms = timed_ms(runner, lambda: runner.naive(ids))
    _, cached_ms = timed_ms(runner, lambda: runner.decode(cache, ids[-1:], [position], sequence.slot))
    return Probe(sequence.request_id, sequence.client, len(ids), naive_ms, cached_ms, time.time())
