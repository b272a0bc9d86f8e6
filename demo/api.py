"""The endpoints for programs: `/generate`, `/details`, `/chat`, `/compare` and `/stats`, and nothing else."""

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import gradio as gr
from gradio.exceptions import ComponentProcessingError

from demo.prompts import SYSTEM_PROMPT
from demo.quota import Quotas
from demo.race import progress
from demo.refusals import ERRORS, readable, refusals, refuse_files, require
from demo.sessions import Calls
from demo.streams import Streams
from engine import Engine, Generation, SamplingParams


def add_api(engine: Engine, streams: Streams, quotas: Quotas) -> None:
    """Declare the endpoints inside the current `gr.Blocks`."""

    async def follow(prompt: Any, params: SamplingParams, request: gr.Request) -> AsyncIterator[Generation]:
        """The generation at the pace of its stream, and once more when it has ended well."""
        with streams.place(request):
            generation = engine.submit(prompt, params, client=request.session_hash)
            with streams.follow(generation, request.session_hash) as stream:
                while await stream.next():
                    yield generation
            generation.result(timeout=0)
            yield generation

    @takes_sampling
    async def generate(request: gr.Request, prompt: str, *values: Any) -> AsyncIterator[str]:
        """Continue raw text with this Space's language model. Streams the whole text so far; the last message is it.

        Parameters:
            prompt: The text to continue; not a question to a chat model.
            max_new_tokens: Most tokens to write.
            temperature: 0 for the likeliest tokens always, more for more variety.
            seed: The same number gives the same text; left out, a new one each time.
        """
        with refusals():
            async for generation in follow(readable(prompt, "prompt"), sampling(*values), request):
                yield generation.text

    @takes_sampling
    async def details(request: gr.Request, prompt: str, *values: Any) -> AsyncIterator[dict[str, Any]]:
        """As /generate, in objects: {"text", "finish_reason": null} while it runs, at last everything known of it."""
        with refusals():
            async for generation in follow(readable(prompt, "prompt"), sampling(*values), request):
                yield account(generation) if generation.done else {"text": generation.text, "finish_reason": None}

    async def chat(request: gr.Request, message: str, history: list | None = None) -> AsyncIterator[str]:
        """Answer `message` after `history`, a list of {"role", "content"}. Streams as /generate does."""
        with refusals():
            params = SamplingParams(max_new_tokens=256, temperature=0.7, top_p=0.95, top_k=50, stop=engine.turn_end)
            turns = [*chat_history(history), {"role": "user", "content": readable(message, "message")}]
            require(bool(turns[-1]["content"].strip()), "message must not be empty")
            if turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
            turns, _ = engine.fit_chat(turns, params.max_new_tokens)
            async for generation in follow(turns, params, request):
                yield generation.text

    async def compare(
        request: gr.Request,
        prompt: str,
        new_tokens: int = 64,
        lanes: list[str] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int | None = None,
        warm_up: bool = True,
    ) -> AsyncIterator[dict[str, Any]]:
        """Measure ways of decoding the same text against each other: what a key-value cache is worth on this machine.

        Streams each lane's progress; the last message is the verdict, with seconds, milliseconds a token and causes.

        Parameters:
            prompt: The text that all lanes continue.
            new_tokens: How many tokens each lane writes.
            lanes: Two or more of naive_all, naive, by_hand, generate, cached, shared; left out, naive and cached.
            temperature: 0 for greedy decoding.
            warm_up: Whether each lane's first steps are tried before the race without counting.
        """
        with refusals(), streams.place(request, "races"):
            quotas.require_some(request.session_hash)
            comparison = engine.compare(
                readable(prompt, "prompt"),
                new_tokens,
                request.session_hash,
                lanes=["naive", "cached"] if lanes is None else lanes,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                warm_up=warm_up,
            )
            with streams.follow(comparison, request.session_hash) as stream:
                while await stream.next():
                    yield progress(comparison)
            yield comparison.result()

    async def stats() -> dict[str, Any]:
        """What the engine is doing now: its model, who waits and runs, bytes in the cache, tokens a second, totals."""
        return engine.snapshot()

    for endpoint in (details, chat):
        vars(endpoint)["_mcp_type"] = "none"  # not tools: a model has its own words, and no use for log-probabilities
    for endpoint in (generate, details, chat, compare, stats):
        gr.api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)


def sampling(
    max_new_tokens: int = 128,
    temperature: float | None = 0.7,
    top_p: float = 0.95,
    top_k: int = 50,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    do_sample: bool | None = None,
    typical_p: float = 1.0,
    frequency_penalty: float = 0.0,
    stop: list[str] | None = None,
    ignore_eos: bool = False,
    truncate: int | None = None,
    top_n_tokens: int = 0,
    prompt_logprobs: bool = False,
    watermark: bool = False,
    grammar: dict[str, Any] | None = None,
) -> SamplingParams:
    """What `/generate` and `/details` take after the prompt, in this order: the engine's own names and checks."""
    asked: dict[str, Any] = locals()
    return SamplingParams(**{**asked, "stop": [] if stop is None else stop})


def takes_sampling(endpoint: Callable) -> Callable:
    """Declare the parameters of `sampling` in the place of `endpoint`'s `*values`.

    Gradio and its clients read names, types and defaults from the signature and the annotations.
    """
    own, theirs = inspect.signature(endpoint), inspect.signature(sampling)
    first = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    vars(endpoint)["__signature__"] = own.replace(parameters=[*first, *theirs.parameters.values()])
    endpoint.__annotations__ = {**sampling.__annotations__, **endpoint.__annotations__}
    return endpoint


def account(generation: Generation) -> dict[str, Any]:
    """Everything known of a finished generation; the tokens' texts together are its text."""
    result = generation.result_so_far()
    tokens = [
        {
            "token_id": event.token_id,
            "text": event.text,
            "logprob": event.logprob,
            "special": event.special,
            "top_tokens": [asdict(token) for token in event.top_tokens],
            "forward_ms": event.forward_ms,
            "decode_ms": event.step_ms - event.forward_ms,
        }
        for event in generation.events
    ]
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "tokens": tokens,
        "prompt_logprobs": result.prompt_logprobs,
        "timings": asdict(result.timings),
    }


def chat_history(history: Any) -> list[dict[str, str]]:
    """`history` as the chat template takes it; `ValueError` names what is wrong."""
    require(isinstance(history, list | None), 'history must be a list of {"role", "content"}')
    turns = []
    for turn in history or []:
        known = isinstance(turn, dict) and turn.get("role") in ("system", "user", "assistant")
        require(known, 'history must be a list of {"role", "content"} by system, user or assistant')
        turns.append({"role": turn["role"], "content": readable(turn.get("content"), "history content")})
    return turns


class Page(gr.Blocks):
    """Blocks whose endpoints for programs have defaults over plain HTTP, too, where values come by position."""

    def __init__(self, most_calls: int, **options: Any):
        super().__init__(**options)
        self.calls = Calls(self, most_calls)

    def validate_inputs(self, block_fn: Any, inputs: list[Any]) -> None:
        """Add the defaults of what was left out at the end; `gr.Error` where there is more than an endpoint takes."""
        takes, public = len(block_fn.inputs), block_fn.api_visibility == "public"
        with refusals():
            refuse_files(inputs)
            require(block_fn.fn is not None, "This event happens in the browser alone.")
            counts = len(inputs) == takes or (public and len(inputs) < takes)
            most = "at most " if public else ""
            require(counts, f"/{block_fn.api_name} takes {most}{takes} values, not {len(inputs)}")
        inputs.extend(block.value for block in block_fn.inputs[len(inputs) :])
        super().validate_inputs(block_fn, inputs)

    async def process_api(self, *what: Any, **how: Any) -> dict[str, Any]:
        """Serve one call, or the next message of one; count what nobody expected."""
        try:
            return await super().process_api(*what, **how)
        except gr.Error:
            raise
        except Exception as error:
            if isinstance(error, ComponentProcessingError) and str(error).startswith("Could not preprocess"):
                with refusals():
                    raise ValueError("A value is of a kind that its field cannot hold.") from None
            ERRORS.labels("crash").inc()
            raise
