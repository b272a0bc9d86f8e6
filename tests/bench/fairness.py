"""What one visitor's long text costs the others, and what a kept beginning saves.

    python tests/bench/fairness.py [--rounds 3] [--quantize int8]

The embedded model, a window of 8,192 tokens. First, the gaps between the tokens of four running streams, while nobody
else comes and then while a prompt of 4,000 tokens is read; the ratio is that of the 99th percentiles. Second, the time
to the first token of a chat's turn with 1,000 tokens of history, of a client who had the turn before, and of another
who brings the same text for the first time.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from throughput import TEXT

from engine import Engine, EngineConfig, Generation, SamplingParams

STREAMS, STREAMED, LONG, HISTORY, ANSWER, QUESTION = 4, 600, 4000, 1000, 16, 12


def tokens(engine: Engine, count: int, start: int) -> list[int]:
    """That many tokens of a plain text, from another place for each `start`."""
    text = engine.prompts.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    turned = text[start % len(text) :] + text[: start % len(text)]
    return (turned * (1 + count // len(text)))[:count]


def exactly(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)


def percentile_99(streams: list[Generation], since: float, until: float) -> float:
    """Of the gaps in milliseconds between tokens of a stream that both came in that time."""
    times = [[event.time for event in stream.events if since <= event.time <= until] for stream in streams]
    gaps = [1000 * (b - a) for of in times for a, b in zip(of, of[1:], strict=False)]
    return statistics.quantiles(gaps, n=100)[98]


def follow(stream: Generation, count: int) -> None:
    """Wait for its first tokens; `GenerationError` where it fails before."""
    for _ in islice(stream, count):
        pass


def beside_a_long_prompt(engine: Engine, number: int) -> dict[str, float]:
    streams = [engine.submit(tokens(engine, 50, 97 * n), exactly(STREAMED)) for n in range(STREAMS)]
    for stream in streams:
        follow(stream, 20)
    began = time.time()
    follow(streams[0], 120)
    asked = time.time()
    long = engine.submit(tokens(engine, LONG, 31 * number), exactly(1))
    read = long.result(600) and long.events[0].time
    still = all(len(stream.events) < STREAMED for stream in streams)
    for stream in streams:
        stream.cancel()
    usual, meanwhile = percentile_99(streams, began, asked), percentile_99(streams, asked, read)
    return {
        "usual_p99_ms": usual,
        "p99_ms": meanwhile,
        "ratio": meanwhile / usual,
        "prompt_s": read - asked,
        "streams_outlasted_it": float(still),
    }


def second_turn(engine: Engine, number: int) -> dict[str, float]:
    history = tokens(engine, HISTORY - ANSWER, 101 * number)
    first = engine.submit(history, exactly(ANSWER), client=f"one {number}").result(600)
    whole = history + first.token_ids + tokens(engine, QUESTION, 500 + number)
    stranger = engine.submit(whole, exactly(ANSWER), client=f"another {number}").result(600)
    again = engine.submit(whole, exactly(ANSWER), client=f"one {number}").result(600)
    ms = [1000 * result.timings.first_token_s for result in (first, stranger, again)]
    return {"first_turn_ms": ms[0], "anew_ms": ms[1], "second_turn_ms": ms[2], "ratio": ms[2] / ms[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantize", choices=("none", "int8"), default="none")
    asked = parser.parse_args()
    config = EngineConfig(device="cpu", max_context=8192, quantize=asked.quantize)
    with Engine.from_pretrained(config=config) as engine:
        engine.submit("Warm", exactly(8)).result(600)
        for measure in (beside_a_long_prompt, second_turn):
            rounds = [measure(engine, number) for number in range(asked.rounds)]
            medians = {name: round(statistics.median(row[name] for row in rounds), 2) for name in rounds[0]}
            print(measure.__name__, json.dumps(medians), flush=True)


if __name__ == "__main__":
    main()
