"""Brought visitors: real requests, for somebody who is alone and wants to see the batch fill."""

import asyncio
import itertools
import random

import gradio as gr

from demo.prompts import VISITORS
from demo.quota import Quotas
from engine import Engine, EngineBusy, Generation, SamplingParams

ARRIVE_EVERY_S = 0.4
LEAST_TOKENS, MOST_TOKENS = 60, 160


class Visitors:
    """Adds requests under clients of their own, a few a press and bounded in total."""

    def __init__(self, engine: Engine, a_press: int, most: int, quotas: Quotas):
        self.a_press = a_press
        self._quotas = quotas
        self._engine = engine
        self._most = most
        self._alive: list[tuple[str | None, Generation]] = []  # who brought it, and what it does
        self._numbers = itertools.count(1)

    @property
    def clients(self) -> list[int | None]:
        """The anonymous numbers of those who are here."""
        self._alive = [(owner, generation) for owner, generation in self._alive if not generation.done]
        return [generation.client for _, generation in self._alive]

    async def bring(self, request: gr.Request) -> str:
        """Let them arrive one after another; says what became of them."""
        if not self._engine.ready:
            return "They will come once the model is ready."
        try:
            self._quotas.require_some(request.session_hash)
        except ValueError as refusal:
            return str(refusal)
        arrived = 0
        free = self._most - len(self.clients)
        own = sum(owner == request.session_hash for owner, _ in self._alive)
        for _ in range(min(self.a_press - own, free)):
            try:
                self._alive.append((request.session_hash, self._visit(request)))
            except EngineBusy as busy:
                return str(busy)
            arrived += 1
            await asyncio.sleep(ARRIVE_EVERY_S)
        if not arrived:
            return f"{len(self.clients)} brought visitors are here already; let some leave first."
        return f"{arrived} came. They ask real questions of the same model and share its steps."

    def _visit(self, request: gr.Request) -> Generation:
        number = next(self._numbers)
        prompt = VISITORS[number % len(VISITORS)]
        params = SamplingParams(max_new_tokens=random.randint(LEAST_TOKENS, MOST_TOKENS), temperature=0.8, top_k=50)
        messages = [{"role": "user", "content": prompt}]
        return self._engine.submit(messages, params, client=("brought", request.session_hash, number))
