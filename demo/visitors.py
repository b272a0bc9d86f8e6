"""Brought visitors: real requests, for somebody who is alone and wants to see the batch fill."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from demo.lease import waiting_for_gpu
from demo.prompts import VISITORS
from demo.quota import Quotas
from demo.refusals import REFUSALS, require, sentence
from demo.settings import PageSettings
from demo.streams import address_of
from engine import Engine, Generation, GenerationError, SamplingParams

ARRIVE_EVERY_S, WORD_EVERY_S = 0.4, 1.0
LEAST_TOKENS, MOST_TOKENS = 60, 160


@dataclass(frozen=True)
class Brought:
    """Who brought a visitor, and what it does."""

    owner: str | None
    address: str
    generation: Generation


class Visitors:
    """Adds requests under clients of their own, a few a press and bounded in total."""

    def __init__(self, engine: Engine, settings: PageSettings, quotas: Quotas):
        self.a_press = settings.visitors_per_press
        self._an_address = settings.max_brought_per_address
        self._quotas = quotas
        self._engine = engine
        self._most = settings.max_brought_visitors
        self._alive: list[Brought] = []
        self._numbers = itertools.count(1)

    @property
    def clients(self) -> list[int | None]:
        """The anonymous numbers of those who are here."""
        self._alive = [brought for brought in self._alive if not brought.generation.done]
        return [brought.generation.client for brought in self._alive]

    async def bring(self, request: gr.Request) -> AsyncIterator[dict[str, Any]]:
        """Let them arrive one after another; says what becomes of them, and who it is that brought them."""
        came: list[Generation] = []
        try:
            places = self._places(request)
            client = self._engine.client_number(request.session_hash)
            while len(came) < places:
                came.append(self._visit(request))
                self._alive.append(Brought(request.session_hash, address_of(request), came[-1]))
                yield {
                    "said": waiting_for_gpu(self._engine, client) or f"{len(came)} of {places} came.",
                    "client": client,
                }
                await asyncio.sleep(ARRIVE_EVERY_S)
                _raise_first(came)
            while came[0].state == "waiting" and (gpu := waiting_for_gpu(self._engine, client)):
                yield {"said": gpu}
                await came[0].changed(timeout=WORD_EVERY_S)
            _raise_first(came)
        except REFUSALS as refusal:
            yield {"said": sentence(refusal)}
            return
        yield {"said": f"{len(came)} came. They ask real questions of the same model and share its steps."}

    async def leave(self, request: gr.Request) -> None:
        """The page is closed: those whom it brought leave with it."""
        for brought in self._alive:
            if brought.owner == request.session_hash:
                brought.generation.cancel()

    def _places(self, request: gr.Request) -> int:
        """For how many there is room; `ValueError` if for none."""
        require(self._engine.ready, "They will come once the model is ready.")
        self._quotas.require_some(request.session_hash)
        here = len(self.clients)
        own = sum(brought.owner == request.session_hash for brought in self._alive)
        near = sum(brought.address == address_of(request) for brought in self._alive)
        places = min(self.a_press - own, self._an_address - near, self._most - here)
        require(places > 0, f"{here} brought visitors are here already; let some leave first.")
        return places

    def _visit(self, request: gr.Request) -> Generation:
        number = next(self._numbers)
        prompt = VISITORS[number % len(VISITORS)]
        params = SamplingParams(max_new_tokens=random.randint(LEAST_TOKENS, MOST_TOKENS), temperature=0.8, top_k=50)
        messages = [{"role": "user", "content": prompt}]
        return self._engine.submit(messages, params, client=("brought", request.session_hash, number))


def _raise_first(generations: list[Generation]) -> None:
    """The first error, as `GenerationError`: what hinders one hinders all whom the same visitor brought."""
    for generation in generations:
        if generation.error:
            raise GenerationError(generation.error)
