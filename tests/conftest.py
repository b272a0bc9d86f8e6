"""What several test files need."""

import os
import signal
from collections.abc import Iterator

import pytest
from running_app import RunningApp, running_app
from tiny import save_tiny_model

from engine import Engine, EngineConfig, embedded

# Settings of whoever runs the tests must not change them; the cache folder may be theirs.
for name in [name for name in os.environ if name.startswith("KVSCOPE_") and name != "KVSCOPE_CACHE"]:
    del os.environ[name]


# A shell's background job ignores SIGINT, and whatever it starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models gain nothing from threads, which only spin beside whatever else the machine does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def embedded_folder():
    """The converted default model in the ordinary cache folder; fetched once a machine."""
    return embedded.ensure(EngineConfig().cache_folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ending(tiny_folder) -> Iterator[RunningApp]:
    """The app over a model that can end its answer; one address may have two requests there at once."""
    with running_app(tiny_folder, KVSCOPE_MAX_CONTEXT=4096, KVSCOPE_MAX_PER_ADDRESS=2) as app:
        yield app


@pytest.fixture
def tiny_engine(tiny_folder):
    """Makes engines over the tiny model, in a thread unless told otherwise, and closes them."""
    engines = []

    def make(host: str = "thread", **settings) -> Engine:
        config = EngineConfig(model=str(tiny_folder), device="cpu", threads=1, **settings)
        engines.append(Engine.from_pretrained(config=config, device="cpu", host=host))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
