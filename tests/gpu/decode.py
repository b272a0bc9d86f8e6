"""How long a decode step takes on a GPU, beside what others take and what its memory allows. Under five minutes.

    python tests/gpu/decode.py [--device cuda] [--shape 1.7b] [--batches 1 2 4 8 16 32 64] [--json FILE]

Needs torch and transformers only; the weights are random, of SmolLM2-1.7B's shape, in bfloat16 on a GPU. All rows have
256 tokens of context at first. The engine's step is the whole of it: forward, choosing (sampled with top-k and top-p),
the copy to the host. That of `generate()` is the time of 33 tokens less that of one, by 32; that of `generate_batch()`
is taken by its manager's stream, from where every request has a token.
The floor reads all weights, and the keys and values of all rows, at the bandwidth that a plain sum reaches.
"""

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The engine's modules without its package, whose settings would need another library.
engine = types.ModuleType("engine")
engine.__path__ = [str(ROOT / "engine")]
sys.modules["engine"] = engine

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

from engine.kv_cache import KVCache  # noqa: E402
from engine.params import SamplingParams  # noqa: E402
from engine.processors import Row  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.sampler import choose  # noqa: E402

SHAPES = {
    "1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
CONTEXT, STEPS, WARM_UP = 256, 32, 4
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)


def make_model(shape: str, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = LlamaConfig(vocab_size=49152, eos_token_id=None, tie_word_embeddings=True, **SHAPES[shape])
    with device:
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def engine_step_ms(runner: ModelRunner, rows: int) -> float:
    """Median over steps of a growing context; the first ones, of which one records, do not count."""
    cache = KVCache(runner.layer_shapes, rows, CONTEXT + WARM_UP + STEPS)
    token_ids, times = [1] * rows, []
    for length in range(CONTEXT, CONTEXT + WARM_UP + STEPS):
        started = time.perf_counter()
        logits = runner.decode(cache, token_ids, [length] * rows)
        asked = [Row(DRAWN, row, length, row, length + 1) for row in range(rows)]
        token_ids = choose(logits, asked, cache.token_ids).token_ids
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[WARM_UP:])


def difference(runner: ModelRunner, rows: int = 4) -> float:
    """How far recorded logits of texts of several lengths are from plain ones, over the latter's standard deviation."""
    texts = [list(range(7 * row, 9 * row + 20)) for row in range(rows)]
    cache = KVCache(runner.layer_shapes, rows, CONTEXT)
    for slot, ids in enumerate(texts):
        runner.prefill(cache, slot, 0, ids[:-1])
    asked = cache, [ids[-1] for ids in texts], [len(ids) - 1 for ids in texts]
    for _ in range(2):  # the second one records
        recorded = runner.decode(*asked).clone()
    plain = without_recordings(runner, lambda: runner.decode(*asked))
    return float((recorded - plain).abs().max() / plain.std())


def without_recordings(runner: ModelRunner, work: Callable):
    graphs, runner._graphs = runner._graphs, None
    try:
        return work()
    finally:
        runner._graphs = graphs


def peer_step_ms(measure: Callable, model: LlamaForCausalLM, rows: int) -> float | None:
    """None, and why, for a peer that fails here."""
    ids = torch.randint(0, 49152, (rows, CONTEXT), device=model.device)
    try:
        return measure(model, ids)
    except Exception as error:
        print(f"left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def generate_step_ms(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    def seconds(new_tokens: int) -> float:
        limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0}
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=50, top_p=0.95, **limits
        ).tolist()
        return time.perf_counter() - started

    seconds(1)
    return 1000 * (min(seconds(1 + STEPS) for _ in range(2)) - min(seconds(1) for _ in range(2))) / STEPS


def generate_batch_step_ms(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    config = GenerationConfig(do_sample=True, top_k=50, top_p=0.95)
    made = dict.fromkeys(map(str, range(len(ids))), 0)
    with model.continuous_batching_context_manager(config) as manager:
        for number, row in zip(made, ids.tolist(), strict=True):
            manager.add_request(row, number, 1 + STEPS, streaming=True, eos_token_id=-1)
        began, first = 0.0, 0
        while min(made.values()) <= STEPS:
            output = manager.get_result(timeout=60)
            if output is None or output.error:
                raise RuntimeError(f"it ended early: {output and output.error}")
            made[output.request_id] = len(output.generated_tokens)
            if not began and min(made.values()):
                began, first = time.perf_counter(), min(made.values())
        return 1000 * (time.perf_counter() - began) / (1 + STEPS - first)


def floor_ms(model: LlamaForCausalLM, runner: ModelRunner, rows: int, bytes_per_s: float) -> float:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = rows * (CONTEXT + STEPS // 2) * sum(shape.bytes_per_token for shape in runner.layer_shapes)
    return 1000 * (weights + states) / bytes_per_s


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum reads."""
    numbers = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.float32, device=device)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        float(numbers.sum())
        times.append(time.perf_counter() - started)
    return numbers.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    bytes_per_s = bandwidth(asked.device)
    model = make_model(asked.shape, asked.device)
    runner = ModelRunner(model)
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(asked.device) if asked.device.type == "cuda" else "cpu",
        "parameters": model.num_parameters(),
        "gb_per_s": bytes_per_s / 1e9,
        "recorded_difference": difference(runner),
    }
    print(json.dumps(facts), flush=True)
    results = []
    for rows in asked.batches:
        row = {
            "rows": rows,
            "engine_ms": engine_step_ms(runner, rows),
            "engine_not_recorded_ms": without_recordings(runner, lambda rows=rows: engine_step_ms(runner, rows)),
            "generate_ms": peer_step_ms(generate_step_ms, model, rows),
            "generate_batch_ms": peer_step_ms(generate_batch_step_ms, model, rows),
            "floor_ms": floor_ms(model, runner, rows, bytes_per_s),
        }
        results.append(row)
        print(json.dumps({name: round(ms, 2) if ms else ms for name, ms in row.items()}), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
