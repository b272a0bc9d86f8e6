"""What the front and the worker say to each other: token ids and times, never text.

One message is one pickled dataclass on a `multiprocessing.connection.Connection`; both ends belong
to the same user. They are connected by inheritance, or, where a process is used again, by a socket in a
folder that only this user can enter.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.params import SamplingParams
from engine.sequence import Sequence

# ---- front to worker


@dataclass(frozen=True)
class Submit:
    sequence: Sequence


@dataclass(frozen=True)
class Publish:
    """Prompts whose beginnings anybody may take over from whoever computed them."""

    prompts: list[list[int]]


@dataclass(frozen=True)
class Cancel:
    """End a sequence or a race, wherever it is; unknown ids are ignored (it may have ended already)."""

    request_id: int


@dataclass(frozen=True)
class StartRace:
    """`lanes` as in `engine/lanes.py`: on equal clocks, the first steps first."""

    request_id: int
    prompt_ids: list[int]
    new_tokens: int
    lanes: tuple[str, ...] = ("naive", "cached")
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    warm_up: bool = True


@dataclass(frozen=True)
class Shutdown:
    """End the loop. A child process is ended by its operating system instead, a leased one kept for the next lease."""


# ---- worker to front


@dataclass(frozen=True)
class Loading:
    """Progress of a stage, in bytes; `total` 0 means that the end is not known."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class LoadingFailed:
    message: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded; `facts` is the snapshot's `model`, `folder` holds the tokenizer."""

    folder: str
    facts: dict[str, Any]
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class LeaseRefused:
    """No worker came: in the host's place of one, with a sentence for the visitor who was to pay."""

    message: str


@dataclass(frozen=True)
class Parked:
    """A lease's last word: everything was told, nothing is lost, and what is unfinished can go on elsewhere."""


@dataclass(frozen=True)
class Began:
    """Sequences or races that the step now beginning takes in: if the worker dies of it, they were there."""

    request_ids: list[int]


@dataclass(frozen=True)
class Token:
    request_id: int
    token_id: int
    logprob: float
    finish_reason: str | None = None
    top_tokens: tuple[tuple[int, float], ...] = ()  # the model's best ids with their log-probabilities


@dataclass(frozen=True)
class PromptLogprobs:
    """The log-probability of each prompt token after those before it; None for the first."""

    request_id: int
    logprobs: list[float | None]


@dataclass(frozen=True)
class Failure:
    """One request failed with a sentence for its visitor."""

    request_id: int
    message: str


@dataclass(frozen=True)
class SlotState:
    slot: int
    state: str  # running | prefilling | retained
    request_id: int
    client: int | None
    tokens: int
    prompt_tokens: int
    reused_tokens: int = 0
    public_tokens: int = 0


@dataclass(frozen=True)
class Probe:
    """One naive forward and one cached step, exclusive, batch of one, at the same length."""

    request: int
    client: int | None
    length: int
    naive_ms: float
    cached_ms: float
    time: float  # as a `StepRecord`'s


@dataclass(frozen=True)
class RaceStep:
    """One exclusive step of one lane, or (with `lane` None) a change of state only. A trial does not count."""

    request_id: int
    state: str  # running | paused | finished
    lane: str | None = None
    token_id: int = 0
    step_ms: float = 0.0
    logit_gap: float = 0.0  # between the two best logits, in logits
    forward_ms: float = 0.0  # of `step_ms`, in the model
    rows: int = 1  # how many sequences the step made a token for
    trial: bool = False


@dataclass
class StepRecord:
    """One turn of the engine; milliseconds are exclusive of probes and races."""

    time: float  # of `time.monotonic`, which the front turns into Unix seconds
    batch_size: int = 0
    prefill_tokens: int = 0
    forward_ms: float = 0.0
    decode_ms: float = 0.0  # all of the turn but the forwards: admission, swaps, choosing
    step_ms: float = 0.0


@dataclass
class StepReport:
    """Everything that one `EngineCore.step` did."""

    record: StepRecord
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    put_back: list[int] = field(default_factory=list)  # requests that wait again, because memory ran out
    probes: list[Probe] = field(default_factory=list)
    race_steps: list[RaceStep] = field(default_factory=list)
    slots: list[SlotState] = field(default_factory=list)
    allocated_bytes: int = 0
    allocated_tokens: int = 0
    public_tokens: int = 0  # kept of public beginnings, beside the slots, and part of what is allocated
    padding_tokens: int = 0  # positions that the decode step read beyond its rows' own
