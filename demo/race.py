"""Race: ways of decoding one prompt, each on its own clock."""

from collections.abc import AsyncIterator, Mapping
from time import monotonic
from typing import Any

import gradio as gr

from demo import race_figures
from demo.lease import race_in_line
from demo.quota import Quotas
from demo.refusals import REFUSALS, require, sentence
from demo.streams import Streams
from engine import Comparison, Engine
from engine.gap import LANES

FIGURE_EVERY_S = 1.0
NOTICES = {
    "waiting": "In line: the race starts when the engine has time for it.",
    "paused": "Paused: other visitors come first. The lanes' clocks stand still meanwhile.",
    "cancelled": "Stopped before the end: no verdict.",
}
SAYS = {
    "naive_all": "the same, and asks for every logit",
    "naive": "reads everything again for each token",
    "by_hand": "transformers' own cache, one token a step",
    "generate": "model.generate(), as it comes",
    "cached": "this engine: reads only the last token",
    "shared": "this engine: one step, tokens for eight",
}
TOKENS = [("10", 10), ("48", 48), ("96", 96), ("160 tokens", 160)]
CHOICES = {"greedy": 0.0, "sampled": 0.8}
TOP_K = 50
SLOWEST_FIRST, FASTEST_FIRST = "slowest first", "fastest first"
WARM, COLD = "after a warm-up", "cold"
# What the race's fields are called in the page's address, in the order of `Race.start`, and their first values.
FIELDS: dict[str, Any] = {
    "race_prompt": None,
    "race_tokens": 96,
    "race_lanes": ["naive", "cached"],
    "race_choice": "greedy",
    "race_first": SLOWEST_FIRST,
    "race_start": WARM,
}


class Race:
    """The handlers of the race panel."""

    def __init__(self, engine: Engine, streams: Streams, prompts: dict[str, str], quotas: Quotas):
        self._engine = engine
        self._quotas = quotas
        self._streams = streams
        self.prompts = prompts
        self._running: dict[str, Comparison] = {}

    def idle(self, lanes: list[str]) -> dict[str, Any]:
        """The panel before the first race."""
        return {"state": "idle", "lanes": blank(lanes), "caption": "for those who do not believe it"}

    async def start(self, request: gr.Request, *fields: Any) -> AsyncIterator[dict[str, Any]]:
        """Run one race and show it as it goes."""
        asked = dict(zip(FIELDS, fields, strict=True))
        shown = {"settings": asked, "caption": caption(asked), "prompt": self.prompts.get(asked["race_prompt"])}
        yield {"state": "waiting", "lanes": blank(asked["race_lanes"]), **shown}
        try:
            self._quotas.require_some(request.session_hash)
            with self._streams.place(request, "races"):
                comparison = self._compare(asked, request.session_hash)
                self._running[request.session_hash or ""] = comparison
                async for value in self._follow(comparison, request.session_hash):
                    yield {**value, **shown}
        except REFUSALS as refusal:
            yield {"state": "refused", "lanes": [], "notice": sentence(refusal), **shown}
        finally:
            self._running.pop(request.session_hash or "", None)

    async def stop(self, request: gr.Request) -> None:
        """Cancel the visitor's race."""
        if comparison := self._running.get(request.session_hash or ""):
            comparison.cancel()

    async def preset(self, request: gr.Request) -> list[Any]:
        """The fields as the page's address wants them, and the panel with these lanes.

        What the address does not name, or cannot be chosen, stays as it is.
        """
        wanted = from_address(request.query_params, list(self.prompts))
        shown = self.idle(wanted["race_lanes"]) if wanted["race_lanes"] else None
        return [gr.skip() if value is None else value for value in [*wanted.values(), shown]]

    def _compare(self, asked: dict[str, Any], client: str | None) -> Comparison:
        require(asked["race_prompt"] in self.prompts, "Choose one of the prompts.")
        require(bool(asked["race_lanes"]), "Choose at least two lanes.")
        lanes = in_order(asked["race_lanes"], asked["race_first"])
        return self._engine.compare(
            self.prompts[asked["race_prompt"]],
            asked["race_tokens"],
            client=client,
            lanes=lanes,
            temperature=CHOICES[asked["race_choice"]],
            top_k=TOP_K,
            warm_up=asked["race_start"] == WARM,
        )

    async def _follow(self, comparison: Comparison, session: str | None) -> AsyncIterator[dict[str, Any]]:
        drawn, due = None, 0.0
        with self._streams.follow(comparison, session) as stream:
            while await stream.next():
                if monotonic() >= due and comparison.begun:
                    drawn, due = figures(comparison), monotonic() + FIGURE_EVERY_S
                value = {**progress(comparison), "figures": drawn, "client": comparison.client}
                if comparison.state == "waiting":
                    value["notice"] = race_in_line(self._engine, comparison.client) or value["notice"]
                yield value
        final = {**progress(comparison), "figures": figures(comparison)}
        if comparison.state == "finished":
            result = comparison.result()
            final |= {"verdict": verdict(result), "result": result}
            final["figures"]["gap"] = race_figures.gap(result["gap"])
        yield final


def in_order(names: list[str], first: str) -> list[str]:
    """The chosen lanes as they step; `first` is one of them, or says which end of `LANES` begins."""
    lanes = [name for name in LANES if name in names]
    if first == FASTEST_FIRST:
        return lanes[::-1]
    require(first == SLOWEST_FIRST or first in lanes, "Who steps first has to be one of the lanes that you chose.")
    return sorted(lanes, key=lambda name: name != first)


def from_address(query: Mapping[str, str], prompts: list[str]) -> dict[str, Any]:
    """The race's fields out of the page's address; None for one that is not there or not among the choices."""
    found: dict[str, Any] = dict.fromkeys(FIELDS)
    if query.get("race_prompt") in prompts:
        found["race_prompt"] = query["race_prompt"]
    found["race_tokens"] = {str(tokens): tokens for _, tokens in TOKENS}.get(query.get("race_tokens", ""))
    lanes = [name for name in query.get("race_lanes", "").split(",") if name in LANES]
    found["race_lanes"] = lanes or None
    choices = {"race_choice": CHOICES, "race_first": (SLOWEST_FIRST, FASTEST_FIRST, *LANES), "race_start": (WARM, COLD)}
    for name, allowed in choices.items():
        found[name] = query[name] if query.get(name) in allowed else None
    return found


def blank(names: list[str]) -> list[dict[str, Any]]:
    """Lanes that have not begun, in the order of `LANES`."""
    chosen = [name for name in LANES if name in names]
    return [{"name": name, "tokens": 0, "target": 1, "text": "", **words(name)} for name in chosen]


def progress(comparison: Comparison) -> dict[str, Any]:
    """The lanes as far as they are, without their single steps."""
    steps = ("step_ms", "forward_ms")
    lanes = [
        {
            **{key: value for key, value in lane.items() if key not in steps},
            **words(lane["name"]),
        }
        for lane in sorted(comparison.lanes, key=lambda lane: list(LANES).index(lane["name"]))
    ]
    notice = comparison.error or NOTICES.get(comparison.state)
    return {"state": comparison.state, "lanes": lanes, "notice": notice}


def words(name: str) -> dict[str, str]:
    return {"title": race_figures.TITLES[name], "says": SAYS[name]}


def figures(comparison: Comparison) -> dict[str, Any]:
    prompt, target = len(comparison.start.prompt_ids), comparison.start.new_tokens
    return {
        "clocks": race_figures.clocks(comparison.lanes, target),
        "steps": race_figures.steps(comparison.lanes, prompt, target),
    }


def caption(asked: dict[str, Any]) -> str:
    start = "cold" if asked["race_start"] == COLD else "warmed up"
    return f"{asked['race_choice']} · {asked['race_tokens']} tokens · {start} · steps timed alone · engine time"


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """The tiles under the lanes, and a sentence on the largest part of the gap."""
    first, last, gap = result["lanes"][0], result["lanes"][-1], result["gap"]
    same = f"{last['tokens']} of {last['tokens']}"
    part = result["first_difference"]
    if part:
        same = f"{part['index']} of {last['tokens']}, then a gap of {part['logit_gap']:.2g} between the best logits"
    largest = max(gap["parts"], key=lambda part: part["seconds"])
    return {
        "ratio": f"{result['ratio']:.1f}×",
        "slowest": f"{first['total_s']:.1f} s",
        "fastest": f"{last['total_s']:.1f} s",
        "same": same,
        "said": f"Of {gap['from_s']:.1f} s, {largest['seconds']:.1f} s went into {largest['cause']}.",
    }
