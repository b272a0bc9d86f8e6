"""Whether the worker's memory beyond weights and cache stays flat over many requests.

    python tests/bench/memory.py [--requests 200]

The embedded model behind the ordinary child process, prompts and lengths mixed; resident memory after every
twentieth request, less what the cache has allocated.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import psutil
from throughput import make_requests

from engine import Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    count = parser.parse_args().requests
    with Engine.from_pretrained(device="cpu") as engine:
        worker = psutil.Process(engine._worker.pid)
        requests = make_requests(engine.prompts.tokenizer, count)
        for first in range(0, count, 20):
            generations = [
                engine.submit(ids, SamplingParams(max_new_tokens=new_tokens // 8, temperature=0.7), client=index)
                for index, (ids, new_tokens) in enumerate(requests[first : first + 20], first)
            ]
            for generation in generations:
                generation.result(600)
            # The cache's pages are touched as it fills, so only what was touched may be subtracted: print both.
            allocated = engine.snapshot()["cache"]["allocated_bytes"]
            resident = worker.memory_info().rss
            print(
                f"after {first + 20:4} requests: {resident / 1e6:7.0f} MB resident, {allocated / 1e6:5.0f} MB of cache"
            )


if __name__ == "__main__":
    main()
