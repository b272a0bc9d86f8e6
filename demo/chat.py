"""The chat: one turn at a time through the shared engine, streamed while it is written.

The conversation lives in the browser and comes back with each turn; the server keeps numbers only.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import gradio as gr

from demo.refusals import REFUSALS, readable, require, sendable
from demo.speed import Measurements, speed_value
from demo.streams import Streams
from engine import Engine, Generation, SamplingParams

SYSTEM_PROMPT = "You are a helpful assistant. Answer in plain, short sentences."
SPEED_EVERY_S = 1.0

Message = dict[str, str]
Update = tuple[Any, Any, Any]


@dataclass
class Visit:
    """What the server remembers of an open page: the running turn, and what was measured."""

    generation: Generation | None = None
    measured: Measurements = field(default_factory=Measurements)

    def stop(self) -> None:
        """Cancel the running turn, if there is one."""
        if self.generation:
            self.generation.cancel()


class Chat:
    """The handlers of the chat. Each yields (conversation, prompt, speed)."""

    def __init__(self, engine: Engine, streams: Streams):
        self._engine = engine
        self._streams = streams

    async def send(
        self, prompt: str, conversation: Any, visit: Visit, request: gr.Request, *settings: Any
    ) -> AsyncIterator[Update]:
        """Answer `prompt`; a refused one goes back into its field."""
        messages = messages_of(conversation)
        try:
            text = readable(prompt, "prompt").strip()
            require(bool(text), "The prompt is empty: write at least one character.")
            async for update in self._answer([*messages, {"role": "user", "text": text}], visit, request, settings):
                yield update
        except REFUSALS as refusal:
            back = sendable(prompt) if isinstance(prompt, str) else gr.skip()
            yield show(messages, notice=str(refusal)), back, gr.skip()

    async def retry(
        self, conversation: Any, visit: Visit, request: gr.Request, *settings: Any
    ) -> AsyncIterator[Update]:
        """Answer the last question again."""
        messages = messages_of(conversation)
        try:
            async for update in self._answer(messages[:-1], visit, request, settings):
                yield update[0], gr.skip(), update[2]
        except REFUSALS as refusal:
            yield show(messages, notice=str(refusal)), gr.skip(), gr.skip()

    def edit(self, conversation: Any) -> tuple[Any, str]:
        """Take the last question back into the prompt field."""
        messages = messages_of(conversation)
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=0)
        return show(messages[:last]), messages[last]["text"] if messages else ""

    def new(self, visit: Visit) -> Update:
        """Forget the conversation and what was measured in it."""
        visit.stop()
        visit.measured = Measurements()
        return show([]), "", None

    async def _answer(
        self, messages: list[Message], visit: Visit, request: gr.Request, settings: tuple[Any, ...]
    ) -> AsyncIterator[Update]:
        yield show(messages, pending={"label": "sending"}), "", gr.skip()
        system, *sampling = settings
        params = sampling_params(*sampling)
        turns = [{"role": message["role"], "content": message["text"]} for message in messages]
        if system and system.strip():
            turns.insert(0, {"role": "system", "content": readable(system, "system prompt")})
        turns, dropped = self._engine.fit_chat(turns, params.max_new_tokens)
        notice = f"{dropped} of the oldest messages no longer fit and were left out." if dropped else None
        with self._streams.place(request):
            generation = self._engine.submit(turns, params, client=request.session_hash, probe=True)
            visit.generation = generation
            try:
                async for update in self._follow(generation, messages, notice, visit):
                    yield update
            finally:
                visit.measured = visit.measured.with_turn(generation)

    async def _follow(
        self, generation: Generation, messages: list[Message], notice: str | None, visit: Visit
    ) -> AsyncIterator[Update]:
        client = {"client": generation.client, "limit": self._engine.context, "notice": notice}
        speed_due = 0.0
        with self._streams.follow(generation) as stream:
            while await stream.next():
                speed: Any = gr.skip()
                if generation.events and monotonic() >= speed_due:
                    speed, speed_due = speed_value(visit.measured.with_turn(generation)), monotonic() + SPEED_EVERY_S
                if generation.text:
                    answer = {"role": "assistant", "text": generation.text, "note": note(generation)}
                    yield show([*messages, answer], streaming=True, used=used(generation), **client), gr.skip(), speed
                else:
                    pending = waiting(generation)
                    yield show(messages, pending=pending, used=used(generation), **client), gr.skip(), speed
        answer = {"role": "assistant", "text": generation.text, "note": note(generation)}
        speed = speed_value(visit.measured.with_turn(generation))
        yield show([*messages, answer], used=used(generation), **client), gr.skip(), speed


def sampling_params(
    max_new_tokens: Any, temperature: Any, top_p: Any, top_k: Any, repetition_penalty: Any, seed: str, stop: str
) -> SamplingParams:
    """The fields of Settings as the engine takes them; stop strings stand one a line."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=_seed(seed),
        stop=tuple(line for line in (stop or "").splitlines() if line),
    )


def _seed(text: str | None) -> int | None:
    text = (text or "").strip()
    require(text == "" or text.isdecimal(), f"seed must be a whole number from 0, or empty, not {text[:40]!r}")
    return int(text) if text else None


def messages_of(conversation: Any) -> list[Message]:
    """The messages in what the browser sent back; `ValueError` if they are not a conversation."""
    messages = (conversation or {}).get("messages", [])
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ("user", "assistant")
        require(known, "conversation must be a list of messages by user and assistant")
    return [{**message, "text": readable(message.get("text"), "message text")} for message in messages]


def show(messages: list[Message], **state: Any) -> dict[str, Any]:
    """The value of the conversation component: see static/conversation.js for the names in `state`."""
    return {"messages": messages, **state}


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
    endings = {"cancelled": "stopped", "length": "cut at its limit", "error": f"failed: {result.error}"}
    if generation.done and result.finish_reason in endings:
        parts.append(endings[result.finish_reason])
    return " · ".join(parts)


def ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
