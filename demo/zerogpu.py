"""ZeroGPU: one GPU lease, which one visitor's request opens, serves everybody who waits.

There a GPU exists only inside a function decorated with `spaces.GPU`: it runs in a forked process, for a declared
time at most, at the cost of whoever's request called it. Here that function is the worker's loop. It is called in
the payer's context, finds its way back to the front by a local socket, and yields only to be noticed.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import gradio as gr
import spaces
import torch
from gradio.context import LocalContext
from spaces.zero.config import get_config

from demo.quota import Quotas, identity
from demo.spaces_api import DIED, Asker, adapt, asker, less, quota_exceeded, sentence
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import LoadingError, NoLease
from engine.facts import ready_without_computing
from engine.hosts import Worker
from engine.lease import MARGIN_S, Lease, LeaseTerms
from engine.loading import load_model, resolve
from engine.wire import LoadingFailed, Parked, Shutdown
from engine.worker import make_core, run

BEAT_S = 0.1  # `spaces` notices only at a yield that a lease is to stop


class ZeroGPU:
    """The host of leased workers. Make it on the main thread before the page is launched, once in a process.

    The model is loaded at once, onto the emulated device of `spaces`, which packs the weights when the page is
    launched and maps them into each forked process. Nothing computes with it here; `LoadingError` as in `resolve`.
    """

    def __init__(self, config: EngineConfig, terms: LeaseTerms):
        self._threads = config.threads or torch.get_num_threads()
        # Threads of OpenMP do not survive a fork, and the child would wait for them for ever.
        torch.set_num_threads(1)
        self.terms, self.quotas = terms, Quotas(get_config()["duration_factor"])
        self._config = config
        self._files = resolve(config)
        self._model = load_model(self._files, config)
        self.ready = ready_without_computing(self._files, self._model, config)
        adapt()
        self._lease = spaces.GPU(self._serve, duration=_asked_for)
        # Of a forked process only, which keeps what it has made while it is used again.
        self._core: EngineCore | None = None
        self._forked: float | None = None
        self._parent = os.getpid()
        os.register_at_fork(after_in_child=self._after_fork)

    def visitor(self) -> Hashable:
        """The page or program whose event is being handled."""
        request = LocalContext.request.get(None)
        return getattr(request, "session_hash", None) or object()

    def start(self, lease: Lease) -> Worker:
        """Ask for the GPU in the payer's name, in a thread: it may take a minute of queueing."""
        connection: Future[Connection] = Future()
        context = lease.payer.context.copy()
        holder = threading.Thread(
            target=lambda: context.run(self._hold, lease, worker, connection), name="kvscope-lease", daemon=True
        )

        def end(timeout: float) -> bool:
            holder.join(timeout)
            if holder.is_alive() and worker.pid:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            return True

        worker = Worker(connection, end)
        holder.start()
        return worker

    # ---- in the front's process

    def _hold(self, lease: Lease, worker: Worker, connection: "Future[Connection]") -> None:
        """From asking to release. What went wrong before there was a worker is told in its connection's place."""
        payer, failure = Asker(lease), None
        asker.set(payer)
        try:
            try:
                self._hold_for(lease.seconds, lease, worker, connection)
            except gr.Error as refusal:
                if not (seconds := self._affordable(refusal, lease)):
                    raise
                self._hold_for(seconds, lease, worker, connection)
        except Exception as error:
            failure = error
        if connection.done():
            return
        if payer.left:
            connection.cancel()
        elif failure is None or getattr(failure, "title", "") == DIED:
            connection.set_exception(EOFError("the worker died on its way"))
        else:
            connection.set_exception(NoLease(self._explained(failure)))

    def _affordable(self, refusal: gr.Error, lease: Lease) -> int | None:
        """For how many seconds to ask instead; None if fewer would not help."""
        if quota_exceeded(refusal):
            self.quotas.note_little_left(lease.payer.key)
        seconds = less(refusal, lease.least_s, self.quotas.factor)
        return seconds if lease.least_s <= seconds < lease.seconds else None

    def _hold_for(self, seconds: int, lease: Lease, worker: Worker, connection: "Future[Connection]") -> None:
        probes = not self.quotas.little_left(lease.payer.key)
        with Listener(family="AF_UNIX") as door:
            for began, pid in self._lease(door.address, seconds, probes):
                if not connection.done():
                    worker.pid = pid
                    lease.opened(seconds, began)
                    connection.set_result(door.accept())
                if lease.should_end(time.monotonic()):
                    worker.send(Shutdown())

    def _explained(self, error: Exception) -> str:
        if not isinstance(error, gr.Error):
            traceback.print_exception(error, file=sys.stderr)
            return f"The GPU could not be asked for ({type(error).__name__}). Please try again in a minute."
        request: Any = LocalContext.request.get(None)
        said = sentence(error)
        whose = identity(getattr(request, "headers", {}))
        return f"{said.rstrip('. ')}. {whose}" if whose else said

    # ---- in the forked process

    def _after_fork(self) -> None:
        self._forked = time.monotonic()
        # Ctrl-C reaches the whole process group; the front decides what ends when.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _serve(self, address: str, seconds: int, probes: bool) -> Iterator[tuple[float, int]]:
        """The lease: yields when it began, and its process, until its work is done. Raises nothing."""
        began = time.monotonic()
        if self._forked is not None:  # its time runs since then, but this only now
            began, self._forked = self._forked, None
            threading.Thread(target=self._end_with_parent, name="kvscope-parent", daemon=True).start()
        until = began + seconds - MARGIN_S
        # In a thread, so that the beats go on however long a step takes.
        work = threading.Thread(target=self._work, args=(Client(address), until, probes), name="kvscope-worker")
        work.start()
        while work.is_alive():
            yield began, os.getpid()
            work.join(BEAT_S)

    def _work(self, connection: Connection, until: float, probes: bool) -> None:
        try:
            core = self._core or self._make_core(connection)
            core.measuring.probe_share = self._config.probe_share if probes else 0.0
            try:
                run(core, connection, until)
            finally:
                core.park()
            connection.send(Parked())
        except LoadingError as error:
            connection.send(LoadingFailed(str(error)))
        except (EOFError, ConnectionError):
            pass  # the front is gone
        except Exception:
            # What has failed once may be broken for good, as a GPU's state is: the next lease gets a new process.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        finally:
            connection.close()

    def _make_core(self, connection: Connection) -> EngineCore:
        torch.set_num_threads(self._threads)
        self._core, ready = make_core(self._files, self._model, self._config)
        connection.send(ready)
        return self._core

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(1)
        os._exit(0)


def _asked_for(address: str, seconds: int, probes: bool) -> int:
    return seconds
