"""How long forwards take on a device, without making the host wait for each of them."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Stopwatch:
    """Adds up the time of what it runs, in milliseconds, until somebody takes it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def run(self, work: Callable[[], Result]) -> Result:
        if self._device.type == "cuda":
            return self._run_on_gpu(work)
        started = time.perf_counter()
        result = work()
        self._ms += 1000 * (time.perf_counter() - started)
        return result

    def take_ms(self) -> float:
        """The sum so far, which begins anew. Waits for what a GPU has not finished yet."""
        ms, self._ms = self._ms, 0.0
        events, self._events = self._events, []
        for _, end in events[-1:]:
            end.synchronize()
        return ms + sum(begin.elapsed_time(end) for begin, end in events)

    def _run_on_gpu(self, work: Callable[[], Result]) -> Result:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        result = work()
        end.record(torch.cuda.current_stream(self._device))
        self._events.append((begin, end))
        return result
