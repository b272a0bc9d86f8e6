"""What a lease costs: milliseconds a step against the child process, and how soon a visitor has a first token.

    python tests/bench/leases.py

On the device API's stand-in of the tests, without a GPU, over a tiny model: what is measured is the way of the events,
not the model. Both hosts take turns.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "zerogpu")]

from concurrent.futures import ThreadPoolExecutor

from device_api import DeviceApi, device_api
from running_app import RunningApp, eventually, generate_data, running_app, save_talkative_model, stream
from visitors import on_zerogpu, released

VISITORS, TOKENS = 16, 400


def ask(app: RunningApp, tokens: int, seed: int) -> dict[str, Any]:
    """A finished answer with its timings."""
    data = generate_data(f"visitor {seed}", max_new_tokens=tokens, seed=seed)
    return list(stream(app, "details", *data))[-1]


def step_ms(app: RunningApp) -> float:
    """Median wall time from one step of the full batch to the next, with everybody's events on their way."""
    with ThreadPoolExecutor(VISITORS) as pool:
        jobs = [pool.submit(ask, app, TOKENS, seed) for seed in range(VISITORS)]
        eventually(lambda: app.queue()["running"] == VISITORS)
        gaps: list[float] = []
        while not any(job.done() for job in jobs):
            steps = [step for step in app.stats()["steps"] if step["batch_size"] == VISITORS]
            gaps += [1000 * (b["time"] - a["time"]) for a, b in zip(steps, steps[1:], strict=False)]
        for job in jobs:
            job.result()
    return median(gaps)


def first_token_s(app: RunningApp, api: DeviceApi) -> dict[str, float]:
    """Seconds to the first token of one who joins a lease, opens one, or opens one in a fresh process."""

    def measured(**how: Any) -> float:
        vars(api).update(how)
        return median(opened() for _ in range(3))

    def opened() -> float:
        released(api, timeout=30)
        return ask(app, 4, 0)["timings"]["first_token_s"]

    released(api, timeout=30)  # the rounds' last lease may still linger, and would be joined
    with ThreadPoolExecutor(1) as pool:
        asked = len(api.asked)
        long = pool.submit(ask, app, 1500, 1)
        eventually(lambda: app.queue()["running"])
        joined = median(ask(app, 4, seed)["timings"]["first_token_s"] for seed in range(3))
        assert not long.done() and len(api.asked) == asked + 1
        long.result()
    return {
        "joining a running lease": joined,
        "opening one, process reused": measured(reuse=True),
        "opening one, fresh process": measured(reuse=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, device_api() as api:
        model = save_talkative_model(Path(folder))
        settings = {"KVSCOPE_PROBE_SHARE": 0}
        with running_app(model, **settings) as process, on_zerogpu(model, api, **settings) as leased:
            pairs = [(step_ms(process), step_ms(leased)) for _ in range(rounds)]
            firsts = first_token_s(leased, api)
    for name, values in zip(("child process", "lease"), zip(*pairs, strict=True), strict=True):
        print(f"{name}: {median(values):.2f} ms a step of {VISITORS} rows ({', '.join(f'{v:.2f}' for v in values)})")
    print(f"difference: {median(lease - process for process, lease in pairs):+.2f} ms a step")
    for name, seconds in firsts.items():
        print(f"first token, {name}: {1000 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
