"""What watching costs: open pages beside a full batch, and a page on which nothing happens.

    python tests/bench/pages.py [--rounds 3] [--pages 16]

The real app with the embedded model. A watching page is its one request a second for the panels (that is all
it sends while its visitor only looks); browsers themselves would run on other machines. Rounds with and
without pages take turns; the ratio is the median over the rounds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import httpx
import psutil
from running_app import RunningApp, generate_data, running_app, stream

STREAMS = 16
ROUND_TOKENS = 64
IDLE_S = 20


def decode_round(app: RunningApp, pages: int) -> tuple[float, float]:
    """Tokens a second of sixteen streams while that many pages watch, and the cores that the web server uses."""
    stop = threading.Event()
    watchers = threading.Thread(target=lambda: asyncio.run(watch(app, pages, 1.0, stop)))
    watchers.start()
    server = psutil.Process(app.process.pid)
    used = sum(server.cpu_times()[:2])
    before, started = app.stats()["totals"]["tokens"], time.perf_counter()
    readers = [threading.Thread(target=read_one, args=(app, seed)) for seed in range(STREAMS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    elapsed = time.perf_counter() - started
    used = sum(server.cpu_times()[:2]) - used
    stop.set()
    watchers.join()
    return (app.stats()["totals"]["tokens"] - before) / elapsed, used / elapsed


def read_one(app: RunningApp, seed: int) -> None:
    for _ in stream(
        app, "generate", *generate_data("Once upon a time", max_new_tokens=ROUND_TOKENS, seed=seed), timeout=300
    ):
        pass


async def watch(app: RunningApp, pages: int, every_s: float, stop: threading.Event) -> None:
    """What static/live.js asks for, from that many pages."""

    async def page(client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(every_s * number / max(pages, 1))
        while not stop.is_set():
            await client.get("kvscope/live")
            await asyncio.sleep(every_s)

    async with httpx.AsyncClient(base_url=app.url, timeout=30) as client:
        await asyncio.gather(*(page(client, number) for number in range(pages)))


def idle_cores(app: RunningApp, pages: int) -> float:
    """Cores that app and worker use while pages are open (one request in 4 s) and nobody speaks."""
    stop = threading.Event()
    watchers = threading.Thread(target=lambda: asyncio.run(watch(app, pages, 4.0, stop)))
    watchers.start()
    before = cpu_seconds(app)
    threading.Event().wait(IDLE_S)
    used = cpu_seconds(app) - before
    stop.set()
    watchers.join()
    return used / IDLE_S


def cpu_seconds(app: RunningApp) -> float:
    processes = [psutil.Process(app.process.pid), app.worker()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pages", type=int, default=16)
    arguments = parser.parse_args()
    with running_app(None, KVSCOPE_THREADS=0, KVSCOPE_PROBE_SHARE=0) as app:
        decode_round(app, 0)
        rounds = [(decode_round(app, 0), decode_round(app, arguments.pages)) for _ in range(arguments.rounds)]
        idle = {pages: idle_cores(app, pages) for pages in (0, 1, arguments.pages)}
    for (alone, base), (watched, cores) in rounds:
        print(f"{alone:6.1f} tokens/s alone, {watched:6.1f} with {arguments.pages} pages: {watched / alone:.2f}")
        print(f"  web server: {base:.2f} of a core for the streams, {cores - base:+.2f} for the pages")
    print(f"median ratio {statistics.median(watched / alone for (alone, _), (watched, _) in rounds):.2f}")
    for pages, cores in idle.items():
        print(f"idle with {pages} pages: {cores:.3f} of a core")
    print(json.dumps({"rounds": rounds, "idle_cores": idle}))


if __name__ == "__main__":
    main()
