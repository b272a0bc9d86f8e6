"""This engine beside what people would use instead: same weights, same requests, one after another in each round.

    python tests/bench/peers.py [--counts 1 4 16 32] [--kinds mixed short long chats] [--arrivals together random]
                                [--rounds 2] [--json FILE]

Prompts are mixed (32 to 256 tokens), short (16 to 32), long (512 to 1,024), all with 64 to 128 new tokens, or chats: of
three turns, each the last one's prompt and 200 tokens more, with 32 new ones. In chats this engine and OpenVINO reuse
what they have computed; elsewhere nobody does. Memory: what each has grown by when it has loaded and answered once.

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
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from throughput import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria

from engine import Engine, EngineConfig, SamplingParams, embedded
from engine.progress import no_progress

Requests = list[tuple[list[int], int]]
# Requests, when each comes, and in chats the number of the visit: nothing of an earlier visit may be reused.
Contender = Callable[[Requests, list[float], int | None], "Measured"]
PROMPT_TOKENS = {"mixed": (32, 256), "short": (16, 32), "long": (512, 1024)}
TURNS, TURN_TOKENS, REPLY_TOKENS = 3, 200, 32
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


def with_engine(engine: Engine, requests: Requests, after: list[float], visit: int | None) -> Measured:
    started = time.time()
    measured = Measured([started + wait for wait in after])
    generations = []
    for index, ((ids, new_tokens), arrival) in enumerate(zip(requests, measured.arrivals, strict=True)):
        wait_until(arrival)
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        # Without a client nothing is reused.
        generations.append(engine.submit(ids, params, client=None if visit is None else (visit, index)))
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


def openvino_pipeline(*, reuse: bool):
    import openvino_genai

    folder = EngineConfig().cache_folder / "openvino-bench"
    folder.mkdir(parents=True, exist_ok=True)
    gguf = next(folder.glob("*.gguf"), None) or embedded._unpack(embedded._fetch(folder, no_progress), folder)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 32, reuse
    return openvino_genai.ContinuousBatchingPipeline(str(gguf), scheduler, "CPU")


def make_turns(ids: list[int], count: int, kind: str, visit: int) -> list[Requests]:
    """Pieces of a plain English text `ids`; one list of requests for each turn. The same every visit, but for chats."""
    chance = random.Random(visit if kind == "chats" else 0)
    if kind == "chats":
        starts = [chance.randrange(len(ids) - TURNS * TURN_TOKENS) for _ in range(count)]
        ends = range(TURN_TOKENS, (TURNS + 1) * TURN_TOKENS, TURN_TOKENS)
        return [[(ids[start : start + end], REPLY_TOKENS) for start in starts] for end in ends]
    requests = []
    for _ in range(count):
        length = chance.randint(*PROMPT_TOKENS[kind])
        start = chance.randrange(len(ids) - length)
        requests.append((ids[start : start + length], chance.randint(64, 128)))
    return [requests]


def resident_mb() -> float:
    """Of this process and its workers."""
    here = psutil.Process()
    return sum(process.memory_info().rss for process in [here, *here.children(recursive=True)]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--kinds", nargs="+", choices=(*PROMPT_TOKENS, "chats"), default=["mixed"])
    parser.add_argument("--arrivals", nargs="+", choices=("together", "random"), default=["together", "random"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = str(embedded.ensure(EngineConfig().cache_folder))
    ids = AutoTokenizer.from_pretrained(folder)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    results = []
    with ExitStack() as stack:
        contenders, memory, parameters = load(folder, make_turns(ids, 1, "mixed", 0)[0], stack)
        for count in arguments.counts:
            for kind in arguments.kinds:
                for arrive in arguments.arrivals:
                    turns = [make_turns(ids, count, kind, visit) for visit in range(arguments.rounds + 1)]
                    results += compare(contenders, turns, kind, arrive)
            if "mixed" in arguments.kinds:
                [requests] = make_turns(ids, count, "mixed", 0)
                print(f"{count} at once: the floor in float32 is {floor(requests, parameters)}", flush=True)
    if arguments.json:
        facts = {"memory_mb": memory, "threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"results": results, **facts}, indent=1))


def load(folder: str, warm_up: Requests, stack: ExitStack) -> tuple[dict[str, Contender], dict[str, float], int]:
    """The contenders, by how many MB each has grown when it has answered `warm_up`, and the model's parameters."""
    contenders: dict[str, Contender] = {}
    memory: dict[str, float] = {}

    def add(before: float, **more: Contender) -> None:
        for name, contender in more.items():
            contenders[name] = contender
            contender(warm_up, [0.0] * len(warm_up), None)
            memory[name] = round(resident_mb() - before)
            print(f"{name:26} {memory[name]:6.0f} MB", flush=True)

    def engine(**settings) -> Contender:
        config = EngineConfig(max_batch_size=32, device="cpu", **settings)
        served = stack.enter_context(Engine.from_pretrained(folder, config=config))
        return lambda *case: with_engine(served, *case)

    add(resident_mb(), **{"engine, float32": engine()})
    add(resident_mb(), **{"engine, int8": engine(quantize="int8")})
    before = resident_mb()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    of_stock = {
        "generate(), one by one": one_by_one,
        "generate(), padded batch": padded_batch,
        "generate_batch()": generate_batch,
    }
    for name, measure in of_stock.items():
        add(before, **{name: lambda requests, after, visit, measure=measure: measure(model, requests, after)})
    if find_spec("openvino_genai"):
        before = resident_mb()
        plain = openvino_pipeline(reuse=False)
        add(before, **{"OpenVINO GenAI": lambda requests, after, visit: openvino(plain, requests, after)})
        reusing = openvino_pipeline(reuse=True)
        contenders["OpenVINO GenAI"] = lambda requests, after, visit: openvino(
            plain if visit is None else reusing, requests, after
        )
    return contenders, memory, model.num_parameters()


def compare(contenders: dict[str, Contender], visits: list[list[Requests]], kind: str, arrive: str) -> list[dict]:
    """Each contender once a visit, in turn; prints and returns the medians over the visits but the first."""
    count = len(visits[0][0])
    chance = random.Random(count)
    after = sorted(RANDOM_OVER_S * chance.random() if arrive == "random" else 0.0 for _ in range(count))
    apt = [name for name in contenders if arrive == "together" or name not in TOGETHER_ONLY]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in apt}
    for number, turns in enumerate(visits):
        for name in apt:
            visit = number if kind == "chats" else None
            summary = by_turn([contenders[name](requests, after, visit).summary() for requests in turns])
            if number:  # the first visit warms up: caches grow, kernels are chosen
                measured[name].append(summary)
    rows = []
    for name, summaries in measured.items():
        medians = {key: statistics.median(summary[key] for summary in summaries) for key in summaries[0]}
        rows.append({"name": name, "requests": count, "kind": kind, "arrive": arrive, **medians})
        shown = "".join(f"{key} {value:9.1f}   " for key, value in medians.items())
        print(f"{count:3} {kind:6} {arrive:9} {name:26} {shown}", flush=True)
    return rows


def by_turn(turns: list[dict[str, float]]) -> dict[str, float]:
    """Of one turn all its figures, of several what differs."""
    if len(turns) == 1:
        return turns[0]
    firsts = {f"turn_{number}_first_token_ms": turn["first_token_ms"] for number, turn in enumerate(turns, 1)}
    return {"tokens_per_second": statistics.mean(turn["tokens_per_second"] for turn in turns), **firsts}


if __name__ == "__main__":
    main()
