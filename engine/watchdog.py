"""Notices a worker that is alive but says nothing although it has something to do."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.hosts import Worker

logger = logging.getLogger(__name__)

LOOKS = 10  # within the time that a worker may be silent


@dataclass(frozen=True)
class Owing:
    """A worker that owes a word, and how many it has said; it may be silent for `patience` times as long as usual."""

    worker: Worker
    said: int
    patience: int = 1


class Watchdog:
    """Looks at the worker now and then, in a thread; calls `stuck` with one that has been silent for `limit_s` seconds.

    Silence is counted in looks, not read off a clock: a front that was itself stopped for a while, with everything
    around it, has not heard yet what was said meanwhile. `limit_s` 0: no thread, and nothing is noticed.
    """

    def __init__(self, limit_s: float, owing: Callable[[], Owing | None], stuck: Callable[[Worker], None]):
        self._pause_s = limit_s / LOOKS
        self._owing, self._stuck = owing, stuck
        self._over = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="kvscope-watchdog", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        before, silent = None, 0
        while not self._over.wait(self._pause_s):
            owing = self._owing()
            silent = silent + 1 if owing and owing == before else 0
            before = owing
            if owing and silent >= LOOKS * owing.patience:
                logger.warning("The worker has work, and has said nothing for %g s.", silent * self._pause_s)
                self._stuck(owing.worker)
                silent = 0
