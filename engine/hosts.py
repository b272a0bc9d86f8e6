"""Where the worker's loop runs: a child process for servers, a thread for notebooks and tests, or in leases."""

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import NoLease
from engine.lease import Lease, LeaseTerms
from engine.wire import LeaseRefused, Parked, Ready, Shutdown


class Worker:
    """A running worker as the front sees it: messages in, messages out, and an end.

    Sending never blocks the caller: a worker that computes reads late, and the web server must not wait. The
    connection may be long in coming; what is sent meanwhile waits for it. Or it never comes: it is refused
    (`NoLease`), the worker dies on its way (`EOFError`), or nobody needs it any more (cancelled).
    `end(timeout)` has to end the worker, and to return when it has ended or after so many seconds: whether it has.
    `said` counts its messages.
    """

    def __init__(self, connection: "Future[Connection]", end: Callable[[float], bool], pid: int | None = None):
        self.pid = pid
        self.said = 0
        self._connection = connection
        self._end = end
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="kvscope-outbox", daemon=True).start()

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def messages(self) -> Iterator[object]:
        """Everything the worker says, until it is gone."""
        try:
            connection = self._connection.result()
        except NoLease as refusal:
            yield LeaseRefused(str(refusal))
            return
        except CancelledError:
            yield Parked()
            return
        except EOFError:
            return
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                return
            self.said += 1
            yield message

    def stop(self, timeout: float) -> bool:
        """End the worker and wait until it has ended, at most about `timeout` seconds; whether it has."""
        self.send(Shutdown())
        return self._end(timeout)

    def _send_all(self) -> None:
        message = None
        while not isinstance(message, Shutdown):
            message = self._outbox.get()
            try:
                self._connection.result().send(message)
            except (NoLease, CancelledError, EOFError, OSError):
                return


class LeaseHost(Protocol):
    """A host that has a worker for a limited time only, which one of the visitors pays for."""

    ready: Ready
    terms: LeaseTerms

    def visitor(self) -> Hashable:
        """Who is asking, in whose call this is; equal for everything that one visitor asks for."""

    def start(self, lease: Lease) -> Worker:
        """Ask for a worker in the payer's context, without waiting for it. It parks when `lease` says so."""


def connected(connection: Connection) -> "Future[Connection]":
    future: Future[Connection] = Future()
    future.set_result(connection)
    return future


def start_process(config: EngineConfig) -> Worker:
    """A child process that inherits one end of a socket pair.

    `python -m` rather than multiprocessing's spawn: a caller's script then needs no main guard.
    """
    ours, theirs = socket.socketpair()
    package_parent = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": search_path},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    def end(_timeout: float) -> bool:
        process.kill()
        process.wait()
        return True

    worker = Worker(connected(Connection(ours.detach())), end, process.pid)
    worker.send(config)
    return worker


def start_thread(config: EngineConfig) -> Worker:
    """A thread of this process."""
    from engine.worker import serve  # imports torch, which a front with a child process does without

    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, config), name="kvscope-worker", daemon=True)
    thread.start()

    def end(timeout: float) -> bool:
        thread.join(timeout)
        return not thread.is_alive()

    return Worker(connected(ours), end)


HOSTS = {"process": start_process, "thread": start_thread}
