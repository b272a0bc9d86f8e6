"""What the front remembers: of the last minute steps, probes, cache in use; of the last ten, requests. Never text."""

import itertools
from collections import Counter, deque
from dataclasses import asdict
from typing import Any

from engine import clock
from engine.config import EngineConfig
from engine.generation import Generation
from engine.histogram import Histogram
from engine.wire import Probe, SlotState, StepRecord, StepReport

HISTORY_S, TIMELINE_S, STEPS_S = 60.0, 600.0, 10.0
MOST_REQUESTS = 4000
LATEST_STEPS = 64
SAMPLE_EVERY_S = 0.5
SPEED_OVER_S = 5.0
FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Telemetry:
    """Fed with step reports by the engine's reader thread; read as plain data by `Engine.snapshot`."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque()  # as far as the timeline reaches back, and always the latest
        self.history: deque[dict] = deque()
        self.ended: deque[dict] = deque(maxlen=MOST_REQUESTS)  # spans of finished requests
        self.speeds: deque[tuple[float, float]] = deque()  # once a second: Unix time, tokens a second
        self.probes: deque[Probe] = deque(maxlen=200)
        self.slots: list[SlotState] = []
        self.allocated_bytes = self.allocated_tokens = self.padding_tokens = self.public_tokens = 0
        self.peak_batch_size = 0
        self.total_requests = 0
        self.total_tokens = 0
        self.total_reused_tokens = 0  # of prompts, whose beginnings somebody had computed before
        self.total_public_tokens = 0  # of those, from public beginnings
        self.ends: Counter[str] = Counter()  # requests, by finish reason
        self.first_token = Histogram(FIRST_TOKEN_S)  # of each request, after it was queued
        self.gaps = Histogram(GAPS_S)  # between two tokens of one request
        self.last_speed = 0.0  # tokens a second when last anything ran
        self._emitted: deque[tuple[float, int]] = deque()

    def record(self, report: StepReport, delivered: int, waiting: int, bytes_per_token: int) -> None:
        """Take in one step. `delivered` leaves out tokens that a worker made past a stop string."""
        now, record = clock.now(), report.record
        self.slots = report.slots
        self.allocated_bytes, self.allocated_tokens = report.allocated_bytes, report.allocated_tokens
        self.padding_tokens, self.public_tokens = report.padding_tokens, report.public_tokens
        self.probes.extend(report.probes)
        self.total_tokens += delivered
        self._emitted.append((now, delivered))
        if record.batch_size or record.prefill_tokens:
            self.peak_batch_size = max(self.peak_batch_size, record.batch_size)
            self.steps.append(record)
            self.last_speed = self.tokens_per_second(now) or self.last_speed
        live = [slot for slot in report.slots if slot.state != "retained"]
        last = self.history[-1] if self.history else None
        if not live or not last or not last["used"] or now - last["time"] >= SAMPLE_EVERY_S:
            self._sample(now, live, waiting, bytes_per_token)

    def record_token(self, generation: Generation) -> None:
        """The latest token of `generation`, as its visitor meets it."""
        times = [event.time for event in generation.events[-2:]]
        if len(times) == 1:
            self.first_token.observe(times[0] - generation.times.queued)
        else:
            self.gaps.observe(times[1] - times[0])

    def record_end(self, span: dict) -> None:
        self.ended.append(span)
        self.ends[span["finish_reason"]] += 1
        self.total_reused_tokens += span["reused_tokens"]
        self.total_public_tokens += span["public_tokens"]

    def worker_lost(self) -> None:
        """The cache is gone with the worker."""
        self.slots = []
        self.allocated_bytes = self.allocated_tokens = self.padding_tokens = self.public_tokens = 0
        if self.history:
            self._sample(clock.now(), [], self.history[-1]["waiting"], 0)

    def tokens_per_second(self, now: float) -> float:
        """Over the last seconds; 0 when nothing was emitted in them."""
        while self._emitted and self._emitted[0][0] < now - SPEED_OVER_S:
            self._emitted.popleft()
        tokens = sum(count for _, count in self._emitted)
        elapsed = max(now - self._emitted[0][0], 1.0) if self._emitted else 1.0
        return tokens / elapsed

    def latest_steps(self) -> list[StepRecord]:
        return list(itertools.islice(reversed(self.steps), LATEST_STEPS))[::-1]

    def forget_old(self, now: float) -> None:
        while self.history and self.history[0]["time"] < now - HISTORY_S:
            self.history.popleft()
        while self.ended and self.ended[0]["ended"] < now - TIMELINE_S:
            self.ended.popleft()
        while len(self.steps) > LATEST_STEPS and self.steps[0].time < now - TIMELINE_S:
            self.steps.popleft()
        while self.speeds and self.speeds[0][0] < now - TIMELINE_S:
            self.speeds.popleft()

    def timeline(self, since: float, until: float, generations: list[Generation]) -> dict[str, Any]:
        """Requests and tokens a second between two moments, in Unix seconds; for a short while each step, too."""
        spans = [*self.ended, *(generation.span() for generation in generations)]
        shown = [s for s in spans if s["queued"] < until and (s["ended"] is None or s["ended"] > since)]
        speeds = [point for point in self.speeds if since <= point[0] <= until]
        near = until - since <= STEPS_S
        steps = [asdict(step) for step in self.steps if since <= step.time <= until] if near else []
        return {"requests": sorted(shown, key=lambda span: span["queued"]), "speeds": speeds, "steps": steps}

    def snapshot(
        self, now: float, generations: list[Generation], config: EngineConfig, bytes_per_token: int
    ) -> dict[str, Any]:
        """The measured part of the engine's snapshot; `generations` are the unfinished ones."""
        self.forget_old(now)
        live = [slot for slot in self.slots if slot.state != "retained"]
        return {
            "queue": {
                "waiting": sum(g.state == "waiting" for g in generations),
                "running": len(live),
                "max_batch_size": config.max_batch_size,
                "peak_batch_size": self.peak_batch_size,
                "max_waiting": config.max_waiting,
            },
            "cache": {
                "allocated_bytes": self.allocated_bytes,
                "allocated_tokens": self.allocated_tokens,
                "padding_tokens": self.padding_tokens,
                "public_tokens": self.public_tokens,
                "used_bytes": bytes_per_token * sum(slot.tokens for slot in live),
                "slots": [_slot(slot) for slot in sorted(self.slots, key=lambda slot: slot.slot)],
            },
            "throughput": {"tokens_per_second": self.tokens_per_second(now)},
            "totals": {
                "requests": self.total_requests,
                "tokens": self.total_tokens,
                "reused_tokens": self.total_reused_tokens,
                "public_tokens": self.total_public_tokens,
            },
            "steps": [asdict(step) for step in self.latest_steps()],
            "requests": self.timeline(now - HISTORY_S, now + 1, generations)["requests"],
            "history": list(self.history),
            "probes": [asdict(probe) for probe in self.probes],
        }

    def _sample(self, now: float, live: list[SlotState], waiting: int, bytes_per_token: int) -> None:
        retained = sum(slot.tokens for slot in self.slots if slot.state == "retained")
        if not self.speeds or now - self.speeds[-1][0] >= 1:
            self.speeds.append((now, self.tokens_per_second(now)))
        self.history.append(
            {
                "time": now,
                "allocated_bytes": self.allocated_bytes,
                "waiting": waiting,
                "running": sum(slot.state == "running" for slot in live),
                "tokens_per_second": self.tokens_per_second(now),
                "used": {str(slot.request_id): slot.tokens * bytes_per_token for slot in live},
                "retained_bytes": retained * bytes_per_token,
                "public_bytes": self.public_tokens * bytes_per_token,
            }
        )
        self.forget_old(now)


def _slot(slot: SlotState) -> dict[str, Any]:
    return {
        "slot": slot.slot,
        "state": slot.state,
        "client": slot.client,
        "request": slot.request_id,
        "tokens": slot.tokens,
        "prompt_tokens": slot.prompt_tokens,
        "reused_tokens": slot.reused_tokens,
        "public_tokens": slot.public_tokens,
    }
