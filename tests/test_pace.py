"""Chunks of prompts are as long as the streams beside them can bear."""

from engine.pace import LEAST_TOKENS, STRETCH, Pace


def learned(usual_ms: float, token_ms: float, most: int = 512) -> Pace:
    pace = Pace(most)
    for _ in range(50):
        pace.record(usual_ms, rows=4, prefill_tokens=0)
        pace.record(usual_ms + 100 * token_ms, rows=4, prefill_tokens=100)
    return pace


def test_a_chunk_takes_a_share_of_a_usual_step():
    assert learned(usual_ms=50, token_ms=1).budget(rows=4) == 50 * STRETCH
    assert learned(usual_ms=50, token_ms=0.01).budget(rows=4) == 512
    assert learned(usual_ms=2, token_ms=10).budget(rows=4) == LEAST_TOKENS


def test_where_nobody_streams_and_where_nothing_is_known_it_is_as_long_as_allowed():
    assert learned(usual_ms=50, token_ms=1).budget(rows=0) == 512
    assert Pace(512).budget(rows=4) == 512
    alone = Pace(512)
    alone.record(300, rows=0, prefill_tokens=300)
    assert alone.budget(rows=1) == 512
    alone.record(30, rows=1, prefill_tokens=0)
    assert alone.budget(rows=1) == 30 * STRETCH


def test_it_follows_a_machine_that_becomes_slower():
    pace = learned(usual_ms=50, token_ms=1)
    for _ in range(50):
        pace.record(50 + 100 * 2, rows=4, prefill_tokens=100)
    assert pace.budget(rows=4) == int(50 * STRETCH / 2)
