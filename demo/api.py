"""The endpoints for programs: `/generate`, `/chat`, `/compare` and `/stats`, and nothing else."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from demo.chat import SYSTEM_PROMPT
from demo.race import progress
from demo.refusals import readable, refusals, require
from demo.streams import Streams
from engine import Engine, SamplingParams


def add_api(engine: Engine, streams: Streams) -> None:
    """Declare the endpoints inside the current `gr.Blocks`."""

    async def stream_text(prompt: Any, params: SamplingParams, request: gr.Request) -> AsyncIterator[str]:
        with streams.place(request):
            generation = engine.submit(prompt, params, client=request.session_hash)
            with streams.follow(generation) as stream:
                while await stream.next():
                    yield generation.text
            yield generation.result(timeout=0).text

    async def generate(
        request: gr.Request,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.7,
        top_p: float = 0.95,
        top_k: int = 50,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> AsyncIterator[str]:
        """Continue raw text. Streams the whole text so far; the last message is the whole text."""
        with refusals():
            params = SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                repetition_penalty=repetition_penalty,
                seed=seed,
            )
            async for text in stream_text(readable(prompt, "prompt"), params, request):
                yield text

    async def chat(request: gr.Request, message: str, history: list | None = None) -> AsyncIterator[str]:
        """Answer `message` after `history`, a list of {"role", "content"}. Streams as /generate does."""
        with refusals():
            params = SamplingParams(max_new_tokens=256, temperature=0.7, top_p=0.95, top_k=50)
            turns = [*chat_history(history), {"role": "user", "content": readable(message, "message")}]
            require(bool(turns[-1]["content"].strip()), "message must not be empty")
            if turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
            turns, _ = engine.fit_chat(turns, params.max_new_tokens)
            async for text in stream_text(turns, params, request):
                yield text

    async def compare(request: gr.Request, prompt: str, new_tokens: int = 64) -> AsyncIterator[dict[str, Any]]:
        """Race naive against cached decoding. Streams both lanes' progress; the last message is the verdict."""
        with refusals(), streams.place(request):
            comparison = engine.compare(readable(prompt, "prompt"), new_tokens, client=request.session_hash)
            with streams.follow(comparison) as stream:
                while await stream.next():
                    yield progress(comparison, new_tokens)
            yield comparison.result()

    async def stats() -> dict[str, Any]:
        """The engine's snapshot: model, queue, cache, throughput, totals, recent steps."""
        return engine.snapshot()

    for endpoint in (generate, chat, compare, stats):
        gr.api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)


def chat_history(history: Any) -> list[dict[str, str]]:
    """`history` as the chat template takes it; `ValueError` names what is wrong."""
    require(isinstance(history, list | None), 'history must be a list of {"role", "content"}')
    turns = []
    for turn in history or []:
        known = isinstance(turn, dict) and turn.get("role") in ("system", "user", "assistant")
        require(known, 'history must be a list of {"role", "content"} by system, user or assistant')
        turns.append({"role": turn["role"], "content": readable(turn.get("content"), "history content")})
    return turns
