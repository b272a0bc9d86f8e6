"""The app on a ZeroGPU Space, as far as a machine without one can show it."""

from collections.abc import Iterator
from functools import cache

import pytest
from device_api import DeviceApi, device_api
from running_app import RunningApp, generate_data, running_app, save_talkative_model, stream
from visitors import PROMPT, at_rest, on_zerogpu


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    """Some milliseconds a step: long enough to come and go in the middle of an answer."""
    return save_talkative_model(tmp_path_factory.mktemp("leased"), layers=16)


@pytest.fixture(scope="package")
def served(slow_model) -> Iterator[tuple[RunningApp, DeviceApi]]:
    """One app for many tests."""
    with device_api() as api, on_zerogpu(slow_model, api, KVSCOPE_PROBE_SHARE=0, KVSCOPE_LEASE_LINGER_S=0.3) as app:
        yield app, api


@pytest.fixture(scope="package")
def hasty(slow_model) -> Iterator[tuple[RunningApp, DeviceApi]]:
    """Another, whose leases run out as soon as leases may."""
    shortest = {"KVSCOPE_LEASE_MIN_S": 5, "KVSCOPE_LEASE_MAX_S": 5, "KVSCOPE_PROBE_SHARE": 0}
    with device_api() as api, on_zerogpu(slow_model, api, **shortest) as app:
        yield app, api


@pytest.fixture
def app(served) -> RunningApp:
    return served[0]


@pytest.fixture
def api(served) -> Iterator[DeviceApi]:
    """The device API of the one app, at rest before and after."""
    with at_rest(served[1]) as api:
        yield api


@pytest.fixture(scope="session")
def alone(slow_model):
    """What the model says to a seed in one long run on an ordinary host, by number of tokens."""
    with running_app(slow_model, KVSCOPE_PROBE_SHARE=0) as app:

        @cache
        def text(tokens: int, seed: int = 1) -> str:
            data = generate_data(PROMPT, max_new_tokens=tokens, seed=seed, temperature=0.9, top_k=40, top_p=0.95)
            return list(stream(app, "generate", *data))[-1]

        yield text
