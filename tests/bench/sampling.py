"""What choosing tokens costs: steps of 16 rows with all kinds of parameters, against 16 greedy rows.

    python tests/bench/sampling.py [--rounds 5]

The embedded model decodes the same 16 sequences at the same lengths; the kinds take turns, so that a noisy machine
disturbs all alike. Prints the median step of each kind and its ratio to the greedy one.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from engine import EngineConfig, SamplingParams, embedded
from engine.core import EngineCore
from engine.grammar import Grammars
from engine.loading import load_model
from engine.model_folder import ModelFiles
from engine.packing import pack_linears
from engine.runner import ModelRunner
from engine.sequence import Sequence

ROWS, PROMPT, STEPS = 16, 128, 24

GREEDY = SamplingParams(max_new_tokens=STEPS + 1, ignore_eos=True)
PAGE = {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "top_n_tokens": 5}
EVERYTHING = {
    **PAGE,
    "typical_p": 0.9,
    "frequency_penalty": 0.5,
    "watermark": True,
    "grammar": {"type": "regex", "value": "[A-Za-z ,.]+"},
}


def asked(**fields) -> SamplingParams:
    return SamplingParams(max_new_tokens=STEPS + 1, ignore_eos=True, **fields)


KINDS = {
    "16 greedy rows": [GREEDY] * ROWS,
    "16 rows as the page asks": [asked(**PAGE)] * ROWS,
    "1 row with everything, 15 greedy": [asked(**EVERYTHING)] + [GREEDY] * (ROWS - 1),
    "16 rows with everything": [asked(**EVERYTHING)] * ROWS,
}


def step_times(core: EngineCore, params: list[SamplingParams]) -> list[float]:
    """Milliseconds of the steps in which all rows decode."""
    for row, row_params in enumerate(params):
        core.submit(Sequence(row, [1000 + row] * PROMPT, row_params, seed=row))
    times = []
    while core.has_work:
        record = core.step().record
        if record.batch_size == ROWS and not record.prefill_tokens:
            times.append(record.step_ms)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    config = EngineConfig(device="cpu", prefill_chunk=ROWS * PROMPT)
    folder = embedded.ensure(config.cache_folder)
    model = load_model(ModelFiles(folder, "embedded", "bench"), config)
    pack_linears(model)
    runner = ModelRunner(model)
    core = EngineCore(runner, config, frozenset({2}), Grammars(folder, runner.vocabulary, frozenset({2})))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, params in KINDS.items():
            times[kind] += step_times(core, params)
    greedy = statistics.median(times["16 greedy rows"])
    for kind, values in times.items():
        median = statistics.median(values)
        print(f"{kind:34} {median:7.1f} ms a step {median / greedy - 1:+7.1%}   ({len(values)} steps)")


if __name__ == "__main__":
    main()
