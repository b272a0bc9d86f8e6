"""The front of the engine: tokenises, hands token ids to the worker, turns its tokens back into text.

It never computes with the model. If the worker dies, another is started and every sequence goes on
from the ids it has, token for token; a second death under the same sequence fails it clearly. Where
workers are leased, one is asked for when somebody waits, and handed over in the same way when its time is up.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from engine import clock, line, tracing
from engine.clients import Clients
from engine.comparison import Comparison, Lane, check_lanes
from engine.config import EngineConfig, load_config
from engine.detokenizer import Detokenizer
from engine.errors import CLOSED, DIED_LOADING, DRAINED, DRAINING, STUCK, EngineNotReady, EngineStopped, LoadingError
from engine.generation import Generation
from engine.hosts import LeaseHost, Worker
from engine.params import MAX_SEED, SamplingParams, whole_number
from engine.prompts import Prompt, PromptEncoder, check_length
from engine.requests import Requests
from engine.sequence import Sequence
from engine.telemetry import Telemetry
from engine.tokenizer import load_tokenizer
from engine.watchdog import Watchdog
from engine.wire import Began, Cancel, LeaseRefused, Loading, LoadingFailed, Ready, StartRace, StepReport
from engine.workers import Workers

SNAPSHOT_EVERY_S = 0.25
PATIENCE_S = 5.0  # for a worker that is told to end


class Engine:
    """One model, one shared batch. Thread-safe; `snapshot()` says what it is doing.

    The constructor returns at once and the worker loads in the background; `from_pretrained` waits. `host` says where
    workers run: "process" or "thread", or a `LeaseHost`, whose model is loaded already. `public` prompts are nobody's
    secret: what one client's request computes of their beginnings, it computes for all.
    """

    def __init__(
        self, config: EngineConfig | None = None, host: str | LeaseHost = "process", public: SequenceOf[Prompt] = ()
    ):
        self.config = config or load_config()
        self.telemetry = Telemetry()
        self.facts: dict[str, Any] = {}  # the snapshot's `model`, once it is loaded
        self.prompts: PromptEncoder | None = None
        self._public = public
        self._eos_token_ids: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._requests = Requests(self.telemetry)
        self._workers = Workers(
            host, self.config, self._requests, self.telemetry, self._lock, self._hear, self._worker_ended
        )
        self._ids = itertools.count(1)
        self._clients = Clients()
        self._state = "loading"
        self._draining = False
        self._settled = threading.Event()
        self._loading: dict[str, Any] | None = None
        self._error: str | None = None
        self._snapshot: dict[str, Any] | None = None
        self._watchdog = Watchdog(self.config.watchdog_s, self._workers.owing, self._stuck)
        self._workers.start()
        if not isinstance(host, str):
            self._became_ready(host.ready)

    @classmethod
    def from_pretrained(
        cls,
        model: str | None = None,
        device: str = "auto",
        quantization: Literal["int8", "8bit", "4bit"] | None = None,
        *,
        config: EngineConfig | None = None,
        host: str = "process",
    ) -> "Engine":
        """An engine that is ready. `model` None is the default model; `LoadingError` says what to do."""
        if quantization not in (None, "none", "int8", "8bit", "4bit"):
            raise ValueError(f"quantization must be None, 'int8', '8bit' or '4bit', not {quantization!r}")
        config = config or load_config()
        asked = {"model": model, "device": None if device == "auto" else device, "quantize": quantization}
        engine = cls(config.model_copy(update={name: value for name, value in asked.items() if value}), host)
        try:
            engine.wait_ready()
        except BaseException:
            engine.close()
            raise
        return engine

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the model is loaded; `LoadingError` if it cannot be, `TimeoutError` after `timeout` seconds."""
        if not self._settled.wait(timeout):
            raise TimeoutError(f"the model was not loaded within {timeout} s")
        if not self.ready:
            raise LoadingError(self._error or "the engine was closed")

    @property
    def ready(self) -> bool:
        return self.prompts is not None and self._state in ("ready", "restarting") and not self._draining

    @property
    def context(self) -> int:
        """Most tokens a sequence may have, prompt included."""
        return self._encoder().context

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The ids that `submit` would use."""
        return self._encoder().encode(prompt)

    @property
    def turn_end(self) -> tuple[str, ...]:
        """See `PromptEncoder.turn_end`."""
        return self._encoder().turn_end

    def fit_chat(self, messages: list[dict[str, str]], max_new_tokens: int) -> tuple[list[dict[str, str]], int]:
        """See `PromptEncoder.fit_chat`."""
        return self._encoder().fit_chat(messages, max_new_tokens)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        client: Hashable | None = None,
        *,
        probe: bool = False,
    ) -> Generation:
        """Queue a generation. `client` is opaque: its sequences may reuse each other's cached beginnings.

        With `probe`, naive decoding is measured now and then during this generation.
        `ValueError` for a bad prompt, `EngineBusy` when the line is full: nothing was queued then.
        """
        params = params or SamplingParams()
        encoder = self._encoder()
        if params.grammar is not None and not self._eos_token_ids:
            raise ValueError("grammar must be left out here: this model has no token to end its answer with")
        ids = encoder.encode(prompt, params.truncate)
        check_length(len(ids), params.max_new_tokens, "max_new_tokens", encoder.context)
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED)
        with self._lock:
            self._check_open()
            line.refuse_if_full(self._unfinished(), self.config, self.telemetry.last_speed)
            number = None if client is None else self.client_number(client)
            sequence = Sequence(next(self._ids), ids, params, seed, number, probe)
            generation = Generation(sequence, Detokenizer(encoder.tokenizer, params.stop), self, self._workers.payer())
            generation.trace = tracing.caller()
            self.telemetry.total_requests += 1
            self._workers.begin(generation)
        return generation

    def compare(
        self,
        prompt: Prompt,
        new_tokens: int,
        client: Hashable | None = None,
        *,
        lanes: SequenceOf[str] = ("naive", "cached"),
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int | None = None,
        warm_up: bool = True,
    ) -> Comparison:
        """Race ways of decoding `prompt` for `new_tokens` tokens: `LANES` has them; refusals as in `submit`.

        Greedy unless there is a temperature. The first lane steps first.
        """
        encoder = self._encoder()
        check_lanes(lanes)
        params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
        limit = min(self.config.max_race_tokens, encoder.context)
        new_tokens = whole_number("new_tokens", new_tokens, 1, limit)
        ids = encoder.encode(prompt)
        check_length(len(ids), new_tokens, "new_tokens", limit)
        with self._lock:
            self._check_open()
            line.refuse_race_if_full(self._requests, self.config, self.telemetry.last_speed)
            drawn = secrets.randbelow(MAX_SEED) if seed is None else seed
            start = StartRace(next(self._ids), ids, new_tokens, tuple(lanes), params, drawn, warm_up)
            filling = [Lane(name, Detokenizer(encoder.tokenizer), new_tokens) for name in lanes]
            number = None if client is None else self.client_number(client)
            comparison = Comparison(start, filling, self.facts, self, number, self._workers.payer())
            self._workers.begin(comparison)
        return comparison

    def cancel(self, request: Generation | Comparison) -> None:
        """End a generation or a race; one that has ended already is left alone."""
        with self._lock:
            if not request.done:
                self._workers.tell(Cancel(request.id))
                self._requests.end(request, "cancelled")
                self._workers.left_by(request.payer)

    def client_number(self, client: Hashable) -> int:
        """The anonymous number that snapshots show for a client."""
        with self._lock:
            return self._clients.number(client)

    def place_in_line(self, generation: Generation) -> int:
        """From 1 for the next to be admitted; 0 for one that does not wait."""
        return line.place(generation, self._unfinished())

    def wait_estimate_s(self, generation: Generation) -> float | None:
        """Seconds until a waiting generation is admitted; None where nothing was measured yet."""
        rows, speed = self.config.max_batch_size, self.telemetry.last_speed
        return line.seconds_until_admitted(generation, self._unfinished(), rows, speed)

    def snapshot(self) -> dict[str, Any]:
        """What the engine is doing, as JSON-able data. Shared by its readers; made at most four times a second."""
        with self._lock:
            now = clock.now()
            if self._snapshot is None or now - self._snapshot["time"] >= SNAPSHOT_EVERY_S:
                generations = self._unfinished()
                self._snapshot = {
                    "time": now,
                    "model": self.facts or None,
                    "worker": "draining" if self._draining else self._workers.shown(self._state),
                    "loading": self._loading,
                    "error": self._error,
                    "lease": self._workers.lease_snapshot(self.client_number),
                    **self.telemetry.snapshot(now, generations, self.config, self.facts.get("bytes_per_token", 0)),
                    "races": self._requests.races(),
                }
                self._snapshot["totals"]["restarts"] = self._workers.deaths
            return self._snapshot

    def timeline(self, window_s: float, back_s: float) -> dict[str, Any]:
        """The `window_s` seconds until `back_s` seconds ago: requests, speeds and, of at most ten seconds, steps."""
        with self._lock:
            until = clock.now() - back_s
            return self.telemetry.timeline(until - window_s, until, self._unfinished())

    def drain(self) -> None:
        """Refuse what is new, and let what is unfinished end: at most `drain_s` seconds. Then `close`."""
        with self._lock:
            self._draining, self._snapshot, unfinished = True, None, list(self._requests)
        until = time.monotonic() + self.config.drain_s
        for request in unfinished:
            request.wait(max(until - time.monotonic(), 0))

    def close(self) -> None:
        """End the worker; what is unfinished fails with a sentence."""
        with self._lock:
            if self._state == "stopped":
                return
            self._stop(DRAINED if self._draining else CLOSED)
        if worker := self._workers.current:
            worker.stop(PATIENCE_S)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- checks

    def _encoder(self) -> PromptEncoder:
        if self.prompts is None:
            self._check_open()
            raise EngineNotReady("The model is still loading. Try again in a moment.")
        return self.prompts

    def _check_open(self) -> None:
        if self._state == "stopped":
            raise EngineStopped(self._error or CLOSED)
        if self._draining:
            raise EngineStopped(DRAINING)

    def _unfinished(self) -> list[Generation]:
        with self._lock:
            return list(self._requests.generations.values())

    # ---- the worker

    def _hear(self, message: object) -> None:
        match message:
            case Loading():
                self._loading = asdict(message)
            case LoadingFailed(text) if self.prompts is None or self._workers.leased:
                self._stop(text)
            case LoadingFailed(text):
                self._error = text
            case Ready():
                self._became_ready(message)
                self._workers.started()
            case Began(request_ids):
                self._requests.begin(request_ids)
            case StepReport():
                self._take_in(message)
            case LeaseRefused(text):
                self._workers.refused(text)

    def _take_in(self, report: StepReport) -> None:
        size = self.facts["bytes_per_token"]
        fruitful = self._requests.take_in(report, size, lambda request_id: self._workers.tell(Cancel(request_id)))
        self._workers.took_in(fruitful=fruitful)

    def _became_ready(self, ready: Ready) -> None:
        if self.prompts is None:
            try:
                tokenizer = load_tokenizer(Path(ready.folder), self.config.trust_remote_code)
            except LoadingError as error:
                self._stop(str(error))
                return
            self.prompts = PromptEncoder(tokenizer, ready.facts["vocabulary"], ready.facts["context"])
            self._workers.publish(self.prompts.encode_all(self._public))
        self.facts = {**ready.facts, "chat_template": self.prompts.has_chat_template}
        self._requests.model_name = self.facts["name"]
        self._loading, self._error, self._state = None, None, "ready"
        self._eos_token_ids = ready.eos_token_ids
        self._settled.set()

    def _worker_ended(self, parked: bool) -> None:
        if self.prompts is None:
            self._stop(DIED_LOADING)
            return
        if not self._workers.leased:
            self._state = "restarting"
        self._workers.ended(died=not parked)

    def _stuck(self, worker: Worker) -> None:
        """End it; then it is replaced as one that died."""
        if not worker.stop(PATIENCE_S):
            with self._lock:
                self._stop(STUCK)

    def _stop(self, message: str) -> None:
        self._state, self._draining, self._error, self._loading = "stopped", False, message, None
        self._workers.give_up()
        self._watchdog.end()
        self._requests.fail(list(self._requests), message)
        self._settled.set()
