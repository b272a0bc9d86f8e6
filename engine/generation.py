"""One generation as its caller sees it: a stream of events that becomes a result."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine import clock
from engine.detokenizer import Detokenizer
from engine.errors import GenerationError
from engine.sequence import Sequence
from engine.signals import Signal
from engine.wire import Probe, SlotState, StepRecord, Token

if TYPE_CHECKING:
    from engine.lease import Payer


@dataclass(frozen=True)
class TopToken:
    """One of the model's best tokens at a position, and what it would read as; `logprob` as in `TokenEvent`."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """One token. `text` is what it lets through: empty while a character or a stop string may be unfinished.

    `logprob` is the model's own log-probability, before temperature, penalties and filters; `top_tokens` are the
    `top_n_tokens` that it held most likely, best first. `step_ms` is the shared step that made the token, of which
    `forward_ms` in the model; `batch_size` the rows in that step, `context_length` the tokens before it.
    """

    token_id: int
    text: str
    logprob: float
    special: bool
    time: float
    step_ms: float
    forward_ms: float
    batch_size: int
    context_length: int
    top_tokens: tuple[TopToken, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds, except `tokens_per_second`, which leaves out the first token (it waited for the prompt)."""

    queue_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    tokens_per_second: float


@dataclass(frozen=True)
class GenerationResult:
    """A generation at its end; `text` is exactly the sum of the events' texts.

    Per token: `logprobs`, `top_tokens`, and the milliseconds of the shared steps, `forward_ms` in the model and
    `decode_ms` for the rest (choosing, admission). `seed` is also there when it was drawn for the caller.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str | None  # length | eos_token | stop_sequence | cancelled | error; None: not yet
    seed: int
    logprobs: list[float]
    top_tokens: list[tuple[TopToken, ...]]
    forward_ms: list[float]
    decode_ms: list[float]
    timings: Timings
    error: str | None = None
    prompt_logprobs: list[float | None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)


@dataclass
class Lifeline:
    """Unix seconds of a request's stations; None until it got there."""

    queued: float = field(default_factory=clock.now)
    prefill: float | None = None
    decode: float | None = None
    ended: float | None = None


class Generation:
    """What `Engine.submit` returns. Iterate it (`for` or `async for`), or ask for its `result()`.

    All attributes may be read at any time from any thread; the methods that begin with an underscore belong to
    the engine's reader thread.
    """

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer, engine, payer: "Payer | None" = None):
        self.id = sequence.request_id
        self.client = sequence.client
        self.payer = payer
        self.sequence = sequence
        self.prompt_tokens = len(sequence.prompt_ids)
        self.state = "waiting"
        self.prefilled = 0
        self.reused_tokens = self.public_tokens = 0
        self.shared_with = 0
        self.resumed = False  # in another worker, because the first one died
        self.handovers = 0  # to another lease, because the time of the one before was up
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.text = ""
        self.events: list[TokenEvent] = []
        self.probes: list[Probe] = []
        self.prompt_logprobs: list[float | None] | None = None
        self.times = Lifeline()
        self.chunks: list[tuple[float, int]] = []  # of the prompt: Unix time of the step, tokens that it read
        self.trace: Any = None  # the caller's, if it is in one
        self._detokenizer = detokenizer
        self._engine = engine
        self._signal = Signal()
        self._seen = 0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def position(self) -> int:
        """Place in line, from 1; 0 once admitted."""
        return self._engine.place_in_line(self)

    @property
    def wait_estimate_s(self) -> float | None:
        """Seconds until admission at the speed of the last seconds; None where nothing was measured yet."""
        return self._engine.wait_estimate_s(self)

    def cancel(self) -> None:
        """End now. What was emitted stays; the row is free within two steps."""
        self._engine.cancel(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the end, whichever, or for `timeout` seconds; whether it has ended."""
        return self._signal.wait_for(lambda: self.done, timeout)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. `TimeoutError` after `timeout` seconds, `GenerationError` if it failed."""
        if not self.wait(timeout):
            raise TimeoutError(f"generation {self.id} did not end within {timeout} s")
        self._raise_if_failed()
        return self.result_so_far()

    def result_so_far(self) -> GenerationResult:
        """The result as of now, without waiting."""
        events = list(self.events)
        return GenerationResult(
            text="".join(event.text for event in events),
            token_ids=[event.token_id for event in events],
            prompt_token_ids=self.sequence.prompt_ids,
            finish_reason=self.finish_reason,
            seed=self.sequence.seed,
            logprobs=[event.logprob for event in events],
            top_tokens=[event.top_tokens for event in events],
            forward_ms=[event.forward_ms for event in events],
            decode_ms=[event.step_ms - event.forward_ms for event in events],
            timings=self._timings(events),
            error=self.error,
            prompt_logprobs=self.prompt_logprobs,
        )

    def __iter__(self) -> Iterator[TokenEvent]:
        shown, version = 0, self._signal.version
        while True:
            finished = self.done
            while shown < len(self.events):
                yield self.events[shown]
                shown += 1
            if finished:
                self._raise_if_failed()
                return
            version = self._signal.wait(version)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        shown, version = 0, self._signal.version
        while True:
            finished = self.done
            while shown < len(self.events):
                yield self.events[shown]
                shown += 1
            if finished:
                self._raise_if_failed()
                return
            version = await self._signal.wait_async(version)

    async def changed(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, for anything to differ from the last call; whether it does."""
        before, self._seen = self._seen, await self._signal.wait_async(self._seen, timeout)
        return self._seen != before

    def span(self) -> dict:
        """What snapshots say about this request: lengths and times, never text."""
        times = self.times
        return {
            "request": self.id,
            "client": self.client,
            "state": self.state,
            "queued": times.queued,
            "prefill": times.prefill,
            "decode": times.decode,
            "ended": times.ended,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "public_tokens": self.public_tokens,
            "chunks": self.chunks,
            "tokens": len(self.events),
            "finish_reason": self.finish_reason,
        }

    def log_fields(self) -> dict[str, Any]:
        """What the log says about this request at its end: seconds rounded to milliseconds, never text."""
        timings = {name: round(seconds, 3) for name, seconds in asdict(self._timings(self.events)).items()}
        return {
            "request": self.id,
            "client": self.client,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "new_tokens": len(self.events),
            **timings,
            "resumed": self.resumed,
        }

    # ---- the engine's side

    def _begins(self) -> None:
        """Admitted: its first chunk is being computed."""
        self.state = "prefill"
        self._signal.notify()

    def _seated(self, slot: SlotState, record: StepRecord) -> None:
        if self.times.prefill is None:
            self.times.prefill = record.time
        if not (self.events or self.handovers or self.resumed):  # what is its own again was not saved
            self.reused_tokens, self.public_tokens = slot.reused_tokens, slot.public_tokens
        self.state = "prefill" if slot.state == "prefilling" else "decode"
        read = min(slot.tokens, self.prompt_tokens) - max(self.prefilled, self.reused_tokens)
        if read > 0 and not self.events:
            self.chunks.append((record.time, read))
        self.prefilled = min(slot.tokens, self.prompt_tokens)
        if slot.state == "running":
            self.shared_with = max(self.shared_with, record.batch_size - 1)

    def _push(self, token: Token, record: StepRecord) -> str | None:
        """Append a token; the finish reason, if this was the last one."""
        now = clock.now()
        self.times.prefill = self.times.prefill or record.time
        self.times.decode = self.times.decode or now
        text = self._detokenizer.push(token.token_id)
        reason = "stop_sequence" if self._detokenizer.matched else token.finish_reason
        if reason:
            text += self._detokenizer.finish()
            # The rest that was held back may complete a stop string, too.
            reason = "stop_sequence" if self._detokenizer.matched else reason
        event = TokenEvent(
            token.token_id,
            text,
            token.logprob,
            special=self._detokenizer.is_special(token.token_id),
            time=now,
            step_ms=record.step_ms,
            forward_ms=record.forward_ms,
            batch_size=record.batch_size,
            context_length=self.prompt_tokens + len(self.events),
            top_tokens=tuple(TopToken(id, self._detokenizer.label(id), score) for id, score in token.top_tokens),
        )
        self.text += text
        self.sequence.output_ids.append(token.token_id)
        self.events.append(event)
        return reason

    def _finish(self, reason: str, error: str | None = None) -> None:
        self.times.ended = clock.now()
        self.state, self.error = "finished", error
        self.finish_reason = reason  # last: it is what `done` reads
        self._signal.notify()

    def _interrupted(self, *, failed: bool, handed_over: bool) -> None:
        """Back in line, to go on in another worker."""
        self.resumed = self.resumed or failed
        self.handovers += handed_over
        self.state = "waiting"
        self._signal.notify()

    def _notify(self) -> None:
        self._signal.notify()

    def _raise_if_failed(self) -> None:
        if self.finish_reason == "error":
            raise GenerationError(self.error)

    def _timings(self, events: list[TokenEvent]) -> Timings:
        times = self.times
        now = times.ended or clock.now()
        first = times.decode or now
        last = events[-1].time if events else first
        decode_s = max(last - first, 0.0)
        return Timings(
            queue_s=max((times.prefill or now) - times.queued, 0.0),
            prefill_s=max(first - (times.prefill or first), 0.0),
            first_token_s=max(first - times.queued, 0.0),
            decode_s=decode_s,
            tokens_per_second=(len(events) - 1) / decode_s if decode_s else 0.0,
        )
