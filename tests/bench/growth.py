"""How a step's cost grows: with the rows of the batch, their context, one long row among short ones, and the line.

    python tests/bench/growth.py [--quantize int8] [--json FILE]

The embedded model's forward and choice, milliseconds; each figure is the median of steps that take turns with those of
the other figures of its row. The line: tokens a second of 16 rows while nobody waits and while 64 and 256 requests do.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, SamplingParams, embedded
from engine.core import EngineCore
from engine.kv_cache import KVCache
from engine.packing import pack_linears
from engine.processors import Row
from engine.runner import ModelRunner
from engine.sampler import choose
from engine.sequence import Sequence

ROUNDS = 12
LONGEST = 1920
CONTEXT, ROWS = 192, 16
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 512, 1024, LONGEST)
LINES = (0, 64, 256)
LINE_STEPS = 40


def step_ms(runner: ModelRunner, cache: KVCache, lengths: list[int]) -> float:
    """One greedy step of rows of these lengths."""
    started = time.perf_counter()
    logits = runner.decode(cache, [5] * len(lengths), [length - 1 for length in lengths])
    choose(logits, [Row(SamplingParams(), 0, 0, slot, n) for slot, n in enumerate(lengths)], cache.token_ids)
    return 1000 * (time.perf_counter() - started)


def by_turns(runner: ModelRunner, cache: KVCache, cases: dict[str, list[int]]) -> dict[str, float]:
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, lengths in cases.items():
            measured[name].append(step_ms(runner, cache, lengths))
    return {name: round(statistics.median(times[1:]), 1) for name, times in measured.items()}


def line_speed(runner: ModelRunner, waiting: int) -> float:
    """Tokens a second of a full batch with that many behind it."""
    core = EngineCore(runner, EngineConfig(max_batch_size=ROWS, device="cpu"), frozenset())
    for number in range(ROWS + waiting):
        core.submit(Sequence(number, [5] * 8, SamplingParams(max_new_tokens=1000, ignore_eos=True), 0, None, False))
    while len(core.scheduler.running) < ROWS:
        core.step()
    started = time.perf_counter()
    made = sum(len(core.step().tokens) for _ in range(LINE_STEPS))
    return round(made / (time.perf_counter() - started), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", choices=("none", "int8"), default="none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = str(embedded.ensure(EngineConfig().cache_folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pack_linears(model, arguments.quantize)
    runner = ModelRunner(model)
    cache = KVCache(runner.layer_shapes, max(BATCHES), LONGEST)
    short = [CONTEXT] * ROWS
    results = {
        "rows": by_turns(runner, cache, {str(rows): [CONTEXT] * rows for rows in BATCHES}),
        "context": by_turns(runner, cache, {str(length): [length] * ROWS for length in CONTEXTS}),
        "one_long_row": by_turns(runner, cache, {"none": short, str(LONGEST): [*short[1:], LONGEST]}),
    }
    del cache
    results["waiting"] = {str(waiting): line_speed(runner, waiting) for waiting in LINES}
    for name, row in results.items():
        print(f"{name:14}", "   ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
