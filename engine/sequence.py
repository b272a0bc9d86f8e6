"""One request as the worker sees it: token ids in, token ids out, and where its keys and values lie."""

from dataclasses import dataclass, field

from engine.grammar import Matcher
from engine.params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt, what was generated so far, and its slot.

    Nothing else is needed to go on: draws depend on `(seed, number of tokens emitted)` alone, so a
    sequence can be prefilled again anywhere and continue with the tokens it would have had.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    client: int | None = None
    probe: bool = False
    output_ids: list[int] = field(default_factory=list)
    slot: int = -1  # none yet
    cached_tokens: int = 0  # leading tokens whose keys and values are in the slot
    reused_tokens: int = 0  # of those, not computed for it but taken over
    public_tokens: int = 0  # of the reused ones, from a public beginning; the rest from its client's earlier sequence
    probed_at: int = 0  # length at which naive decoding was last measured
    prompt_logprobs: list[float | None] = field(default_factory=list)  # as far as asked for and computed
    matcher: Matcher | None = None  # how far the answer has come in its grammar; made in the worker

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def last_token_id(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_length(self) -> int:
        """Tokens it can grow to; what admission accounts for."""
        return len(self.prompt_ids) + self.params.max_new_tokens
