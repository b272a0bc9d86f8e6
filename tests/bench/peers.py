"""This engine beside what people would use instead: same weights, same requests, one after another in each round.

    python tests/bench/peers.py [--counts 1 4 16 32] [--arrivals together random] [--rounds 2] [--json FILE]

Peers: `generate()` one by one and as a padded batch, transformers' `generate_batch()`, and, where
`pip install openvino-genai` was done, OpenVINO GenAI's ContinuousBatchingPipeline over the same GGUF. All greedy,
with a fixed number of new tokens. OpenVINO keeps its own compressed weights and an 8-bit cache: it is to be read beside
the engine's int8, the others beside float32. A padded batch is measured only where all arrive together.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from throughput import make_requests
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria

from engine import Engine, EngineConfig, SamplingParams, embedded
from engine.progress import no_progress

Requests = list[tuple[list[int], int]]
TOGETHER_ONLY = ("generate(), padded batch",)
RANDOM_OVER_S = 4.0  # requests that arrive at random do so within this time


@dataclass
class Measured:
    """Unix times: when each request arrived, and when each of its tokens came."""

    arrivals: list[float]
    tokens: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Tokens a second from the first arrival to the last token; milliseconds to the first token and between."""
        total_s = max(times[-1] for times in self.tokens) - min(self.arrivals)
        row = {"tokens_per_second": sum(map(len, self.tokens)) / total_s}
        gaps = [1000 * (b - a) for times in self.tokens for a, b in zip(times, times[1:], strict=False)]
        if any(gaps):
            firsts = [1000 * (times[0] - at) for times, at in zip(self.tokens, self.arrivals, strict=True)]
            row["first_token_ms"] = statistics.median(firsts)
            row["gap_ms"] = statistics.median(gaps)
            row["gap_p99_ms"] = statistics.quantiles(gaps, n=100)[98]
        return row


class Clock(StoppingCriteria):
    """Notes the time of each step of `generate()`, and stops nothing."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(model, ids: list[list[int]], new_tokens: int) -> list[float]:
    width, clock = max(map(len, ids)), Clock()
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    fixed = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    model.generate(padded, attention_mask=mask, stopping_criteria=[clock], **fixed)
    return clock.times


def one_by_one(model, requests: Requests, after: list[float]) -> Measured:
    started = time.time()
    measured = Measured([started + wait for wait in after])
    for (ids, new_tokens), arrival in zip(requests, measured.arrivals, strict=True):
        wait_until(arrival)
        measured.tokens.append(generate(model, [ids], new_tokens))
    return measured


def padded_batch(model, requests: Requests, after: list[float]) -> Measured:
    started = time.time()
    times = generate(model, [ids for ids, _ in requests], max(new_tokens for _, new_tokens in requests))
    # Every row runs as long as the longest, only what was asked for counts, and all are delivered together.
    end = times[-1]
    return Measured([started] * len(requests), [[*times[: new_tokens - 1], end] for _, new_tokens in requests])


def generate_batch(model, requests: Requests, after: list[float]) -> Measured:
    """By the manager inside `generate_batch()`, which knows a limit for each request."""
    with model.continuous_batching_context_manager(GenerationConfig(do_sample=False)) as manager:
        started = time.time()
        measured = Measured([started + wait for wait in after], [[] for _ in requests])
        for index, ((ids, new_tokens), arrival) in enumerate(zip(requests, measured.arrivals, strict=True)):
            wait_until(arrival)
            manager.add_request(ids, str(index), new_tokens, streaming=True, eos_token_id=-1)
        while any(len(times) < new_tokens for times, (_, new_tokens) in zip(measured.tokens, requests, strict=True)):
            output = manager.get_result(timeout=60)
            if output is None or output.error:
                raise RuntimeError(f"generate_batch() ended early: {output and output.error}")
            times = measured.tokens[int(output.request_id)]
            times += [time.time()] * (len(output.generated_tokens) - len(times))
    return measured


def with_engine(engine: Engine, requests: Requests, after: list[float]) -> Measured:
    started = time.time()
    measured = Measured([started + wait for wait in after])
    generations = []
    for (ids, new_tokens), arrival in zip(requests, measured.arrivals, strict=True):
        wait_until(arrival)
        generations.append(engine.submit(ids, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)))
    measured.tokens = [[event.time for event in generation] for generation in generations]
    return measured


def openvino(pipeline, requests: Requests, after: list[float]) -> Measured:
    import numpy as np
    import openvino
    import openvino_genai

    started = time.time()
    measured = Measured([started + wait for wait in after], [[] for _ in requests])
    handles: list = []
    while len(handles) < len(requests) or pipeline.has_non_finished_requests():
        while len(handles) < len(requests) and measured.arrivals[len(handles)] <= time.time():
            ids, new_tokens = requests[len(handles)]
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = new_tokens
            config.ignore_eos, config.do_sample = True, False
            handles.append(pipeline.add_request(len(handles), openvino.Tensor(np.array([ids], dtype="int64")), config))
        if pipeline.has_non_finished_requests():
            pipeline.step()
        for handle, times in zip(handles, measured.tokens, strict=False):
            while handle.can_read():
                made = sum(len(output.generated_ids) for output in handle.read().values())
                times.extend([time.time()] * made)
    return measured


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def floor(requests: Requests, parameters: int) -> dict[str, float]:
    """The machine's limit in float32: weights read once a step, prompts multiplied, nothing else; tokens a second."""
    numbers, square = torch.ones(128 * 1024 * 1024), torch.ones(2048, 2048)
    read_s = min(timed(numbers.sum) for _ in range(5))
    multiply_s = min(timed(lambda: square @ square) for _ in range(5))
    bytes_per_s, flops_per_s = numbers.nbytes / read_s, 2 * 2048**3 / multiply_s
    steps, prompts = max(new_tokens for _, new_tokens in requests), sum(len(ids) for ids, _ in requests)
    least_s = steps * 4 * parameters / bytes_per_s + 2 * parameters * prompts / flops_per_s
    total = sum(new_tokens for _, new_tokens in requests)
    return {"gb_per_s": bytes_per_s / 1e9, "gflops": flops_per_s / 1e9, "tokens_per_second": total / least_s}


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def openvino_pipeline():
    import openvino_genai

    folder = EngineConfig().cache_folder / "openvino-bench"
    folder.mkdir(parents=True, exist_ok=True)
    gguf = next(folder.glob("*.gguf"), None) or embedded._unpack(embedded._fetch(folder, no_progress), folder)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 32, False
    return openvino_genai.ContinuousBatchingPipeline(str(gguf), scheduler, "CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--arrivals", nargs="+", choices=("together", "random"), default=["together", "random"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = str(embedded.ensure(EngineConfig().cache_folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = {"max_batch_size": 32, "device": "cpu"}
    with (
        Engine.from_pretrained(folder, config=EngineConfig(**settings)) as exact,
        Engine.from_pretrained(folder, config=EngineConfig(quantize="int8", **settings)) as rounded,
    ):
        contenders = {
            "engine, float32": lambda *case: with_engine(exact, *case),
            "engine, int8": lambda *case: with_engine(rounded, *case),
            "generate(), one by one": lambda *case: one_by_one(model, *case),
            "generate(), padded batch": lambda *case: padded_batch(model, *case),
            "generate_batch()": lambda *case: generate_batch(model, *case),
        }
        if find_spec("openvino_genai"):
            pipeline = openvino_pipeline()
            contenders["OpenVINO GenAI"] = lambda *case: openvino(pipeline, *case)
        results = []
        for count in arguments.counts:
            requests = make_requests(tokenizer, count)
            for arrive in arguments.arrivals:
                results += compare(contenders, requests, arrive, arguments.rounds)
            print(f"{count} at once: the floor in float32 is {floor(requests, model.num_parameters())}", flush=True)
    if arguments.json:
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"results": results, **facts}, indent=1))


def compare(contenders: dict, requests: Requests, arrive: str, rounds: int) -> list[dict]:
    """Each contender once a round, in turn; prints and returns the medians over the rounds."""
    chance = random.Random(len(requests))
    after = sorted(RANDOM_OVER_S * chance.random() if arrive == "random" else 0.0 for _ in requests)
    apt = [name for name in contenders if arrive == "together" or name not in TOGETHER_ONLY]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in apt}
    for number in range(rounds + 1):
        for name in apt:
            summary = contenders[name](requests, after).summary()
            if number:  # the first round warms up: caches grow, kernels are chosen
                measured[name].append(summary)
    rows = []
    for name, summaries in measured.items():
        medians = {key: statistics.median(summary[key] for summary in summaries) for key in summaries[0]}
        rows.append({"name": name, "requests": len(requests), "arrive": arrive, **medians})
        shown = "".join(f"{key} {value:9.1f}   " for key, value in medians.items())
        print(f"{len(requests):3} {arrive:9} {name:26} {shown}", flush=True)
    return rows


if __name__ == "__main__":
    main()
