"""The lanes of a race: ways to make the same tokens, from the slowest to the fastest, each one step at a time.

All run on the same weights in the serving process. A step is timed exclusively, the device synchronised on both
sides, and apart from it its forward: what is left is the choice of the token.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache, GenerationConfig

from engine.kv_cache import KVCache
from engine.params import SamplingParams
from engine.processors import Row
from engine.runner import ModelRunner
from engine.sampler import choose
from engine.wire import StartRace

COMPANY = 8  # rows in the batch of the lane that shares it
COMPANIONS = SamplingParams(temperature=0.8, top_k=50)


@dataclass(frozen=True)
class Step:
    """One token: its exclusive milliseconds, of which the forward's, for how many rows they made one, and the two
    best logits' distance."""

    token_id: int
    step_ms: float
    forward_ms: float
    rows: int
    logit_gap: float


class Lane(Protocol):
    def step(self) -> Step: ...

    def close(self) -> None:
        """Free what it holds, at whatever step it is."""


class Loop:
    """Decoding by hand: a forward of the whole text so far or of what is new, then the choice of a token."""

    def __init__(self, race: StartRace, runner: ModelRunner, forward: Callable[[list[int]], torch.Tensor]):
        self._race, self._runner, self._forward = race, runner, forward
        self._ids = list(race.prompt_ids)

    def step(self) -> Step:
        clock = Clock(self._runner)
        logits = self._forward(self._ids)
        forward_ms = clock.ms()
        row = Row(self._race.params, self._race.seed, len(self._ids) - len(self._race.prompt_ids), 0, len(self._ids))
        token_id = choose(logits[None], [row], _no_history(logits)).token_ids[0]
        step_ms = clock.ms()
        self._ids.append(token_id)
        return Step(token_id, step_ms, forward_ms, 1, gap(logits))

    def close(self) -> None:
        pass


class Slots:
    """This engine's own steps: the prompt read into a slot once, then one token a step, beside `rows - 1` others.

    The others go on from the same prompt by draws of their own; their prompts are not read on this lane's clock, as
    those of visitors who are here already would not be.
    """

    def __init__(self, race: StartRace, runner: ModelRunner, rows: int):
        self._runner, self._rows = runner, rows
        self._cache = KVCache(runner.layer_shapes, rows, len(race.prompt_ids) + race.new_tokens)
        self._prompt, self._emitted = race.prompt_ids, 0
        seeds = [race.seed + row for row in range(rows)]
        self._params = list(zip([race.params] + [COMPANIONS] * (rows - 1), seeds, strict=True))
        self._last: list[int] = []

    def step(self) -> Step:
        clock = Clock(self._runner)
        length = len(self._prompt) + self._emitted
        if self._emitted:
            logits = self._runner.decode(self._cache, self._last, [length - 1] * self._rows)
        else:
            logits = self._runner.prefill(self._cache, 0, 0, self._prompt)[None]
        forward_ms = clock.ms()
        rows = [Row(params, seed, self._emitted, row, length) for row, (params, seed) in enumerate(self._params)]
        chosen = choose(logits, rows[: len(logits)], self._cache.token_ids).token_ids
        step_ms = clock.ms()
        if not self._emitted:
            chosen += self._bring_companions(logits, rows[1:])
        self._last, self._emitted = chosen, self._emitted + 1
        return Step(chosen[0], step_ms, forward_ms, len(logits), gap(logits[0]))

    def close(self) -> None:
        pass

    def _bring_companions(self, logits: torch.Tensor, rows: list[Row]) -> list[int]:
        for pool in (*self._cache.keys, *self._cache.values, self._cache.token_ids):
            pool[1:] = pool[:1]
        return choose(logits.expand(len(rows), -1), rows, self._cache.token_ids).token_ids if rows else []


class Generate:
    """`model.generate()`, which knows no single steps: it runs in a thread that goes on while a step is asked for.

    Its streamer is called once for the prompt and then for each token, and holds it there. Drawn tokens come from
    its own random numbers.
    """

    def __init__(self, race: StartRace, runner: ModelRunner):
        self._race, self._runner = race, runner
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._token: int | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._forward_ms = 0.0
        self._logits = torch.zeros(1, 2)
        self._thread = threading.Thread(target=self._generate, name="kvscope-generate", daemon=True)

    def step(self) -> Step:
        clock = Clock(self._runner)
        self._forward_ms, self._token = 0.0, None
        self._go.release()
        if not self._thread.ident:
            self._thread.start()
        self._held.acquire()
        step_ms = clock.ms()
        if self._error or self._token is None:
            raise LaneFailed(f"model.generate() failed: {self._error!r}") from self._error
        return Step(self._token, step_ms, self._forward_ms, 1, gap(self._logits))

    def close(self) -> None:
        self._closed = True
        self._go.release()
        if self._thread.ident:
            self._thread.join()

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt `[1, tokens]`, then with each token `[1]`."""
        if value.dim() == 1:
            self._token = int(value[0])
            self._held.release()
            self._wait()

    def end(self) -> None:
        """Called by `generate` after the last token."""

    def _wait(self) -> None:
        self._go.acquire()
        if self._closed:
            raise _Closed

    def _generate(self) -> None:
        try:
            self._wait()
            ids = torch.tensor([self._race.prompt_ids], device=self._runner.device)
            model: Any = self._runner.model
            hooks = [
                model.register_forward_pre_hook(lambda *_: self._forward_begins()),
                model.register_forward_hook(lambda _module, _inputs, output: self._forward_ended(output)),
            ]
            try:
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=self._config(), streamer=self
                )
            finally:
                for hook in hooks:
                    hook.remove()
        except _Closed:
            pass
        except BaseException as error:
            self._error = error
            self._held.release()

    def _config(self) -> GenerationConfig:
        params, beyond = self._race.params, self._runner.vocabulary
        drawn = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        # What is left out would be filled in from the model's own; an end that no token can be is none.
        return GenerationConfig(
            max_new_tokens=self._race.new_tokens,
            eos_token_id=beyond,
            pad_token_id=0,
            repetition_penalty=1.0,
            do_sample=params.samples,
            **(drawn if params.samples else {}),
        )

    def _forward_begins(self) -> None:
        if threading.current_thread() is self._thread:
            self._clock = Clock(self._runner)

    def _forward_ended(self, output: Any) -> None:
        if threading.current_thread() is self._thread:
            self._forward_ms += self._clock.ms()
            self._logits = output.logits[0, -1]


class LaneFailed(Exception):
    """A sentence on why a lane cannot go on. The engine can."""


class _Closed(Exception):
    """The race is over before the lane is."""


class Clock:
    """Milliseconds since it was made, with the device synchronised at each look."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        runner.synchronize()
        self._began = time.perf_counter()

    def ms(self) -> float:
        self._runner.synchronize()
        return 1000 * (time.perf_counter() - self._began)


def make_lane(name: str, race: StartRace, runner: ModelRunner) -> Lane:
    """A lane at its beginning; its steps are to be those of `race`, for its number of tokens."""
    match name:
        case "naive_all":
            return Loop(race, runner, lambda ids: runner.naive(ids, every=True)[-1])
        case "naive":
            return Loop(race, runner, runner.naive)
        case "by_hand":
            cache = DynamicCache(config=runner.model.config)
            return Loop(race, runner, lambda ids: runner.append(cache, ids))
        case "generate":
            return Generate(race, runner)
        case "cached":
            return Slots(race, runner, 1)
        case "shared":
            return Slots(race, runner, COMPANY)
    raise ValueError(f"no lane is called {name!r}")


def gap(logits: torch.Tensor) -> float:
    """The distance between the two best of `[vocabulary]`."""
    best = logits.topk(2).values
    return float(best[0] - best[1])


def _no_history(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.long, device=logits.device)
