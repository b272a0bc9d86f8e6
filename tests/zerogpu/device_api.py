"""A stand-in for the API through which `spaces` asks for a GPU: what is granted, to whom, for how long.

Written from what the `spaces` package sends and understands. It has one GPU, keeps a worker for the next lease
unless told otherwise, kills one that outlasts its duration, and writes down all that is asked of it.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

TOO_LONG = -429  # answered as 429, too, with a wait that tells it apart


@dataclass
class Grant:
    """One lease, from `/schedule` to `/release`."""

    token: str | None
    seconds: int
    allow_token: str
    began: float
    pid: int | None = None
    ended: float | None = None
    failed: bool | None = None
    killed: bool = False


@dataclass
class DeviceApi:
    """`refusals` are answered, by token, before anything is granted: a status, and for 429 what is left."""

    url: str = ""
    grants: list[Grant] = field(default_factory=list)
    asked: list[tuple[str | None, int]] = field(default_factory=list)  # each schedule: token, seconds
    refusals: dict[str | None, tuple[int, int]] = field(default_factory=dict)  # status, seconds left
    reuse: bool = True
    release_status: int = 200
    longest: int = 3600  # seconds that may be asked for
    doomed: int = 0  # so many of the next workers die as soon as they are there
    lifetimes: list[float] = field(default_factory=list)  # of the next leases, in seconds, before they are killed
    queue_for: threading.Event | None = None  # grants come through a queue, until this is set
    gate: threading.Event = field(default_factory=threading.Event)  # nothing is answered before this is set
    starts: int = 0
    most_at_once: int = 0
    pings: int = 0
    queueing: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def reset(self) -> None:
        """Forget what was; the workers that live are remembered."""
        with self._lock:
            self.asked.clear()
            self.refusals.clear()
            self.release_status, self.longest, self.doomed = 200, 3600, 0
            self.lifetimes.clear()
            self.reuse, self.queue_for, self.most_at_once, self.pings = True, None, 0, 0
            self.gate.set()
            self.grants = [grant for grant in self.grants if grant.pid and _alive(grant.pid)][-1:]

    @property
    def open(self) -> list[Grant]:
        return [grant for grant in self.grants if grant.ended is None]

    def kill(self, grant: Grant) -> None:
        """What happens to a worker whose time is up, or whose GPU another Space needs."""
        with self._lock:
            if grant.pid and grant.ended is None:
                grant.killed = _alive(grant.pid)
                with suppress(ProcessLookupError):
                    os.kill(grant.pid, signal.SIGKILL)

    def schedule(self, token: str | None, seconds: int) -> Grant | tuple[int, int]:
        with self._lock:
            self.asked.append((token, seconds))
            if seconds > self.longest:
                return TOO_LONG, 0
            status, left = self.refusals.get(token, (200, 0))
            if status != 200 and not (status == 429 and seconds <= left):
                return status, left
            grant = Grant(token, seconds, f"allow-{len(self.grants)}-{time.monotonic_ns()}", time.monotonic())
            grant.pid = self._idle_worker() if self.reuse else None
            self.grants.append(grant)
            self.most_at_once = max(self.most_at_once, len(self.open))
        timer = threading.Timer(self.lifetimes.pop(0) if self.lifetimes else seconds, self.kill, [grant])
        timer.daemon = True
        timer.start()
        return grant

    def _idle_worker(self) -> int | None:
        for grant in reversed(self.grants):
            if grant.pid and grant.ended and not grant.failed and _alive(grant.pid):
                return grant.pid
        return None

    def allow(self, allow_token: str, pid: int) -> None:
        self._grant(allow_token).pid = pid
        if self.doomed:
            self.doomed -= 1
            self.kill(self._grant(allow_token))

    def release(self, allow_token: str, failed: bool) -> None:
        grant = self._grant(allow_token)
        grant.ended, grant.failed = time.monotonic(), failed

    def _grant(self, allow_token: str) -> Grant:
        return next(grant for grant in self.grants if grant.allow_token == allow_token)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def device_api() -> Iterator[DeviceApi]:
    """The API on a free port of this machine."""
    api = DeviceApi()
    api.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            split = urlsplit(self.path)
            query = dict(parse_qsl(split.query))
            match split.path:
                case "/startup-report":
                    api.starts += 1
                    self._answer(200)
                case "/schedule":
                    self._schedule(query.get("token"), int(query["durationSeconds"]))
                case "/allow":
                    api.allow(query["allowToken"], int(query["pid"]))
                    self._answer(200)
                case "/release":
                    api.release(query["allowToken"], query["fail"] == "true")
                    self._answer(api.release_status)
                case _:
                    self._answer(404)

        def _schedule(self, token: str | None, seconds: int) -> None:
            if api.queue_for is not None:
                self._queue(token, seconds, api.queue_for)
                return
            api.gate.wait(30)
            granted = api.schedule(token, seconds)
            if isinstance(granted, tuple):
                status, left = granted
                quota = {"left": left, "wait": -1 if status == TOO_LONG else 3600}
                self._answer(abs(status), quota if abs(status) == 429 else None)
            else:
                self._answer(200, self._grant(granted))

        def _queue(self, token: str | None, seconds: int, free: threading.Event) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            api.queueing += 1
            try:
                while not free.wait(0.2):
                    api.pings += 1
                    self.wfile.write(b"event: ping\n\n")
                    self.wfile.flush()
                granted = api.schedule(token, seconds)
                if isinstance(granted, tuple):
                    self.wfile.write(b"event: failed\n\n")
                else:
                    data = json.dumps(self._grant(granted))
                    self.wfile.write(f"event: succeeded\ndata: {data}\n\n".encode())
            except OSError:
                pass  # whoever queued has left
            finally:
                api.queueing -= 1

        def _grant(self, grant: Grant) -> dict[str, object]:
            return {
                "idle": grant.pid is not None,
                "nvidiaIndex": 0,
                "nvidiaUUID": "GPU-stand-in",
                "allowToken": grant.allow_token,
            }

        def _answer(self, status: int, body: object = None) -> None:
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
