"""How far a decode step reads: never too short, and no long row makes the others' slots be read as far as its own."""

import random
from itertools import pairwise

import pytest
import torch
from families import FAMILIES, VOCABULARY, build

import engine.runner
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.windows import WINDOW_STEP, Window, split

MOST = 2048


def cost(lengths: list[int], cuts: list[int], each: int) -> int:
    """Of windows that begin at `cuts`, counted afresh."""
    pieces = [lengths[start:end] for start, end in pairwise([*cuts, len(lengths)])]
    return sum(len(piece) * min(-(-max(piece) // WINDOW_STEP) * WINDOW_STEP, MOST) + each for piece in pieces)


def test_one_long_row_does_not_make_the_others_long():
    windows = split([100] * 7 + [1900] + [120] * 8, MOST, each=600)
    assert windows == [Window(7, 128), Window(1, 1920), Window(8, 128)]
    assert split([100, 200, 150], MOST, each=600) == [Window(3, 256)]
    assert split([MOST - 1], MOST, each=600) == [Window(1, MOST)]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_costs_less(seed):
    dice = random.Random(seed)
    lengths = [dice.randint(1, MOST) for _ in range(dice.randint(1, 8))]
    each = dice.randint(1, 2000)
    windows = split(lengths, MOST, each)
    rows = [window.positions for window in windows for _ in range(window.rows)]
    assert all(length <= positions for length, positions in zip(lengths, rows, strict=True))
    every = range(2 ** (len(lengths) - 1))
    all_cuts = ([0, *(i for i in range(1, len(lengths)) if choice >> (i - 1) & 1)] for choice in every)
    assert sum(w.size + each for w in windows) == min(cost(lengths, cuts, each) for cuts in all_cuts)


@pytest.mark.parametrize("first_slot", [0, 1])
def test_a_step_in_several_windows_gives_the_rows_the_same_logits(monkeypatch, one_thread, first_slot):
    runner = ModelRunner(build(FAMILIES["llama"]()))
    lengths = [3, 300, 5, 9]
    ids = torch.randint(0, VOCABULARY, (4, 300), generator=torch.Generator().manual_seed(0)).tolist()
    cache = KVCache(runner.layer_shapes, slots=5, positions=320)
    for slot, length in enumerate(lengths):
        runner.prefill(cache, first_slot + slot, 0, ids[slot][: length - 1])
    arguments = [row[length - 1] for row, length in zip(ids, lengths, strict=True)], [n - 1 for n in lengths]
    together = runner.decode(cache, *arguments, first_slot)
    assert len(runner.windows(cache, lengths)) == 1
    monkeypatch.setattr(engine.runner, "ANOTHER_WINDOW", 20 * runner.layer_shapes[0].bytes_per_token)
    assert [w.rows for w in runner.windows(cache, lengths)] == [1, 1, 2]
    apart = runner.decode(cache, *arguments, first_slot)
    assert (apart - together).abs().max() < 1e-5 * together.std()
