"""Chunks of prompts are as long as the streams beside them can bear."""

import pytest

from engine.pace import LEAST_TOKENS, MEMORY, STRETCH, Pace

ROW_MS = 2.0


def learned(step_ms: float, token_ms: float, most: int = 512) -> Pace:
    pace = Pace(most)
    learn(pace, step_ms, token_ms)
    return pace


def learn(pace: Pace, step_ms: float, token_ms: float) -> None:
    for number in range(MEMORY):
        rows, tokens = 1 + number % 4, 20 + number
        pace.record(step_ms + ROW_MS * rows, rows, 0)
        pace.record(step_ms + ROW_MS * rows + token_ms * tokens, rows, tokens)


def test_a_chunk_takes_a_share_of_a_usual_step():
    assert learned(step_ms=42, token_ms=1.01).budget(rows=4, prompts=1) == int(50 * STRETCH / 1.01)
    assert learned(step_ms=42, token_ms=0.01).budget(rows=4, prompts=1) == 512
    assert learned(step_ms=1, token_ms=10).budget(rows=4, prompts=1) == LEAST_TOKENS


def test_the_more_wait_beside_few_who_stream_the_longer_it_is():
    pace = learned(step_ms=42, token_ms=1.01)
    assert pace.budget(rows=4, prompts=4) == pace.budget(rows=4, prompts=1)
    assert pace.budget(rows=4, prompts=10) == int(2.5 * 50 * STRETCH / 1.01)
    assert pace.budget(rows=4, prompts=1000) == 512


def test_where_nobody_streams_and_where_nothing_is_known_it_is_as_long_as_allowed():
    assert learned(step_ms=50, token_ms=1).budget(rows=0, prompts=1) == 512
    assert Pace(512).budget(rows=4, prompts=1) == 512
    alone = Pace(512)
    alone.record(300, rows=0, prefill_tokens=300)
    assert alone.budget(rows=1, prompts=1) == 512
    alone.record(30, rows=1, prefill_tokens=0)
    assert alone.budget(rows=1, prompts=1) == pytest.approx(30 * STRETCH, rel=0.1)


def test_rows_that_join_while_prompts_are_read_are_not_put_down_to_the_prompts():
    pace = Pace(512)
    pace.record(22, rows=1, prefill_tokens=0)  # and no step of more rows without a chunk
    for number in range(200):
        rows, tokens = 1 + min(number // 4, 15), pace.budget(1 + min(number // 4, 15), prompts=1)
        pace.record(20 + ROW_MS * rows + 0.5 * tokens, rows, tokens)
    assert pace.budget(rows=16, prompts=1) == pytest.approx(STRETCH * (20 + ROW_MS * 16) / 0.5, rel=0.05)


def test_it_follows_a_machine_that_becomes_slower():
    pace = learned(step_ms=42, token_ms=1)
    learn(pace, step_ms=42, token_ms=2.01)
    assert pace.budget(rows=4, prompts=1) == int(50 * STRETCH / 2.01)


def test_a_step_that_something_else_held_up_counts_for_little():
    pace = learned(step_ms=42, token_ms=1)
    pace.record(5000, rows=4, prefill_tokens=40)
    pace.record(5000, rows=4, prefill_tokens=0)
    assert pace.budget(rows=4, prompts=1) == pytest.approx(50 * STRETCH, rel=0.1)
