"""How much of a prompt fits between two tokens of those who stream."""

from collections import deque

import numpy as np

LEAST_TOKENS = 16
STRETCH = 1.0  # of a usual step, which a chunk may take besides where more stream than wait
MEMORY = 48  # steps with a chunk, and as many without, from which it learns


class Pace:
    """Learns from steps of both kinds what a step, each of its rows and each prompt token cost on this machine.

    By least squares of the relative errors, so that a step that something else held up counts for little. Rows and
    tokens have to be told apart: rows that join while prompts are read would else be put down to the prompts, whose
    chunks became shorter and shorter.
    """

    def __init__(self, most_tokens: int):
        self._most_tokens = most_tokens
        self._with_chunk: deque[tuple[float, int, int]] = deque(maxlen=MEMORY)
        self._without: deque[tuple[float, int, int]] = deque(maxlen=MEMORY)

    def record(self, forward_ms: float, rows: int, prefill_tokens: int) -> None:
        if forward_ms > 0 and (rows or prefill_tokens):
            (self._with_chunk if prefill_tokens else self._without).append((forward_ms, rows, prefill_tokens))

    def budget(self, rows: int, prompts: int) -> int:
        """Prompt tokens for the next step, so that the gap between two tokens of a stream stays short.

        Whoever waits for a first token counts as much as who waits for the next: if `prompts` are more than `rows`, the
        rows wait longer. A crowd that comes together would else be let in the more slowly the fewer are in.
        """
        if not rows or not self._with_chunk or not self._without:
            return self._most_tokens
        step_ms, row_ms, token_ms = self._costs()
        spare_ms = STRETCH * max(1.0, prompts / rows) * (step_ms + row_ms * rows)
        if token_ms * self._most_tokens <= spare_ms:
            return self._most_tokens
        return max(LEAST_TOKENS, int(spare_ms / token_ms))

    def _costs(self) -> np.ndarray:
        """Milliseconds of a step by itself, and for each row and each token in it."""
        seen = np.array([*self._with_chunk, *self._without])
        forward_ms = seen[:, :1]
        causes = np.hstack([np.ones_like(forward_ms), seen[:, 1:]])
        return np.linalg.lstsq(causes / forward_ms, np.ones(len(seen)), rcond=None)[0]
