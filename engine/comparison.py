"""The race as its caller sees it: two lanes that fill, and a verdict."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.detokenizer import Detokenizer
from engine.errors import GenerationError
from engine.signals import Signal
from engine.wire import RaceStep

if TYPE_CHECKING:
    from engine.lease import Payer

CONDITIONS = {
    "choice": "greedy, end-of-sequence ignored",
    "warm_up": "one uncounted step of each lane",
    "timing": "each step exclusive, the device synchronised before and after; a lane's clock is their sum",
    "naive": "the whole prefix again for every token, logits of the last position only",
    "cached": "the prompt read once, then one token a step from the cache",
}


@dataclass
class Lane:
    name: str
    detokenizer: Detokenizer
    target: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    logit_gaps: list[float] = field(default_factory=list)

    def push(self, step: RaceStep) -> None:
        self.text += self.detokenizer.push(step.token_id)
        self.token_ids.append(step.token_id)
        self.step_ms.append(step.step_ms)
        self.logit_gaps.append(step.logit_gap)
        if len(self.token_ids) == self.target:
            self.text += self.detokenizer.finish()

    def summary(self) -> dict[str, Any]:
        tokens, total_ms = len(self.token_ids), sum(self.step_ms)
        return {
            "name": self.name,
            "tokens": tokens,
            "total_s": total_ms / 1000,
            "ms_per_token": total_ms / tokens if tokens else 0.0,
            "step_ms": list(self.step_ms),
        }

    def view(self) -> dict[str, Any]:
        tokens = len(self.token_ids)
        state = "waiting" if not tokens else "finished" if tokens == self.target else "running"
        return {**self.summary(), "text": self.text, "target": self.target, "state": state}


class Comparison:
    """What `Engine.compare` returns: naive and cached decoding of one prompt, in the serving process.

    `state` is waiting, running, paused (other visitors come first), finished, cancelled or error.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        lanes: list[Lane],
        model: dict[str, Any],
        engine,
        client: int | None = None,
        payer: "Payer | None" = None,
    ):
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.new_tokens = lanes[0].target
        self.client, self.payer = client, payer
        self.state = "waiting"
        self.resumed = False  # in another worker, because the first one was lost before it began
        self.error: str | None = None
        self._lanes = {lane.name: lane for lane in lanes}
        self._conditions = {
            "model": model["id"],
            **{fact: model[fact] for fact in ("source", "dtype", "device", "threads")},
            "prompt_tokens": len(prompt_ids),
            "new_tokens": self.new_tokens,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **CONDITIONS,
        }
        self._engine = engine
        self._signal = Signal()
        self._seen = 0

    @property
    def done(self) -> bool:
        return self.state in ("finished", "cancelled", "error")

    @property
    def begun(self) -> bool:
        """Whether there is a step of it, which no other worker can go on from."""
        return any(lane.token_ids for lane in self._lanes.values())

    @property
    def lanes(self) -> list[dict[str, Any]]:
        return [lane.view() for lane in self._lanes.values()]

    def cancel(self) -> None:
        self._engine.cancel(self)

    async def changed(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, for anything to differ from the last call; whether it does."""
        before, self._seen = self._seen, await self._signal.wait_async(self._seen, timeout)
        return self._seen != before

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The verdict: `conditions`, `lanes`, `ratio` (naive to cached milliseconds a token), `identical`,
        `first_difference`. `TimeoutError` if it is not there in time, `GenerationError` if there is none."""
        if not self._signal.wait_for(lambda: self.done, timeout):
            raise TimeoutError(f"race {self.id} did not end within {timeout} s")
        if self.state != "finished":
            raise GenerationError(self.error or "the race was cancelled")
        naive, cached = self._lanes["naive"], self._lanes["cached"]
        difference = first_difference(naive, cached)
        return {
            "conditions": self._conditions,
            "lanes": [naive.summary(), cached.summary()],
            "ratio": naive.summary()["ms_per_token"] / cached.summary()["ms_per_token"],
            "identical": difference is None,
            "first_difference": difference,
        }

    # ---- the engine's side

    def _push(self, step: RaceStep) -> None:
        if step.lane:
            self._lanes[step.lane].push(step)
        self.state = step.state
        self._signal.notify()

    def _finish(self, reason: str, error: str | None = None) -> None:
        self.error = error
        self.state = reason
        self._signal.notify()

    def _interrupted(self, *, failed: bool) -> None:
        """Back in line, to begin in another worker."""
        self.resumed = self.resumed or failed
        self.state = "waiting"
        self._signal.notify()


def first_difference(naive: Lane, cached: Lane) -> dict[str, Any] | None:
    """Where the lanes part, and how close the two best logits were there (the smaller gap of the two lanes)."""
    pairs = zip(naive.token_ids, cached.token_ids, strict=True)
    index = next((i for i, (first, second) in enumerate(pairs) if first != second), None)
    if index is None:
        return None
    return {
        "index": index,
        "naive_token": naive.token_ids[index],
        "cached_token": cached.token_ids[index],
        "logit_gap": min(naive.logit_gaps[index], cached.logit_gaps[index]),
    }
