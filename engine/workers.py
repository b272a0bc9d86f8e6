"""Whoever computes for the front: one worker that is replaced when it dies, or one lease after another.

Either way the unfinished requests go from one worker to the next, with the tokens that they would have had.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from engine.comparison import Comparison
from engine.config import EngineConfig
from engine.hosts import HOSTS, LeaseHost, Worker
from engine.lease import START_S, Demand, Lease, Payer, seconds_needed
from engine.requests import Request, Requests
from engine.telemetry import Telemetry
from engine.watchdog import Owing
from engine.wire import LeaseRefused, Parked, Publish, Submit

logger = logging.getLogger(__name__)

RELEASE_S = 10.0  # for a worker that has ended, and whoever has to hear of it
LOADING_PATIENCE = 10  # times the usual silence: reading weights from a slow disk says nothing for long
MOST_PAUSE_S = 60.0  # between workers of which none lives long enough to help anybody


class Workers:
    """The current worker, if there is one. The engine's lock guards all of it.

    Under it, each worker's messages go to `hear`, and when it is gone, `ended` is told whether it was parked.
    """

    def __init__(
        self,
        host: str | LeaseHost,
        config: EngineConfig,
        requests: Requests,
        telemetry: Telemetry,
        lock: threading.RLock,
        hear: Callable[[object], None],
        ended: Callable[[bool], None],
    ):
        self.current: Worker | None = None
        self.lease: Lease | None = None
        self.handovers = 0
        self.deaths = 0
        self._host, self._config, self._requests, self._telemetry = host, config, requests, telemetry
        self._lock, self._hear, self._heard_out = lock, hear, ended
        self._public: list[list[int]] = []
        self._loaded = False  # whether the current worker has its model
        self._fruitful = False  # whether anybody has got anything from it
        self._in_vain = 0  # workers in a row from which nobody has
        self._closed = False
        self._pause: threading.Timer | None = None  # before the next worker
        self._start_s = START_S  # what a fresh worker needs before its first step, as far as is known

    @property
    def leased(self) -> bool:
        return not isinstance(self._host, str)

    def shown(self, state: str) -> str:
        """What snapshots call the engine's `state`; where one is leased and all is well, none | asked | ready."""
        if not self.leased or state != "ready":
            return state
        return "none" if self.lease is None else "asked" if self.lease.until is None else "ready"

    def payer(self) -> Payer | None:
        """Who is asking now; None where nothing is leased."""
        return None if isinstance(self._host, str) else Payer(self._host.visitor(), copy_context())

    def begin(self, request: Request) -> None:
        """Take a request in, and have it computed."""
        self._requests.add(request)
        if self.lease and self.lease.payer == request.payer:
            self.lease.payer_left = False
        if self.current:
            self._hand_over(request)
        else:
            self._lease_for_next()

    def publish(self, prompts: list[list[int]]) -> None:
        """Declare prompts public, to this worker and to each that follows."""
        self._public = prompts
        self.tell(Publish(prompts))

    def tell(self, message: object) -> None:
        """Send to the worker. Where there is none, there is nobody who would have to know."""
        if self.current:
            self.current.send(message)

    def start(self) -> None:
        """Start one, where one is always kept."""
        if isinstance(self._host, str):
            self._loaded = self._fruitful = False
            self._follow(HOSTS[self._host](self._config))

    def give_up(self) -> None:
        """The engine is stopped: none is started any more."""
        self._closed = True
        if self._pause:
            self._pause.cancel()

    def owing(self) -> Owing | None:
        """The worker, if it has to say something: while it loads, and as long as anything is unfinished.

        A leased one is left to its lease's end.
        """
        with self._lock:
            worker = self.current
            if worker is None or self.leased or (self._loaded and not list(self._requests)):
                return None
            return Owing(worker, worker.said, 1 if self._loaded else LOADING_PATIENCE)

    def left_by(self, payer: Payer | None) -> None:
        """`payer` has cancelled a request: a lease does not go on at the expense of somebody who has left."""
        if self.lease and self.lease.payer == payer:
            self.lease.payer_left = not self._requests.of(payer)

    def started(self) -> None:
        """A fresh worker is ready: what its lease has spent until now, the next one's payer will have to pay, too."""
        self._loaded = True
        if self.lease:
            self._start_s = self.lease.spent_s(time.monotonic())

    def took_in(self, *, fruitful: bool) -> None:
        """A step's report was taken in; `fruitful` if it gave anybody anything."""
        self._fruitful |= fruitful
        if self.lease:
            self.lease.fruitful |= fruitful

    def refused(self, message: str) -> None:
        """Whoever was to pay is told why it failed; the others go on under the next payer."""
        if self.lease:
            self._requests.fail(self._requests.of(self.lease.payer), message)

    def ended(self, *, died: bool) -> None:
        """Hand what was under way to another worker: at once, or where workers are leased, if anything was."""
        self.current, lease, self.lease = None, self.lease, None
        self.deaths += died
        self._telemetry.worker_lost()
        in_vain = lease is not None and not lease.fruitful and (died or lease.until is not None)
        blamed = lease.payer if lease and in_vain else None
        self._requests.worker_ended(died=died, in_vain_for=blamed, in_vain=not (self.leased or self._fruitful))
        if lease:
            if in_vain:
                self._start_s = max(self._start_s, lease.spent_s(time.monotonic()))
            self.handovers += bool(lease.until and list(self._requests))
            self._lease_for_next(lease.payer)
        else:
            self._replace()

    def lease_snapshot(self, number: Callable[[Hashable], int]) -> dict[str, Any] | None:
        """What snapshots say of the lease, with its payer's number; None where nothing is leased."""
        if not self.leased:
            return None
        payer = number(self.lease.payer.key) if self.lease else None
        shown = self.lease.snapshot(time.monotonic()) if self.lease else {"state": "none"}
        return {**shown, "payer": payer, "handovers": self.handovers}

    def _replace(self) -> None:
        """Start another one: at once, or after a pause that grows while none helps anybody."""
        self._in_vain = 0 if self._fruitful else self._in_vain + 1
        if self._in_vain < 2:
            self._start_again()
            return
        self._pause = threading.Timer(min(2.0 ** (self._in_vain - 2), MOST_PAUSE_S), self._start_again)
        self._pause.daemon = True
        self._pause.start()

    def _start_again(self) -> None:
        with self._lock:
            if self._closed:
                return
            self.start()
            for request in self._requests:
                self._hand_over(request)

    def _follow(self, worker: Worker) -> None:
        self.current = worker
        self.tell(Publish(self._public))
        threading.Thread(target=self._listen, args=(worker,), name="kvscope-reader", daemon=True).start()

    def _listen(self, worker: Worker) -> None:
        parked = False
        try:
            for message in worker.messages():
                parked |= isinstance(message, LeaseRefused | Parked)
                with self._lock:
                    if not self._closed:
                        self._hear(message)
        except Exception:
            # Whoever does not hear it any more has to do without it.
            logger.exception("What the worker said could not be taken in.")
        worker.stop(RELEASE_S)  # not under the lock: it waits
        with self._lock:
            if not self._closed:
                self._heard_out(parked)

    def _hand_over(self, request: Request) -> None:
        """Have the worker compute it. What is measured for one visitor alone, only that visitor's lease pays for."""
        own = self.lease is None or request.payer == self.lease.payer
        if isinstance(request, Comparison):
            if own:
                self.tell(request.start)
            return
        # A copy: with the thread host both sides live in one process, and each appends the tokens it knows of.
        sequence = request.sequence
        self.tell(Submit(replace(sequence, output_ids=list(sequence.output_ids), probe=sequence.probe and own)))

    def _lease_for_next(self, last_payer: Payer | None = None) -> None:
        """Ask for a lease in the name of one who waits: the first in line, but not twice in a row the same one."""
        waiting = sorted(self._requests, key=lambda request: request.payer == last_payer)
        if isinstance(self._host, str) or not waiting or (payer := waiting[0].payer) is None:
            return
        steps_ms = (step.step_ms for step in self._telemetry.latest_steps())
        work = self._requests.work(payer, self._config.prefill_chunk)
        terms, start_s = self._host.terms, self._start_s
        seconds, least_s = seconds_needed(*work, steps_ms, terms, start_s), seconds_needed(0, 0, 0, (), terms, start_s)
        lease = Lease(payer, seconds, least_s, terms, lambda: self._demand(payer))
        self._follow(self._host.start(lease))
        self.lease = lease
        # The payer's own come first, whoever came before: nobody pays for others while standing in line.
        for request in sorted(waiting, key=lambda request: (request.payer != payer, request.id)):
            self._hand_over(request)

    def _demand(self, payer: Payer) -> Demand:
        with self._lock:
            own, everybody = self._requests.of(payer), list(self._requests)
            others = [request for request in everybody if request.payer != payer]
            served = [any(request.state not in ("waiting", "paused") for request in part) for part in (own, others)]
            return Demand(len(own), len(others), *served)
