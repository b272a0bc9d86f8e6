"""The race as its caller sees it: lanes that fill, and a verdict."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from engine.detokenizer import Detokenizer
from engine.errors import GenerationError
from engine.gap import LANES, LaneTimes, take_apart
from engine.signals import Signal
from engine.wire import RaceStep, StartRace

if TYPE_CHECKING:
    from engine.lease import Payer

CONDITIONS = {
    "timing": "each step exclusive, the device synchronised before and after; a lane's clock is their sum",
    "end_of_sequence": "ignored",
}
WARMED = "two steps of each lane before the race, not counted"
COLD = "none: the same two steps were repeated after the race, not counted"
GREEDY = "greedy"
DRAWN = "temperature {}, top-k {}, seed {}: the same draws in every lane but generate(), which has its own"


class Lane:
    """One way of decoding, as far as it got: its text and its times."""

    def __init__(self, name: str, detokenizer: Detokenizer, target: int):
        self.name, self.target = name, target
        self.text = ""
        self.token_ids: list[int] = []
        self.logit_gaps: list[float] = []
        self.times = LaneTimes(name)
        self._detokenizer = detokenizer

    def push(self, step: RaceStep) -> None:
        if step.trial:
            self.times.trial_ms.append(step.step_ms)
            return
        self.text += self._detokenizer.push(step.token_id)
        self.token_ids.append(step.token_id)
        self.logit_gaps.append(step.logit_gap)
        self.times.step_ms.append(step.step_ms)
        self.times.forward_ms.append(step.forward_ms)
        self.times.rows.append(step.rows)
        if len(self.token_ids) == self.target:
            self.text += self._detokenizer.finish()

    def summary(self) -> dict[str, Any]:
        """Seconds, and milliseconds of each step; `rows` is how many sequences most of the steps served."""
        times, tokens = self.times, len(self.token_ids)
        return {
            "name": self.name,
            "tokens": tokens,
            "total_s": times.total_ms / 1000,
            "ms_per_token": times.total_ms / tokens if tokens else 0.0,
            "rows": max(times.rows, default=1),
            "share_s": times.share_ms / 1000,
            "first_call_ms": times.first_call_ms,
            "step_ms": list(times.step_ms),
            "forward_ms": list(times.forward_ms),
        }

    def view(self) -> dict[str, Any]:
        tokens = len(self.token_ids)
        state = "waiting" if not tokens else "finished" if tokens == self.target else "running"
        return {**self.summary(), "text": self.text, "target": self.target, "state": state}


class Comparison:
    """What `Engine.compare` returns: several ways of decoding one prompt, in the serving process.

    `state` is waiting, running, paused (other visitors come first), finished, cancelled or error.
    """

    def __init__(
        self,
        start: StartRace,
        lanes: list[Lane],
        model: dict[str, Any],
        engine,
        client: int | None = None,
        payer: "Payer | None" = None,
    ):
        self.id = start.request_id
        self.start = start
        self.client, self.payer = client, payer
        self.state = "waiting"
        self.resumed = False  # in another worker, because the first one was lost before it began
        self.error: str | None = None
        self._lanes = {lane.name: lane for lane in lanes}
        self._conditions = {
            "model": model["id"],
            **{fact: model[fact] for fact in ("source", "dtype", "device", "threads")},
            "prompt_tokens": len(start.prompt_ids),
            "new_tokens": start.new_tokens,
            "choice": _choice(start),
            "first": start.lanes[0],
            "warm_up": WARMED if start.warm_up else COLD,
            "torch": version("torch"),
            "transformers": version("transformers"),
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

    def wait(self, timeout: float | None = None) -> bool:
        """Until the end, whichever, or for `timeout` seconds; whether it has ended."""
        return self._signal.wait_for(lambda: self.done, timeout)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The verdict: `conditions`, `lanes`, `ratio` (milliseconds a token of the first lane in the order of `LANES`
        to the last's), `identical`, `first_difference`, and the `gap` taken apart. `TimeoutError` if it is not there
        in time, `GenerationError` if there is none."""
        if not self.wait(timeout):
            raise TimeoutError(f"race {self.id} did not end within {timeout} s")
        if self.state != "finished":
            raise GenerationError(self.error or "the race was cancelled")
        lanes = [self._lanes[name] for name in LANES if name in self._lanes]
        difference = first_difference(lanes, drawn=self.start.params.samples)
        return {
            "conditions": self._conditions,
            "lanes": [{**lane.summary(), "what": LANES[lane.name]} for lane in lanes],
            "ratio": lanes[0].times.total_ms / lanes[-1].times.total_ms,
            "identical": difference is None,
            "first_difference": difference,
            "gap": take_apart([lane.times for lane in lanes], self.start.warm_up),
        }

    # ---- the engine's side

    def _begins(self) -> None:
        """Its first step is being computed."""
        self.state = "running"
        self._signal.notify()

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


def check_lanes(lanes: Sequence[str]) -> None:
    """`ValueError` unless they are two or more different ones of `LANES`."""
    known = all(isinstance(name, str) and name in LANES for name in lanes)
    if not known or not 2 <= len(set(lanes)) == len(lanes):
        raise ValueError(f"lanes must be at least two different ones of {', '.join(LANES)}, not {list(lanes)}")


def first_difference(lanes: list[Lane], drawn: bool = False) -> dict[str, Any] | None:
    """Where the first lane that differs from the first of all does, and how close the two best logits were there.

    `generate()` is left out where tokens are drawn, since it draws its own.
    """
    compared = [lane for lane in lanes if not (drawn and lane.name == "generate")]
    for lane in compared[1:]:
        for index, tokens in enumerate(zip(compared[0].token_ids, lane.token_ids, strict=True)):
            if tokens[0] != tokens[1]:
                return {
                    "index": index,
                    "lanes": [compared[0].name, lane.name],
                    "tokens": list(tokens),
                    "logit_gap": min(compared[0].logit_gaps[index], lane.logit_gaps[index]),
                }
    return None


def _choice(start: StartRace) -> str:
    params = start.params
    return DRAWN.format(params.temperature, params.top_k, start.seed) if params.samples else GREEDY
