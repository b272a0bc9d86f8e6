"""Ways of decoding against each other, measured in the serving process: the race, and the probes.

Both run between two steps of the shared batch, one exclusive step at a time, so nobody's
measurement holds somebody else's work and other visitors keep streaming.
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from engine.kv_cache import KVCache
from engine.lanes import Clock, Lane, Step, make_lane
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import Probe, RaceStep, StartRace

TRIAL_STEPS = 2  # of a lane, that do not count: the prompt is read, and a first token


class Race:
    """Lanes on one prompt, for the same number of tokens, end-of-sequence ignored.

    Each lane's clock is the sum of its exclusive step times; the lane whose clock is behind steps next, so the race
    looks like the race it is. Each lane's first steps are also tried on a lane that is thrown away: before the race
    as its warm-up, or after it where none is wanted, so that the difference says what the first call cost.
    """

    def __init__(self, start: StartRace, runner: ModelRunner):
        self.request_id = start.request_id
        self.paused = False
        self._start, self._runner = start, runner
        self._lanes = {name: make_lane(name, start, runner) for name in start.lanes}
        self._clocks_ms = dict.fromkeys(self._lanes, 0.0)
        self._tokens = dict.fromkeys(self._lanes, 0)
        self._trials = deque(name for name in start.lanes for _ in range(min(TRIAL_STEPS, start.new_tokens)))
        self._tried: tuple[str, Lane] | None = None

    @property
    def finished(self) -> bool:
        return self._counted and not self._trials

    @property
    def _counted(self) -> bool:
        return all(count == self._start.new_tokens for count in self._tokens.values())

    def step(self) -> RaceStep:
        """One exclusive step: of a trial, or one token of the lane that is behind."""
        if self._trials and (self._start.warm_up or self._counted):
            return self._trial(self._trials.popleft())
        unfinished = [name for name in self._lanes if self._tokens[name] < self._start.new_tokens]
        name = min(unfinished, key=lambda lane: self._clocks_ms[lane])
        step = self._lanes[name].step()
        self._clocks_ms[name] += step.step_ms
        self._tokens[name] += 1
        return self._report(name, step)

    def close(self) -> None:
        for lane in [*self._lanes.values(), *([self._tried[1]] if self._tried else [])]:
            lane.close()

    def _trial(self, name: str) -> RaceStep:
        if self._tried is None or self._tried[0] != name:
            self._drop_trial()
            self._tried = name, make_lane(name, self._start, self._runner)
        step = self._tried[1].step()
        if not self._trials:
            self._drop_trial()
        return self._report(name, step, trial=True)

    def _drop_trial(self) -> None:
        if self._tried:
            self._tried[1].close()
        self._tried = None

    def _report(self, name: str, step: Step, trial: bool = False) -> RaceStep:
        state = "finished" if self.finished else "running"
        return RaceStep(
            self.request_id,
            state,
            name,
            step.token_id,
            step.step_ms,
            step.logit_gap,
            forward_ms=step.forward_ms,
            rows=step.rows,
            trial=trial,
        )


def probe(runner: ModelRunner, cache: KVCache, sequence: Sequence) -> Probe:
    """Measure a naive forward and a cached step, batch of one, of a sequence that is about to decode.

    The cached step writes the pending token's keys and values where the shared step, which must
    follow, writes them again: the sequence is left as it was.
    """
    ids = sequence.token_ids
    position = len(ids) - 1
    naive_ms = _timed_ms(runner, lambda: runner.naive(ids))
    cached_ms = _timed_ms(runner, lambda: runner.decode(cache, ids[-1:], [position], sequence.slot))
    return Probe(sequence.request_id, sequence.client, len(ids), naive_ms, cached_ms, time.monotonic())


def _timed_ms(runner: ModelRunner, forward: Callable[[], torch.Tensor]) -> float:
    clock = Clock(runner)
    forward()
    return clock.ms()
