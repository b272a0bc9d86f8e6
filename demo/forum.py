"""The forum's experiment on this machine: both orders, cold and warm, next to the times that were asked about."""

import asyncio
from collections.abc import AsyncIterator
from statistics import mean
from typing import Any

import gradio as gr

from demo.refusals import require, sentence
from demo.streams import SLOWEST, Streams
from engine import Engine
from engine.forum import IN_THE_FORUM_S, NEW_TOKENS, ORDERS, ExperimentFailed, repeat

QUESTION = (
    f"In a forum, {NEW_TOKENS} tokens took {IN_THE_FORUM_S['by_hand']} s by hand and {IN_THE_FORUM_S['generate']} s "
    "with generate(). Why? Tried again here: both orders, each in a fresh process."
)
MOST_APART = 2  # times, between two warm runs of the same loop
DISTURBED = " Somebody else was answered meanwhile, so these times are longer than they would be alone."


class Forum:
    """The handler of the experiment: one at a time, and only while nobody else needs the machine."""

    def __init__(self, engine: Engine, streams: Streams):
        self._engine = engine
        self._streams = streams
        self._running = False

    async def run(self, request: gr.Request) -> AsyncIterator[dict[str, Any]]:
        """Run it and show its rows as they come."""
        rows: list[dict[str, Any]] = []
        try:
            with self._streams.place(request, "races"):
                self._require_quiet()
                self._running = True
                try:
                    async for said in self._follow(rows):
                        yield shown(said, rows)
                finally:
                    self._running = False
        except (ValueError, ExperimentFailed) as refusal:
            yield shown(sentence(refusal), rows)

    async def _follow(self, rows: list[dict[str, Any]]) -> AsyncIterator[str]:
        answered = self._engine.snapshot()["totals"]["tokens"]
        experiment = repeat(self._engine.config)
        while True:
            following = asyncio.create_task(asyncio.to_thread(next, experiment, None))
            while not (await asyncio.wait([following], timeout=SLOWEST))[0]:
                process = len(rows) // 2 + 1
                yield f"A fresh process loads the model and runs ({process} of {len(ORDERS)})."
            if (row := following.result()) is None:
                break
            rows.append(row)
        others = self._engine.snapshot()["totals"]["tokens"] - answered
        yield found(rows) + (DISTURBED if others else "")

    def _require_quiet(self) -> None:
        snapshot = self._engine.snapshot()
        require(snapshot["lease"] is None, "It needs a process of its own, which a leased GPU does not give.")
        require(self._engine.ready, "It can be run once the model is ready.")
        queue, races = snapshot["queue"], snapshot["races"]
        busy = self._running or queue["running"] or queue["waiting"] or races["running"] or races["waiting"]
        require(
            not busy, "Somebody else needs the machine just now, which would spoil the times. Try again in a moment."
        )


def shown(said: str, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The value of the panel; see static/forum.js."""
    return {"said": said, "rows": rows or None, "forum": IN_THE_FORUM_S}


def found(rows: list[dict[str, Any]]) -> str:
    """What the rows say: what is left when both are warm is the missing cache, and the rest goes with the order."""
    again = {name: [row["seconds"][name] for row in rows if row["warm"]] for name in IN_THE_FORUM_S}
    apart = max(max(times) / min(times) for times in again.values())
    if apart > MOST_APART:
        return (
            f"Two warm runs of the same loop took times {apart:.1f}-fold apart: something else held this machine, and "
            "nothing follows from them. Run it again."
        )
    warm = {name: mean(times) for name, times in again.items()}
    cold = {row["order"][0]: row["seconds"][row["order"][0]] for row in rows if not row["warm"]}
    first = {name: cold[name] - warm[name] for name in IN_THE_FORUM_S}
    return (
        f"Warm, the loop takes {warm['by_hand'] / warm['generate']:.1f} times as long: the missing cache. "
        f"Going first added {first['by_hand']:+.2f} s to the loop and {first['generate']:+.2f} s to "
        "generate(): the warm-up. The forum's times hold both."
    ).replace(" -", " −")
