"""The unfinished requests, generations and races, and what a step, or a worker's end, means for them."""

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from engine import clock, tracing
from engine.comparison import Comparison
from engine.generation import Generation
from engine.lease import Payer
from engine.telemetry import Telemetry
from engine.wire import StepReport

TOO_SLOW = "Two GPU leases ended before this answer could go on. Please send it again, or a shorter one."
DIED_TWICE = "The engine died twice during this answer. Please send it again."
RACE_RESTARTED = "The engine restarted during this race. Start it again."
RACE_OUTLASTED = "The GPU lease ended before this race did. Start it again, with fewer tokens."

NO_TEXT = "The model's tokens could not be turned into text here. Please send it again, in other words."

Request = Generation | Comparison

logger = logging.getLogger(__name__)
ended_requests = logging.getLogger("kvscope")


class Requests:
    """Not thread-safe: the engine's lock guards it. Iterating gives everything unfinished, in order of arrival."""

    def __init__(self, telemetry: Telemetry):
        self.generations: dict[int, Generation] = {}
        self.comparisons: dict[int, Comparison] = {}
        self.model_name = ""
        self._telemetry = telemetry

    def __iter__(self) -> Iterator[Request]:
        unfinished: dict[int, Request] = {**self.generations, **self.comparisons}
        return iter([unfinished[number] for number in sorted(unfinished)])

    def add(self, request: Request) -> None:
        if isinstance(request, Generation):
            self.generations[request.id] = request
        else:
            self.comparisons[request.id] = request

    def of(self, payer: Payer | None) -> list[Request]:
        """Those that `payer` has asked for."""
        return [request for request in self if request.payer == payer]

    def work(self, payer: Payer, prefill_chunk: int) -> tuple[int, int, int]:
        """What serving `payer` takes: its own decode steps, everybody's prefill steps, its own races' lanes."""
        own = self.of(payer)
        generations = [request for request in own if isinstance(request, Generation)]
        owed = max((g.sequence.params.max_new_tokens - len(g.events) for g in generations), default=0)
        to_read = sum(-(-generation.sequence.length // prefill_chunk) for generation in self.generations.values())
        lanes = sum(len(request.start.lanes) for request in own if isinstance(request, Comparison))
        return owed, to_read, lanes

    def races(self) -> dict[str, Any]:
        """What snapshots say of them."""
        states = [comparison.state for comparison in self.comparisons.values()]
        running = any(state in ("running", "paused") for state in states)
        return {"waiting": states.count("waiting"), "running": running, "paused": "paused" in states}

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """It is over, for whatever reason; its followers are told."""
        request._finish(reason, error)
        if isinstance(request, Generation):
            del self.generations[request.id]
            self._telemetry.record_end(request.span())
            tracing.record(request, self.model_name)
            ended_requests.info("request ended", extra={"fields": request.log_fields()})
        else:
            del self.comparisons[request.id]

    def fail(self, requests: list[Request], message: str) -> None:
        for request in requests:
            self.end(request, "error", message)

    def take_in(self, report: StepReport, bytes_per_token: int, cancel: Callable[[int], None]) -> bool:
        """Everything one step did, to those it concerns; whether anybody got anything.

        `cancel` reaches the worker, which knows no stop strings.
        """
        report.record.time = clock.unix(report.record.time)
        report.probes = [replace(probe, time=clock.unix(probe.time)) for probe in report.probes]
        touched: dict[int, Generation] = {}
        for slot in report.slots:
            if slot.state != "retained" and (generation := self.generations.get(slot.request_id)):
                generation._seated(slot, report.record)
                touched[generation.id] = generation
        for scored in report.prompt_logprobs:
            if generation := self.generations.get(scored.request_id):
                generation.prompt_logprobs = scored.logprobs
        delivered = self._take_tokens(report, touched, cancel)
        for probe in report.probes:
            if generation := self.generations.get(probe.request):
                generation.probes.append(probe)
        for number in report.put_back:
            if generation := self.generations.get(number):
                generation._interrupted(failed=False, handed_over=False)
        for failure in report.failures:
            if request := self.generations.get(failure.request_id) or self.comparisons.get(failure.request_id):
                self.end(request, "error", failure.message)
        for step in report.race_steps:
            if comparison := self.comparisons.get(step.request_id):
                try:
                    comparison._push(step)
                except BaseException as error:
                    self._broke(comparison, error, cancel)
                    continue
                if comparison.done:
                    del self.comparisons[comparison.id]
        waiting = sum(generation.state == "waiting" for generation in self.generations.values())
        self._telemetry.record(report, delivered, waiting, bytes_per_token)
        for generation in touched.values():
            generation._notify()
        return bool(delivered or report.race_steps)

    def begin(self, request_ids: list[int]) -> None:
        """The worker begins to compute these."""
        for number in request_ids:
            if request := self.generations.get(number) or self.comparisons.get(number):
                request._begins()

    def worker_ended(self, *, died: bool, in_vain_for: Payer | None = None, in_vain: bool = False) -> None:
        """Everything is waiting again, to go on in another worker with the tokens it would have had.

        What was under way when a worker died has one such chance, and so has what somebody paid for in vain; a race
        has none once there is a step of it. A worker that died `in_vain`, with nothing for anybody, failed them all.
        """
        for comparison in list(self.comparisons.values()):
            started = comparison.state != "waiting" or in_vain
            failed = (died and started) or _is(comparison.payer, in_vain_for)
            if comparison.begun or (failed and comparison.resumed):
                self.end(comparison, "error", RACE_RESTARTED if died else RACE_OUTLASTED)
                continue
            comparison._interrupted(failed=failed)
        for generation in list(self.generations.values()):
            started = generation.state != "waiting" or in_vain
            failed = (died and started) or _is(generation.payer, in_vain_for)
            if failed and generation.resumed:
                self.end(generation, "error", DIED_TWICE if died else TOO_SLOW)
                continue
            generation._interrupted(failed=failed, handed_over=started and not failed)

    def _broke(self, request: Request, error: BaseException, cancel: Callable[[int], None]) -> None:
        """Its tokens did not become text, which concerns nobody else. The log gets no message: text may be in it."""
        where = "".join(traceback.format_tb(error.__traceback__))
        logger.error("The text of request %d failed with %s.\n%s", request.id, type(error).__name__, where)
        cancel(request.id)
        self.end(request, "error", NO_TEXT)

    def _take_tokens(self, report: StepReport, touched: dict[int, Generation], cancel: Callable[[int], None]) -> int:
        """How many tokens found their generation: those behind a stop string or of a cancelled one are nobody's."""
        delivered = 0
        for token in report.tokens:
            generation = self.generations.get(token.request_id)
            if generation is None:
                continue
            touched[generation.id] = generation
            delivered += 1
            try:
                reason = generation._push(token, report.record)
            except BaseException as error:  # a panic of the tokenizer's Rust is no Exception
                self._broke(generation, error, cancel)
                continue
            self._telemetry.record_token(generation)
            if reason:
                if reason == "stop_sequence" and not token.finish_reason:
                    cancel(generation.id)
                self.end(generation, reason)
        return delivered


def _is(payer: Payer | None, other: Payer | None) -> bool:
    return payer is not None and payer == other
