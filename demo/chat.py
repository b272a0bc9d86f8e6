"""The chat: one turn at a time through the shared engine, streamed while it is written.

The conversation lives in the browser and comes back with each turn; the server keeps numbers only.
"""

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import gradio as gr

from demo.lease import handover_notice, waiting_for_gpu
from demo.quota import identity
from demo.refusals import REFUSALS, readable, refusals, require, sentence
from demo.speed import Measurements, speed_value
from demo.streams import Streams
from demo.tokens import MOST_ANSWERS, RUNNERS_UP, Answer, Answers
from engine import Engine, Generation, GenerationError, SamplingParams

SPEED_EVERY_S = 1.0
# The fields of Settings after the system prompt, in their order.
SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "watermark",
    "schema",
)

Message = dict[str, Any]
Update = tuple[Any, Any, Any]


@dataclass
class Visit:
    """What the server remembers of an open page: the running turn, what was measured, and the last answers' tokens."""

    generation: Generation | None = None
    measured: Measurements = field(default_factory=Measurements)
    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=MOST_ANSWERS))
    told: bool = False  # whose quota counts

    def stop(self) -> None:
        """Cancel the running turn, if there is one."""
        if self.generation:
            self.generation.cancel()


class Chat:
    """The handlers of the chat. Each yields (conversation, prompt, speed)."""

    def __init__(self, engine: Engine, streams: Streams, answers: Answers):
        self._engine = engine
        self._streams = streams
        self._answers = answers

    async def send(
        self, prompt: str, conversation: Any, visit: Visit, request: gr.Request, *settings: Any
    ) -> AsyncIterator[Update]:
        """Answer `prompt`; a refused one stays in its field, or goes back there."""
        with refusals():
            messages = messages_of(conversation)
        back: Any = gr.skip()  # to write a long text again takes a browser as long as the first time
        try:
            text = readable(prompt, "prompt").strip()
            require(bool(text), "The prompt is empty: write at least one character.")
            async for update in self._answer([*messages, {"role": "user", "text": text}], visit, request, settings):
                back = prompt
                yield update
        except REFUSALS as refusal:
            yield show(messages, notice=sentence(refusal)), back, gr.skip()

    async def retry(
        self, conversation: Any, visit: Visit, request: gr.Request, *settings: Any
    ) -> AsyncIterator[Update]:
        """Answer the last question again."""
        with refusals():
            messages = messages_of(conversation)
        try:
            async for update in self._answer(messages[:-1], visit, request, settings):
                yield update[0], gr.skip(), update[2]
        except REFUSALS as refusal:
            yield show(messages, notice=sentence(refusal)), gr.skip(), gr.skip()

    async def edit(self, conversation: Any) -> tuple[Any, str]:
        """Take the last question back into the prompt field."""
        with refusals():
            messages = messages_of(conversation)
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=0)
        return show(messages[:last]), messages[last]["text"] if messages else ""

    async def stop(self, visit: Visit) -> None:
        """End the running turn, if there is one."""
        visit.stop()

    async def new(self, visit: Visit) -> Update:
        """Forget the conversation and what was measured in it."""
        visit.stop()
        visit.measured = Measurements()
        visit.answers.clear()
        return show([]), "", None

    async def _answer(
        self, messages: list[Message], visit: Visit, request: gr.Request, settings: tuple[Any, ...]
    ) -> AsyncIterator[Update]:
        system, *sampling = settings
        params = sampling_params(**dict(zip(SETTINGS, sampling, strict=True)))
        params = replace(params, stop=params.stop + self._engine.turn_end)
        turns = [{"role": message["role"], "content": message["text"]} for message in messages]
        if system and system.strip():
            turns.insert(0, {"role": "system", "content": readable(system, "system prompt")})
        turns, dropped = self._engine.fit_chat(turns, params.max_new_tokens)
        notices = [f"{dropped} of the oldest messages no longer fit and were left out."] if dropped else []
        if self._engine.snapshot()["lease"] and not visit.told:
            notices.append(identity(request.headers))
            visit.told = True
        notice = " ".join(notices).strip() or None
        with self._streams.place(request):
            generation = self._engine.submit(turns, params, client=request.session_hash, probe=True)
            answer = self._answers.open(generation)
            visit.generation = generation
            visit.answers.append(answer)
            try:
                async for update in self._follow(generation, answer.key, messages, notice, visit, request.session_hash):
                    yield update
            finally:
                visit.measured = visit.measured.with_turn(generation)
                answer.settle()
                if visit.generation is generation and generation.done:
                    visit.generation = None

    async def _follow(
        self,
        generation: Generation,
        key: str,
        messages: list[Message],
        notice: str | None,
        visit: Visit,
        session: str | None,
    ) -> AsyncIterator[Update]:
        client = {"client": generation.client, "limit": self._engine.context, "notice": notice}
        speed_due = 0.0
        with self._streams.follow(generation, session) as stream:
            yield show(messages, pending={"label": "sending"}, **client), "", gr.skip()
            while await stream.next():
                speed: Any = gr.skip()
                if generation.events and monotonic() >= speed_due:
                    speed, speed_due = speed_value(visit.measured.with_turn(generation)), monotonic() + SPEED_EVERY_S
                state = {**client, "used": used(generation)}
                if between := handover_notice(generation, self._engine):
                    state["notice"] = between
                if generation.text:
                    yield show([*messages, spoken(generation, key)], streaming=True, **state), gr.skip(), speed
                else:
                    gpu = waiting_for_gpu(self._engine, generation.client)
                    pending = {"label": gpu} if gpu else waiting(generation)
                    yield show(messages, pending=pending, **state), gr.skip(), speed
        if generation.error and not generation.events:
            raise GenerationError(generation.error)
        speed = speed_value(visit.measured.with_turn(generation))
        state = {**client, "used": used(generation), "notice": generation.error or notice}
        yield show([*messages, spoken(generation, key)], **state), gr.skip(), speed


def sampling_params(seed: str, stop: str, schema: str, **numbers: Any) -> SamplingParams:
    """The fields of Settings as the engine takes them; stop strings stand one a line.

    The model's best tokens are asked for always, so that the tokens of any answer can be looked at later.
    """
    return SamplingParams(
        seed=_seed(seed),
        stop=tuple(line for line in (stop or "").splitlines() if line),
        grammar={"type": "json", "value": schema} if schema and schema.strip() else None,
        top_n_tokens=RUNNERS_UP,
        **numbers,
    )


def _seed(text: str | None) -> int | None:
    text = (text or "").strip()
    require(text == "" or text.isdecimal(), f"seed must be a whole number from 0, or empty, not {text[:40]!r}")
    return int(text) if text else None


def messages_of(conversation: Any) -> list[Message]:
    """The messages in what the browser sent back; `ValueError` if they are not a conversation."""
    messages = conversation.get("messages", []) if isinstance(conversation, dict) else conversation or []
    require(isinstance(messages, list), "conversation must be a list of messages by user and assistant")
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ("user", "assistant")
        require(known, "conversation must be a list of messages by user and assistant")
    return [
        {"role": message["role"], "text": readable(message.get("text"), "message text"), **extras(message)}
        for message in messages
    ]


def extras(message: Message) -> Message:
    """What the page shows beside the text of a message, as `spoken` wrote it."""
    return {
        name: readable(message[name], name) for name in ("note", "answer", "format") if message.get(name) is not None
    }


def show(messages: list[Message], **state: Any) -> dict[str, Any]:
    """The value of the conversation component: see static/conversation.js for the names in `state`."""
    return {"messages": messages, **state}


def spoken(generation: Generation, key: str) -> Message:
    """An answer as far as it is written; `answer` is the key under which its tokens can be had."""
    shape = {"format": "json"} if generation.sequence.params.grammar else {}
    return {"role": "assistant", "text": generation.text, "note": note(generation), "answer": key, **shape}


def used(generation: Generation) -> int:
    return generation.prompt_tokens + len(generation.events)


def waiting(generation: Generation) -> dict[str, Any]:
    """What to say while there is no text yet."""
    if generation.state == "waiting":
        place, wait_s = generation.position, generation.wait_estimate_s
        label = f"{ordinal(place)} in line" if place else "next in line"
        return {"label": f"{label} · about {wait_s:.0f} s" if wait_s else label}
    if generation.prefilled < generation.prompt_tokens:
        read, total = generation.prefilled, generation.prompt_tokens
        return {"label": f"reading {read:,} of {total:,} tokens", "progress": read / total}
    return {"label": "about to speak", "progress": 1}


def note(generation: Generation) -> str:
    """The muted line under an answer."""
    result = generation.result_so_far()
    count, timings = len(generation.events), result.timings
    parts = [f"{count} token{'' if count == 1 else 's'}"]
    if timings.first_token_s is not None:
        parts.append(f"first after {timings.first_token_s:.1f} s")
    if count > 1 and timings.tokens_per_second:
        parts.append(f"{timings.tokens_per_second:.{0 if timings.tokens_per_second >= 10 else 1}f} tokens/s")
    if generation.shared_with:
        parts.append(f"shared its batch with {generation.shared_with} other{'s' if generation.shared_with > 1 else ''}")
    if generation.resumed:
        parts.append("carried on after a restart of the worker")
    if generation.handovers:
        parts.append(f"went on in {generation.handovers} more GPU lease{'s' if generation.handovers > 1 else ''}")
    endings = {"cancelled": "stopped", "length": "cut at its limit", "error": "broke off"}
    if generation.done and result.finish_reason in endings:
        parts.append(endings[result.finish_reason])
    return " · ".join(parts)


def ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
