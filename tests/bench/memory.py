"""Whether the worker's memory beyond weights and cache stays flat over many requests.

    python tests/bench/memory.py [--requests 200]

The embedded model, prompts and lengths mixed; resident memory after every twentieth request. The operating
system hands out the cache's zeroed pages when they are first written, which would look like growth: here
they are written at once, in a worker that runs as a thread of this process.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import psutil
from throughput import make_requests

from engine import Engine, SamplingParams, kv_cache

untouched_zeros = kv_cache._zeros


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    count = parser.parse_args().requests
    kv_cache._zeros = lambda *shape: untouched_zeros(*shape).fill_(0)
    process = psutil.Process()
    with Engine.from_pretrained(device="cpu", host="thread") as engine:
        requests = make_requests(engine.prompts.tokenizer, count)
        for first in range(0, count, 20):
            generations = [
                engine.submit(ids, SamplingParams(max_new_tokens=new_tokens // 8, temperature=0.7), client=index)
                for index, (ids, new_tokens) in enumerate(requests[first : first + 20], first)
            ]
            for generation in generations:
                generation.result(600)
            allocated = engine.snapshot()["cache"]["allocated_bytes"]
            resident = process.memory_info().rss
            print(f"after {first + 20:4} requests: {resident / 1e6:.0f} MB resident, {allocated / 1e6:.0f} MB of cache")


if __name__ == "__main__":
    main()
