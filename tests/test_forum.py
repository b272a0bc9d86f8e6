"""The forum's experiment, in real processes of a tiny model, and what is made of its times."""

import pytest
from tiny import save_tiny_model

from demo.forum import found
from engine import EngineConfig
from engine.forum import ExperimentFailed, repeat


def test_both_orders_run_cold_and_warm(tmp_path):
    config = EngineConfig(model=str(save_tiny_model(tmp_path)), device="cpu", threads=1)
    rows = list(repeat(config))
    assert [(row["order"][0], row["warm"]) for row in rows] == [
        ("by_hand", False), ("by_hand", True), ("generate", False), ("generate", True),
    ]  # fmt: skip
    assert all(set(row["seconds"]) == {"by_hand", "generate"} and min(row["seconds"].values()) > 0 for row in rows)


def test_a_process_that_fails_is_a_sentence(tmp_path):
    with pytest.raises(ExperimentFailed, match="log says why"):
        list(repeat(EngineConfig(model=str(tmp_path), device="cpu")))


def test_the_cache_and_the_first_calls_are_told_apart():
    rows = [
        {"order": [first], "warm": warm, "seconds": {"by_hand": 3.0, "generate": 1.0}}
        for first in ("by_hand", "generate")
        for warm in (False, True)
    ]
    assert "nothing follows" not in found(rows)
    rows[0]["seconds"]["by_hand"] = 5.0
    rows[2]["seconds"]["generate"] = 1.5
    said = found(rows)
    assert "takes 3.0 times as long" in said and "added +2.00 s to the loop and +0.50 s to generate()" in said
    rows[1]["seconds"]["by_hand"] = 9.0
    assert "3.0-fold apart" in found(rows)
