"""What every open page is shown about everybody: one JSON, built once a second for all of them."""

import json
import secrets
import time
from typing import Any

from demo import figures
from demo.lanes import WINDOW_S, assign_lanes
from demo.lease import live_lease
from demo.quota import Quotas
from demo.timeline import timeline
from demo.visitors import Visitors
from engine import Engine, clock

BUILD_EVERY_S = 0.9
SHOWN_OF_SLOTS = ("client", "tokens", "reused_tokens", "public_tokens")


class Live:
    """Turns the engine's snapshot into the shared message of the panels."""

    def __init__(self, engine: Engine, visitors: Visitors, quotas: Quotas):
        self._engine = engine
        self._quotas = quotas
        self._visitors = visitors
        self._lanes: dict[int, int] = {}
        self._server = secrets.token_hex(4)  # this run of it: a page of another one loads itself anew
        self._built = -BUILD_EVERY_S
        self._message = b""

    def message(self) -> bytes:
        """The JSON of this second; the work is done for the first who asks, the rest get the same bytes."""
        if time.monotonic() - self._built >= BUILD_EVERY_S:
            self._built = time.monotonic()
            self._message = json.dumps(self._build(self._engine.snapshot())).encode()
        return self._message

    def timeline(self, window_s: int, back_s: int) -> dict[str, Any]:
        """The batch as it was, for whoever scrolls back."""
        past, now = self._engine.timeline(window_s, back_s), clock.now()
        lanes = assign_lanes(past["requests"], {}, now - back_s, window_s)
        drawn = timeline(past["requests"], past["speeds"], lanes, now, window_s, back_s, past["steps"])
        return {"figure": drawn, "requests": past["requests"]}

    def _build(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        self._lanes = assign_lanes(snapshot["requests"], self._lanes, snapshot["time"])
        size = (snapshot["model"] or {}).get("bytes_per_token", 0)
        slots = [slot for slot in snapshot["cache"]["slots"] if slot["state"] in ("running", "prefilling")]
        kept = sum(slot["tokens"] for slot in snapshot["cache"]["slots"] if slot["state"] == "retained") * size
        queue, probes = snapshot["queue"], snapshot["probes"]
        speeds = [(entry["time"], entry["tokens_per_second"]) for entry in snapshot["history"]]
        return {
            "server": self._server,
            "model": snapshot["model"],
            "worker": snapshot["worker"],
            "lease": live_lease(snapshot, self._quotas),
            "loading": snapshot["loading"],
            "error": snapshot["error"],
            "running": queue["running"],
            "waiting": queue["waiting"],
            "most": queue["max_batch_size"],
            "full": queue["waiting"] + queue["running"] >= queue["max_waiting"] + queue["max_batch_size"],
            "tokens_per_second": snapshot["throughput"]["tokens_per_second"],
            "active": bool(queue["running"] or queue["waiting"] or snapshot["races"]["running"]),
            "brought": self._visitors.clients,
            "slots": [{name: slot[name] for name in SHOWN_OF_SLOTS} for slot in slots],
            "kept_bytes": kept,
            "reserved_bytes": snapshot["cache"]["allocated_bytes"],
            "reserved_tokens": snapshot["cache"]["allocated_tokens"],
            "figures": {
                "others": figures.speed_of_others(probes) if probes else None,
                "cache": figures.cache(snapshot),
                "batch": timeline(snapshot["requests"], speeds, self._lanes, snapshot["time"], WINDOW_S),
            },
            "requests": [entry for entry in snapshot["requests"] if entry["request"] in self._lanes],
            "padding_bytes": snapshot["cache"]["padding_tokens"] * size,
            "public_bytes": snapshot["cache"]["public_tokens"] * size,
            "reused_tokens": snapshot["totals"]["reused_tokens"],
            "public_tokens": snapshot["totals"]["public_tokens"],
            "measured": len(probes),
            "last_probe": probes[-1] if probes else None,
        }
