"""The app as its visitors meet it: `app.py` in a process of its own, on a free port of this machine.

Nothing here outlives its `with` block: the process is asked to end, then made to, and its worker ends with it.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from tiny import save_tiny_model
from transformers import AutoConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
READY_S = 60
END_S = 15
NEVER = 1_000_000  # an id that no token has
PLAIN = {"verify": False}  # to load the certificates that nobody needs here takes longer than most calls


def eventually(condition: Callable[[], Any], timeout: float = 30, every: float = 0.05) -> Any:
    """Wait until `condition()` is true; what it returned."""
    deadline = time.monotonic() + timeout
    tick = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {timeout} s"
        tick.wait(every)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_talkative_model(folder: Path, layers: int = 3) -> Path:
    """The tiny model without an end-of-sequence: it speaks up to its limit, slower with more `layers`."""
    save_tiny_model(folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = layers
    config.eos_token_id = NEVER
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def environment(model: Path | None, **settings: Any) -> dict[str, str]:
    """This process's environment without settings of whoever runs the tests, with those of a test."""
    foreign = ("KVSCOPE_", "GRADIO_", "SPACES_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    if cache := os.environ.get("KVSCOPE_CACHE"):
        kept["KVSCOPE_CACHE"] = cache
    if model:
        kept["KVSCOPE_MODEL"] = str(model)
    fixed = {
        "KVSCOPE_DEVICE": "cpu",
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
    }
    return {**kept, **fixed, **{name: str(value) for name, value in settings.items()}}


class RunningApp:
    """One run of the app. `url` ends with a slash; `log` is what it has written so far of what went wrong."""

    def __init__(self, command: Sequence[str], env: dict[str, str], port: int):
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"
        # Read for as long as this object lives.
        self._log, self._out = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, "GRADIO_SERVER_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._log,
        )

    @property
    def log(self) -> str:
        # Read with an offset of its own: the process writes through the same open file.
        return os.pread(self._log.fileno(), 1_000_000, 0).decode(errors="replace")

    @property
    def requests_log(self) -> list[dict[str, Any]]:
        """Its lines about requests that have ended; beside them it writes only what Gradio says when it starts."""
        written = os.pread(self._out.fileno(), 10_000_000, 0).decode()
        return [json.loads(line) for line in written.splitlines() if line.startswith("{")]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path.lstrip("/"), timeout=20, **PLAIN, **options)

    def health(self) -> int | None:
        """The status of `/healthz`, None while nobody listens."""
        try:
            return self.get("healthz").status_code
        except httpx.TransportError:
            return None

    def wait_ready(self, timeout: float = READY_S) -> "RunningApp":
        eventually(lambda: self.process.poll() is not None or self.health() == 200, timeout)
        assert self.process.poll() is None, f"the app ended with {self.process.returncode}:\n{self.log}"
        return self

    def stats(self) -> dict[str, Any]:
        """The engine's snapshot as of now: the app makes one four times a second, so it may take that long."""
        asked = time.time()

        def fresh() -> dict[str, Any] | None:
            (snapshot,) = stream(self, "stats")
            return snapshot if snapshot["time"] >= asked else None

        return eventually(fresh)

    def queue(self) -> dict[str, int]:
        return self.stats()["queue"]

    def worker(self) -> psutil.Process:
        """The process that runs the model."""
        children = psutil.Process(self.process.pid).children()
        (worker,) = [child for child in children if "engine.worker" in child.cmdline()]
        return worker

    def wait_idle(self, timeout: float = 15) -> dict[str, Any]:
        """Wait until nobody runs or waits; the snapshot then."""

        def idle() -> dict[str, Any] | None:
            stats = self.stats()
            busy = stats["queue"]["running"] or stats["queue"]["waiting"] or stats["races"]["running"]
            return None if busy else stats

        return eventually(idle, timeout)

    def end(self) -> int:
        """Ask it to end as a host does; its exit status. It is killed if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the app did not end within {END_S} s of SIGTERM:\n{self.log}") from None


@contextmanager
def running_app(
    model: Path | None,
    *,
    port: int | None = None,
    command: Sequence[str] = (sys.executable, "app.py"),
    ready: bool = True,
    **settings: Any,
) -> Iterator[RunningApp]:
    """The app over `model`, ready unless told otherwise. `settings` are environment variables, by their full names.

    What the app wrote is repeated on this process's stderr, which pytest shows where a test fails.
    """
    app = RunningApp(command, environment(model, **{"KVSCOPE_THREADS": 1, **settings}), port or free_port())
    try:
        yield app.wait_ready() if ready else app
    finally:
        try:
            app.end()
        finally:
            print(app.log, file=sys.stderr)


# ---- the API over plain HTTP: POST a call, then read its event stream

DEFAULTS = {
    "max_new_tokens": 128,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "seed": None,
    "do_sample": None,
    "typical_p": 1.0,
    "frequency_penalty": 0.0,
    "stop": None,
    "ignore_eos": False,
    "truncate": None,
    "top_n_tokens": 0,
    "prompt_logprobs": False,
    "watermark": False,
    "grammar": None,
}


class ApiError(Exception):
    """What a call was refused with."""


def generate_data(prompt: Any, **overrides: Any) -> list[Any]:
    """The inputs of `/generate` and `/details`, all of them, in their order."""
    return [prompt, *{**DEFAULTS, **overrides}.values()]


def stream(
    app: RunningApp, endpoint: str, *data: Any, timeout: float = 60, headers: dict[str, str] | None = None
) -> Iterator[Any]:
    """The values that `endpoint` streams; `ApiError` if it ends in one. Closing the iterator disconnects."""
    with httpx.Client(base_url=app.url, timeout=timeout, headers=headers, **PLAIN) as client:
        # Not httpx's own encoder: lone surrogates, NaN and infinities have to get through to the app.
        body = json.dumps({"data": data})
        call = f"gradio_api/call/{endpoint}"
        response = client.post(call, content=body, headers={"content-type": "application/json"})
        event_id = response.raise_for_status().json()["event_id"]
        with client.stream("GET", f"{call}/{event_id}") as events:
            parse = EventParser()
            for line in events.iter_lines():
                if (value := parse(line)) is not None:
                    yield value


class EventParser:
    """Takes an event stream line by line; gives the value that a line carries, else None."""

    def __init__(self) -> None:
        self.event = ""

    def __call__(self, line: str) -> Any:
        if line.startswith("event: "):
            self.event = line.removeprefix("event: ")
        elif line.startswith("data: ") and self.event in ("generating", "complete", "error"):
            data = json.loads(line.removeprefix("data: "))
            if self.event == "error":
                raise ApiError(data["error"] if isinstance(data, dict) else data)
            return data[0] if data else None
        return None
