"""Who may measure when: races and probes, between two steps of the shared batch and within their share of its time."""

import logging
from collections import deque
from collections.abc import Callable

from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.lanes import LaneFailed
from engine.memory import NO_ROOM_FOR_RACE, is_out_of_memory
from engine.race import Race, probe
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.wire import Failure, RaceStep, StartRace, StepReport

PROBE_EVERY_TOKENS = 16
MOST_CREDIT_MS = 500.0

logger = logging.getLogger(__name__)


class Measuring:
    """One race at a time, and probes of sequences that ask for them. `step` is one turn, at most one of each."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, config: EngineConfig):
        self.race: Race | None = None
        self.waiting: deque[StartRace] = deque()
        self.probe_share = config.probe_share
        self._runner, self._scheduler, self._config = runner, scheduler, config
        # Milliseconds of exclusive measuring that the shared batch's own work has paid for.
        self._probe_credit_ms = 0.0
        self._race_credit_ms = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.race or self.waiting)

    def step(self, report: StepReport, begins: Callable[[list[int]], None]) -> None:
        live = self._scheduler.live
        busy = bool(self._scheduler.waiting) or len(live) > self._config.max_batch_size // 2
        if not busy and self._probe_credit_ms > 0:
            self._probe(self._scheduler.cache, alone=len(live) == 1, report=report)
        if self.race is None and self.waiting:
            self._begin(self.waiting.popleft(), report, begins)
        if self.race:
            self._race_on(self.race, busy, report)

    def account(self, step_ms: float) -> None:
        """The shared batch has worked for so long."""
        share = self.probe_share
        self._probe_credit_ms = min(self._probe_credit_ms + share * step_ms, MOST_CREDIT_MS) if share else 0.0
        self._race_credit_ms = min(self._race_credit_ms + step_ms, MOST_CREDIT_MS)

    def cancel(self, request_id: int) -> None:
        if self.race and self.race.request_id == request_id:
            self._end()
        self.waiting = deque(race for race in self.waiting if race.request_id != request_id)

    def clear(self) -> None:
        """End the race, and forget those that wait."""
        self._end()
        self.waiting.clear()

    def give_up(self, report: StepReport) -> bool:
        """Memory has run out: a race takes some that the answers need. Whether there was one."""
        if self.race is None:
            return False
        self._fail(self.race.request_id, NO_ROOM_FOR_RACE, report)
        return True

    def _probe(self, cache: KVCache, *, alone: bool, report: StepReport) -> None:
        """Measure naive against cached decoding of one running sequence whose turn it is."""
        # A naive step of a long text takes seconds: only its own visitor may be kept waiting by it.
        longest = self._config.max_context if alone else self._config.max_race_tokens
        asked = [s for s in self._scheduler.running if s.probe and s.length <= longest]
        due = [s for s in asked if s.length >= s.probed_at + PROBE_EVERY_TOKENS]
        if not due:
            return
        sequence = min(due, key=lambda s: s.probed_at)
        sequence.probed_at = sequence.length
        try:
            measured = probe(self._runner, cache, sequence)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            sequence.probe = False  # it only grows
            return
        self._probe_credit_ms -= measured.naive_ms + measured.cached_ms
        report.probes.append(measured)

    def _begin(self, start: StartRace, report: StepReport, begins: Callable[[list[int]], None]) -> None:
        begins([start.request_id])
        try:
            self.race = Race(start, self._runner)
        except Exception as error:
            self._fail(start.request_id, _explained(error), report)

    def _race_on(self, race: Race, busy: bool, report: StepReport) -> None:
        """One exclusive step of the race, which gets at most half of the engine's time and none while it is busy."""
        if race.paused != busy:
            race.paused = busy
            report.race_steps.append(RaceStep(race.request_id, "paused" if busy else "running"))
        if busy or (self._scheduler.live and self._race_credit_ms <= 0):
            return
        try:
            step = race.step()
        except Exception as error:
            self._fail(race.request_id, _explained(error), report)
            return
        self._race_credit_ms -= step.step_ms
        report.race_steps.append(step)
        if race.finished:
            self._end()

    def _fail(self, request_id: int, message: str, report: StepReport) -> None:
        report.failures.append(Failure(request_id, message))
        self._end()

    def _end(self) -> None:
        if self.race:
            self.race.close()
        self.race = None


def _explained(error: Exception) -> str:
    """Whatever a race fails of, it is the race's alone."""
    if is_out_of_memory(error):
        return NO_ROOM_FOR_RACE
    if isinstance(error, LaneFailed):
        return f"The race ended: {error}"
    logger.error("A race failed.", exc_info=error)
    return f"The race ended: one of its steps failed ({type(error).__name__}). Start it again."
