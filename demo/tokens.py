"""The tokens behind the answers of the chat: kept for a visit's last answers, sent only when asked for."""

import json
import secrets
import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from engine import Engine, Generation, TokenEvent

MOST_ANSWERS = 8
RUNNERS_UP = 5


class Answer:
    """The tokens of one answer. Its `key` cannot be guessed and is told to the visitor's own page alone."""

    def __init__(self, generation: Generation, label: Callable[[int], str]):
        self.key = secrets.token_urlsafe(16)
        self._label = label
        self._generation: Generation | None = generation
        self._packed = b""

    def since(self, start: int) -> list[dict[str, Any]]:
        """The tokens from number `start` on, as far as they are written."""
        if self._generation is None:
            return json.loads(zlib.decompress(self._packed))[start:]
        return [described(event, self._label) for event in self._generation.events[start:]]

    def settle(self) -> None:
        """The answer has ended: keep some twenty bytes a token instead of the generation's objects."""
        self._packed = zlib.compress(json.dumps(self.since(0)).encode(), level=1)
        self._generation = None


class Answers:
    """All answers that can be asked for. Their visits alone keep them: what a visit forgets is gone from here."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._known: WeakValueDictionary[str, Answer] = WeakValueDictionary()

    def open(self, generation: Generation) -> Answer:
        """An answer that begins now, for its visit to keep."""
        prompts: Any = self._engine.prompts
        answer = Answer(generation, lambda token_id: prompts.tokenizer.decode([token_id]))
        self._known[answer.key] = answer
        return answer

    def message(self, key: str, start: int) -> dict[str, Any]:
        """What a page is sent; `tokens` is None where there is no such answer (any more)."""
        answer = self._known.get(key)
        return {"from": start, "tokens": answer and answer.since(start), "kept": MOST_ANSWERS}


def described(event: TokenEvent, label: Callable[[int], str]) -> dict[str, Any]:
    """A token as the page shows it: `top` is (text, log-probability, whether it was chosen), best first.

    `name` stands for a token without text of its own: a special one, or the first bytes of a character.
    """
    top = [(t.text, round(t.logprob, 4), t.token_id == event.token_id) for t in event.top_tokens]
    name = {} if event.text else {"name": label(event.token_id)}
    return {"text": event.text, "logprob": round(event.logprob, 4), "special": event.special, "top": top, **name}
