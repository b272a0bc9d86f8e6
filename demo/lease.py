"""What a visitor is told of the GPU lease; nothing where nothing is leased."""

from typing import Any

from demo.quota import Quotas, counted
from engine import Engine, Generation
from engine.config import read_settings
from engine.lease import LeaseTerms, seconds_needed

YOURS, ANOTHERS = "at your expense", "at another visitor's expense"


def price(engine: Engine, quotas: Quotas, *, owed: int = 0, to_read: int = 0, lanes: int = 0) -> str:
    """What pressing a button will cost, said before it is pressed; the work as in `seconds_needed`."""
    if engine.snapshot()["lease"] is None:
        return ""
    seconds = seconds_needed(owed, to_read, lanes, (), read_settings(LeaseTerms))
    return f"Runs on your GPU quota: about {counted(seconds, quotas.factor)}, less if the GPU is quick."


def waiting_for_gpu(engine: Engine, client: int | None) -> str | None:
    """What somebody waits for who has no GPU yet; None where there is one, or none is needed."""
    lease = engine.snapshot()["lease"]
    if lease is None or lease["state"] == "open":
        return None
    if lease["state"] == "none":
        return "waiting for a GPU"
    whose = YOURS if client is not None and lease["payer"] == client else ANOTHERS
    return f"waiting for a GPU · {lease['asked_s']:.0f} s · {whose}"


def race_in_line(engine: Engine, client: int | None) -> str | None:
    """What a race waits for, which runs in leases of its own visitor only."""
    lease = engine.snapshot()["lease"]
    if lease and lease["payer"] not in (None, client):
        return "In line: the race starts in a GPU lease of your own, after this one."
    return waiting_for_gpu(engine, client)


def handover_notice(generation: Generation, engine: Engine) -> str | None:
    """Said while an answer that has begun is between two leases."""
    if not generation.events or generation.state != "waiting" or engine.snapshot()["lease"] is None:
        return None
    return "Your answer goes on in the next GPU lease, from where it is."


def live_lease(snapshot: dict[str, Any], quotas: Quotas) -> dict[str, Any] | None:
    """What the page shows of the lease: the engine's facts, and how its seconds count."""
    lease = snapshot["lease"]
    if lease is None:
        return None
    asked = counted(lease["seconds"], quotas.factor) if "seconds" in lease else ""
    return {**lease, "asked": asked}
