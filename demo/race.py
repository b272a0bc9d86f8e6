"""Race: naive against cached decoding of one prompt, each on its own clock."""

from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import gradio as gr

from demo import figures
from demo.lease import race_in_line
from demo.quota import Quotas
from demo.refusals import REFUSALS
from demo.streams import Streams
from engine import Comparison, Engine

FIGURE_EVERY_S = 1.0
NOTICES = {
    "waiting": "In line: the race starts when the engine has time for it.",
    "paused": "Paused: other visitors come first. The lanes' clocks stand still meanwhile.",
    "cancelled": "Stopped before the end: no verdict.",
}


class Race:
    """The handlers of the race panel."""

    def __init__(self, engine: Engine, streams: Streams, prompts: dict[str, str], quotas: Quotas):
        self._engine = engine
        self._quotas = quotas
        self._streams = streams
        self.prompts = prompts
        self._running: dict[str, Comparison] = {}

    async def start(self, name: str, new_tokens: int, request: gr.Request) -> AsyncIterator[dict[str, Any]]:
        """Run one race and show it as it goes."""
        yield {"state": "waiting", "caption": caption(new_tokens), "prompt": self.prompts.get(name)}
        try:
            self._quotas.require_some(request.session_hash)
            with self._streams.place(request):
                comparison = self._engine.compare(self.prompts[name], new_tokens, client=request.session_hash)
                self._running[request.session_hash or ""] = comparison
                async for value in self._follow(comparison, new_tokens):
                    yield value
        except REFUSALS as refusal:
            yield {"state": "refused", "notice": str(refusal), "caption": caption(new_tokens)}
        finally:
            self._running.pop(request.session_hash or "", None)

    def stop(self, request: gr.Request) -> None:
        """Cancel the visitor's race."""
        if comparison := self._running.get(request.session_hash or ""):
            comparison.cancel()

    async def _follow(self, comparison: Comparison, new_tokens: int) -> AsyncIterator[dict[str, Any]]:
        figure, due = None, 0.0
        with self._streams.follow(comparison) as stream:
            while await stream.next():
                if monotonic() >= due and any(lane["step_ms"] for lane in comparison.lanes):
                    figure, due = lanes_figure(comparison, new_tokens), monotonic() + FIGURE_EVERY_S
                value = {**progress(comparison, new_tokens), "figure": figure, "client": comparison.client}
                if comparison.state == "waiting":
                    value["notice"] = race_in_line(self._engine, comparison.client) or value["notice"]
                yield value
        final = {**progress(comparison, new_tokens), "figure": lanes_figure(comparison, new_tokens)}
        if comparison.state == "finished":
            final["verdict"] = verdict(comparison.result())
        yield final


def progress(comparison: Comparison, new_tokens: int) -> dict[str, Any]:
    lanes = [{key: value for key, value in lane.items() if key != "step_ms"} for lane in comparison.lanes]
    notice = comparison.error or NOTICES.get(comparison.state)
    return {"state": comparison.state, "lanes": lanes, "caption": caption(new_tokens), "notice": notice}


def lanes_figure(comparison: Comparison, new_tokens: int) -> dict[str, Any]:
    naive, cached = (lane["step_ms"] for lane in comparison.lanes)
    return figures.race(naive, cached, new_tokens)


def caption(new_tokens: int) -> str:
    return f"greedy · {new_tokens} tokens · same warm-up · steps timed alone · engine time"


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """The four tiles under the lanes."""
    naive, cached = result["lanes"]
    same = f"{cached['tokens']} of {cached['tokens']}"
    part = result["first_difference"]
    if not result["identical"] and part:
        same = f"{part['index']} of {cached['tokens']}, then a gap of {part['logit_gap']:.2g} between the best logits"
    return {
        "ratio": f"{result['ratio']:.1f}×",
        "naive": f"{naive['total_s']:.1f} s",
        "cached": f"{cached['total_s']:.1f} s",
        "same": same,
    }
