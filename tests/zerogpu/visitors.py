"""Visitors of the app on ZeroGPU: real Gradio clients, each with a token of its own."""

import base64
import json
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device_api import DeviceApi, Grant
from gradio_client import Client
from gradio_client.client import Job
from running_app import ROOT, RunningApp, eventually, running_app

PROMPT = "The lighthouse stood"
ON_ZEROGPU = (sys.executable, str(ROOT / "tests" / "on_zerogpu.py"))


def token(name: str, **payload: Any) -> str:
    """A token as the hub's proxy gives one to a visitor; nobody here checks its signature."""
    parts = [{"alg": "none"}, {"user": name, **payload}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, "unsigned"])


class Visitor:
    """One open page, as far as the API goes; without a name, one that nobody knows."""

    def __init__(self, app: RunningApp, name: str | None = None, **payload: Any):
        self.token = token(name, **payload) if name else None
        headers = {"X-IP-Token": self.token} if self.token else {}
        self.client = Client(app.url, headers=headers, verbose=False, ssl_verify=False)

    def ask(self, tokens: int, seed: int = 1, prompt: str = PROMPT) -> Job:
        """Ask for a sampled continuation, without waiting."""
        return self.client.submit(
            prompt, max_new_tokens=tokens, seed=seed, temperature=0.9, top_k=40, api_name="/generate"
        )


def speaks(job: Job) -> bool:
    """Whether there is any text of its answer yet."""
    return any(job.outputs())


def last(job: Job, timeout: float = 60) -> str:
    """The whole text at its end."""
    return job.result(timeout=timeout)


def refusal(job: Job, timeout: float = 60) -> str:
    error = job.exception(timeout=timeout)
    assert error is not None and not isinstance(error, CancelledError | TimeoutError), error
    return str(error)


def leave(job: Job) -> None:
    """Close the page in the middle of an answer."""
    job.cancel()


@contextmanager
def on_zerogpu(model: Path, api: DeviceApi, **settings: Any) -> Iterator[RunningApp]:
    """The app as on a ZeroGPU Space, with `api` behind it."""
    given = {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": api.url, "GRADIO_SERVER_NAME": "127.0.0.1"}
    with running_app(model, command=ON_ZEROGPU, **given, **settings) as app:
        yield app


def open_lease(api: DeviceApi) -> Grant:
    """The lease that runs now, once there is one with a process."""
    return eventually(lambda: next((grant for grant in api.open if grant.pid), None))


def released(api: DeviceApi, timeout: float = 8) -> None:
    """Wait until nothing is leased any more."""
    eventually(lambda: not api.open, timeout)


def lease(app: RunningApp) -> dict[str, Any]:
    return app.stats()["lease"]


@contextmanager
def at_rest(api: DeviceApi) -> Iterator[DeviceApi]:
    """Afterwards, every lease was released, and there were never two at once."""
    api.reset()
    yield api
    api.gate.set()
    if api.queue_for:
        api.queue_for.set()
    released(api, timeout=30)
    assert api.most_at_once <= 1
    assert all(grant.failed == grant.killed for grant in api.grants)
