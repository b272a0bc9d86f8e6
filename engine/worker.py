"""The worker's loop: load the model, then turn messages into steps and steps into messages.

The same loop runs in a child process (`python -m engine.worker FD`), in a thread, or for the time of a lease. It
owns the device, the weights and the cache, and ends when the other end of the connection is gone.
"""

import math
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import LoadingError
from engine.facts import model_facts
from engine.grammar import Grammars
from engine.loading import load_model, make_runner, resolve
from engine.memory import fitting_tokens
from engine.model_folder import ModelFiles
from engine.packing import pack_linears
from engine.runner import ModelRunner
from engine.tokenizer import eos_token_ids
from engine.wire import Began, Cancel, Loading, LoadingFailed, Publish, Ready, Shutdown, StartRace, Submit


def serve(connection: Connection, config: EngineConfig) -> None:
    """Load, announce `Ready`, then serve until the front is gone or says `Shutdown`."""
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        core, ready = load(connection, config)
        connection.send(ready)
        run(core, connection)
    except LoadingError as error:
        connection.send(LoadingFailed(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        connection.close()


def load(connection: Connection, config: EngineConfig) -> tuple[EngineCore, Ready]:
    """Find and load the model, warm it up; its progress goes to the front and, as a bar, to the terminal."""
    with _Progress(connection) as progress:
        files = resolve(config, progress)
        progress("loading the weights", 0, 0)
        model = load_model(files, config)
    return make_core(files, model, config)


def make_core(files: ModelFiles, model: PreTrainedModel, config: EngineConfig) -> tuple[EngineCore, Ready]:
    """Warm the model up and put an engine around it; `LoadingError` if it cannot be served."""
    parameters = model.num_parameters()
    runner = make_runner(files, model)
    # After the rehearsal: rounding to 8 bits would hide from it the small mistakes that it looks for.
    if pack_linears(model, config.quantize):
        runner = ModelRunner(model)
        runner.rehearse()  # what the new layers compile and set up, nobody shall wait for
    trusted = config.trust_remote_code
    end_ids = eos_token_ids(files.folder, trusted)
    grammars = Grammars(files.folder, runner.vocabulary, end_ids, trust_remote_code=trusted)
    config = config.model_copy(update={"cache_tokens": fitting_tokens(config.cache_tokens, runner.layer_shapes)})
    core = EngineCore(runner, config, end_ids, grammars)
    facts = model_facts(files, model, runner.layer_shapes, config, parameters)
    return core, Ready(str(files.folder), facts, end_ids)


def run(core: EngineCore, connection: Connection, until: float = math.inf) -> None:
    """Step while there is work, sleep on the connection while there is none; end by itself at `until`, monotonic."""
    while (left := until - time.monotonic()) > 0:
        while connection.poll(0 if core.has_work else None if left == math.inf else left):
            message = connection.recv()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Publish):
                core.public.declare(message.prompts)
                continue  # nothing has changed that a step would have to report
            _handle(core, message)
            if not core.has_work:
                break
        connection.send(core.step(lambda request_ids: connection.send(Began(request_ids))))


def _handle(core: EngineCore, message: object) -> None:
    match message:
        case Submit(sequence):
            core.submit(sequence)
        case Cancel(request_id):
            core.cancel(request_id)
        case StartRace():
            core.start_race(message)


class _Progress:
    """Sends each stage's bytes to the front, and tells the terminal: a bar where the end is known, else a line."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.stage = ""
        self.bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.connection.send(Loading(stage, done, total))
        if stage != self.stage and not total:
            print(f"{stage} ...", file=sys.stderr, flush=True)
        if self.bar is None or self.bar.total != total or stage != self.stage:
            self._close_bar()
            self.bar = tqdm(desc=stage, total=total, unit="B", unit_scale=True, file=sys.stderr) if total else None
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        self.stage = stage

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        self._close_bar()

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()


def main() -> None:
    """Entry of the child process: the connection's descriptor is inherited, the settings come first through it."""
    # Ctrl-C reaches the whole process group, SIGTERM maybe, too; the front decides what ends when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    serve(connection, connection.recv())
    sys.stdout.flush()
    # A worker that is told to end must not wait for libraries' threads.
    os._exit(0)


if __name__ == "__main__":
    main()
