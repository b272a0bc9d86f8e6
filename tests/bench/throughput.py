"""Sixteen requests at once: this engine beside `model.generate()`, one by one and as one padded batch.

    python tests/bench/throughput.py [--rounds 2] [--requests 16]

Same weights, same prompts, same numbers of new tokens, float32, greedy (and once more with the page's
sampling). The contenders take turns within each round, so that a noisy machine harms all alike; the ratios are
the medians over the rounds of ratios within one round.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine, EngineConfig, SamplingParams, embedded

PAGE = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}
TEXT = Path(__file__).resolve().parents[2] / "demo/static/two_clocks.txt"


def make_requests(tokenizer, count: int) -> list[tuple[list[int], int]]:
    """Pieces of 32 to 256 tokens of a plain English text, each with 64 to 128 new tokens to make."""
    chance = random.Random(0)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    requests = []
    for _ in range(count):
        length, start = chance.randint(32, 256), chance.randrange(len(ids) - 256)
        requests.append((ids[start : start + length], chance.randint(64, 128)))
    return requests


def one_by_one(model, requests) -> float:
    started = time.perf_counter()
    for ids, new_tokens in requests:
        model.generate(
            torch.tensor([ids]), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
    return total(requests) / (time.perf_counter() - started)


def alone(model, engine: Engine, requests) -> dict[str, float]:
    """One request and nobody else."""
    return {
        "generate, one alone": one_by_one(model, requests[:1]),
        "engine, one alone": with_engine(engine, requests[:1]),
    }


def padded_batch(model, requests) -> float:
    """All at once, left-padded; every row runs as long as the longest, only what was asked for counts."""
    width = max(len(ids) for ids, _ in requests)
    longest = max(new_tokens for _, new_tokens in requests)
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in requests])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in requests])
    started = time.perf_counter()
    model.generate(
        ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
    )
    return total(requests) / (time.perf_counter() - started)


def with_engine(engine: Engine, requests, **sampling) -> float:
    started = time.perf_counter()
    generations = [
        # Without a client nothing is reused: every round reads every prompt.
        engine.submit(ids, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **sampling))
        for ids, new_tokens in requests
    ]
    for generation in generations:
        generation.result(600)
    return total(requests) / (time.perf_counter() - started)


def total(requests) -> int:
    return sum(new_tokens for _, new_tokens in requests)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    folder = embedded.ensure(EngineConfig().cache_folder)
    requests = make_requests(AutoTokenizer.from_pretrained(folder), arguments.requests)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine.from_pretrained(str(folder), device="cpu") as engine:
        with_engine(engine, requests)  # so that the cache has grown to its size
        one_by_one(model, [(requests[0][0], 4)])
        rounds = [
            {
                "generate, one by one": one_by_one(model, requests),
                "generate, padded batch": padded_batch(model, requests),
                "engine, greedy": with_engine(engine, requests),
                "engine, the page's sampling": with_engine(engine, requests, **PAGE),
                **alone(model, engine, requests),
            }
            for _ in range(arguments.rounds)
        ]
    report(rounds)


def report(rounds: list[dict[str, float]]) -> None:
    """Tokens a second of each contender, and the engine's ratio to each."""
    print(f"{'tokens/s':30}" + "".join(f"{f'round {i + 1}':>10}" for i in range(len(rounds))) + f"{'engine is':>14}")
    for name in rounds[0]:
        same = "engine, one alone" if "alone" in name else "engine, greedy"
        ratio = statistics.median(r[same] / r[name] for r in rounds)
        print(f"{name:30}" + "".join(f"{r[name]:10.1f}" for r in rounds) + f"{ratio:13.2f}x")
    print(json.dumps({"rounds": rounds, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
