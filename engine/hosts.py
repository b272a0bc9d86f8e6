"""Where the worker's loop runs: a child process for servers, a thread for notebooks and tests."""

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from engine.config import EngineConfig
from engine.wire import Shutdown


class Worker:
    """A running worker as the front sees it: messages in, messages out, and an end.

    Sending never blocks the caller: a worker that computes reads late, and the web server must not wait.
    """

    def __init__(self, connection: Connection, end: Callable[[], None], pid: int | None = None):
        self.pid = pid
        self._connection = connection
        self._end = end
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="kvscope-outbox", daemon=True).start()

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def messages(self) -> Iterator[object]:
        """Everything the worker says, until it is gone."""
        while True:
            try:
                yield self._connection.recv()
            except (EOFError, OSError):
                return

    def stop(self) -> None:
        """End the worker and wait until it has ended."""
        self.send(Shutdown())
        self._end()

    def _send_all(self) -> None:
        message = None
        while not isinstance(message, Shutdown):
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                return


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
    connection = Connection(ours.detach())

    def end() -> None:
        process.kill()
        process.wait()

    worker = Worker(connection, end, process.pid)
    worker.send(config)
    return worker


def start_thread(config: EngineConfig) -> Worker:
    """A thread of this process."""
    from engine.worker import serve  # imports torch, which a front with a child process does without

    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, config), name="kvscope-worker", daemon=True)
    thread.start()
    return Worker(ours, thread.join)


HOSTS = {"process": start_process, "thread": start_thread}
