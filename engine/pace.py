"""How much of a prompt fits between two tokens of those who stream."""

LEAST_TOKENS = 16
STRETCH = 1.0  # of a usual step, which a chunk may take besides
MEMORY = 0.2  # the weight of the latest measurement


class Pace:
    """Learns from each step what a row's token and a prompt's token cost on this machine."""

    def __init__(self, most_tokens: int):
        self._most_tokens = most_tokens
        self._usual_ms: float | None = None  # of a step without a chunk
        self._token_ms: float | None = None  # what each token of a chunk adds to it

    def record(self, forward_ms: float, rows: int, prefill_tokens: int) -> None:
        if rows and not prefill_tokens:
            self._usual_ms = _learn(self._usual_ms, forward_ms)
        elif prefill_tokens >= LEAST_TOKENS:
            of_rows_ms = (self._usual_ms or 0.0) if rows else 0.0
            self._token_ms = _learn(self._token_ms, max(forward_ms - of_rows_ms, 0.0) / prefill_tokens)

    def budget(self, rows: int) -> int:
        """Prompt tokens for the next step, so that the gap between two tokens of a stream stays short."""
        if not rows or not self._usual_ms or not self._token_ms:
            return self._most_tokens
        return max(LEAST_TOKENS, min(self._most_tokens, int(STRETCH * self._usual_ms / self._token_ms)))


def _learn(known: float | None, latest: float) -> float:
    return latest if known is None else (1 - MEMORY) * known + MEMORY * latest
