"""A worker for a limited time, which one of those who wait pays for: how long to ask for, and when to end it.

Counts and clocks only; `demo/zerogpu.py` has the GPU that is leased. Times are seconds of `time.monotonic`, which
forked processes share.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable
from contextvars import Context
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

START_S = 3.0  # what a fresh worker is taken to need before its first step, until one was seen
MARGIN_S = 2.0  # between a lease's own end and the moment at which its host would kill it
LANE_S = 5.0  # what a lane of a race is taken to need before anything is known of it
STEP_S = 0.1  # and a step
HEADROOM = 1.5  # starts vary, and steps grow longer with the texts and the company


class LeaseTerms(BaseSettings):
    """What a lease may cost its payer."""

    model_config = SettingsConfigDict(env_prefix="KVSCOPE_LEASE_", env_ignore_empty=True, frozen=True, extra="ignore")

    min_s: int = Field(10, ge=5, le=600, description="shortest GPU time asked for, in seconds")
    max_s: int = Field(60, ge=5, le=3600, description="longest GPU time asked for, in seconds")
    linger_s: float = Field(1.0, ge=0, le=4, description="how long a lease with nothing to do waits for somebody")
    share: float = Field(
        0.25, ge=0, le=10, description="time for others alone that a lease may add to the time its payer was served"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "LeaseTerms":
        if self.min_s > self.max_s:
            raise ValueError("KVSCOPE_LEASE_MIN_S must not be above KVSCOPE_LEASE_MAX_S")
        return self


@dataclass(frozen=True)
class Payer:
    """A visitor whose quota can pay: equal for all that one visitor asks for. The lease is asked for in `context`."""

    key: Hashable
    context: Context = field(compare=False, repr=False)


@dataclass(frozen=True)
class Demand:
    """Who is here: unfinished requests of the payer and of others, and whether any of them is being computed."""

    own: int
    others: int
    own_served: bool
    others_served: bool


class Lease:
    """One lease from asking to its end. Its host calls `opened`, then `should_end` several times a second."""

    def __init__(self, payer: Payer, seconds: int, least_s: int, terms: LeaseTerms, demand: Callable[[], Demand]):
        self.payer, self.seconds, self.terms = payer, seconds, terms
        self.least_s = least_s  # fewer than this are not worth paying for
        self.began: float | None = None  # when it was granted; None: not yet
        self.until: float | None = None  # when it will end by itself
        self.payer_left = False
        self.fruitful = False  # whether anybody got anything out of it
        self.served_s = 0.0  # for the payer, the others sharing its steps
        self.others_s = 0.0  # for others alone
        self._demand = demand
        self._asked = time.monotonic()
        self._looked: float | None = None
        self._idle_since: float | None = None

    def opened(self, seconds: int, began: float) -> None:
        """Granted, for `seconds`, which are fewer than asked for where that is all that was left."""
        self.seconds, self.began, self.until = seconds, began, began + seconds - MARGIN_S

    def spent_s(self, now: float) -> float:
        """How long it has been used; of one that ended before it was opened, at most this long."""
        return min(now - (self.began or self._asked), self.seconds)

    @property
    def allowance_s(self) -> float:
        """How long it may work for others alone."""
        return max(self.terms.linger_s, self.terms.share * self.served_s)

    def should_end(self, now: float) -> bool:
        """Whether to end: nobody is here any more, or only others, whose turn it is to pay."""
        demand = self._demand()
        elapsed, self._looked = now - (self._looked or now), now
        if not demand.own and not demand.others:
            self._idle_since = self._idle_since or now
            return self.payer_left or now - self._idle_since >= self.terms.linger_s
        self._idle_since = None
        # With the payer's own done, also while others wait for a lease of their own, as races do.
        for_others = not demand.own or (demand.others_served and not demand.own_served)
        if for_others:
            self.others_s += elapsed
        else:
            self.served_s += elapsed
        if not demand.own and self.payer_left:
            return True
        return for_others and self.others_s >= self.allowance_s

    def snapshot(self, now: float) -> dict[str, Any]:
        """What the page shows of it; the payer's number is the engine's to add."""
        demand = self._demand()
        return {
            "state": "asked" if self.until is None else "open",
            "seconds": self.seconds,
            "left_s": None if self.until is None else max(self.until - now, 0.0),
            "asked_s": now - self._asked,
            "sharing": demand.own + demand.others,
        }


def seconds_needed(
    owed: int, to_read: int, lanes: int, step_ms: Iterable[float], terms: LeaseTerms, start_s: float = START_S
) -> int:
    """GPU seconds to ask for: a start, `owed` decode steps, `to_read` prefill steps, and lanes of races.

    Estimated from recent steps' milliseconds: less is granted sooner, and what does not fit goes on in the next lease.
    """
    measured = list(step_ms)
    step_s = median(measured) / 1000 if measured else STEP_S
    work_s = HEADROOM * (start_s + (1 + terms.share) * step_s * (owed + to_read)) + (1 + terms.share) * LANE_S * lanes
    needed = work_s + terms.linger_s + MARGIN_S
    return math.ceil(min(max(needed, terms.min_s), terms.max_s))
