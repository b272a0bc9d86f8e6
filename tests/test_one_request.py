"""What breaks in one request, or is odd about it, is nobody else's: its processor, grammar, text, reader and clock."""

import asyncio
import gc
import time
import weakref

import pytest
from running_app import eventually

from engine import Generation, GenerationError, SamplingParams, core, grammar
from engine.detokenizer import Detokenizer
from engine.prompts import PromptEncoder
from engine.requests import NO_TEXT

WAIT_S = 60
SECRET = "secret words"
BROKEN = 77  # the seed, or the first token, of the request in which something breaks


def params(seed: int, **fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True, "seed": seed, **fields})


def breaks_choosing(monkeypatch) -> None:
    process = core.choose

    def choose(logits, rows, histories):
        if any(row.seed == BROKEN and row.emitted == 5 for row in rows):
            raise IndexError("a processor broke")
        return process(logits, rows, histories)

    monkeypatch.setattr(core, "choose", choose)


def breaks_grammar(monkeypatch) -> None:
    follow = grammar.Matcher.follow

    def broken(matcher, output_ids):
        if len(output_ids) == 5:
            raise IndexError("a matcher broke")
        follow(matcher, output_ids)

    monkeypatch.setattr(grammar.Matcher, "follow", broken)


class Panic(BaseException):
    """What a panic in Rust is to Python."""


def breaks_text(monkeypatch) -> None:
    push = Generation._push

    def broken(generation, token, record):
        if generation.sequence.seed == BROKEN and len(generation.events) == 5:
            raise Panic(SECRET)
        return push(generation, token, record)

    monkeypatch.setattr(Generation, "_push", broken)


@pytest.mark.parametrize(
    "breaks, fields, sentence",
    [
        (breaks_choosing, {}, "Choosing the next token failed (IndexError)"),
        (breaks_grammar, {"grammar": {"type": "regex", "value": "[a-z]{60}"}}, "Choosing the next token failed"),
        (breaks_text, {}, NO_TEXT),
    ],
    ids=["processor", "grammar", "text"],
)
def test_only_the_one_fails_with_a_sentence(tiny_engine, monkeypatch, caplog, breaks, fields, sentence):
    engine = tiny_engine()
    neighbours = [params(1), params(2, temperature=0), params(3, repetition_penalty=1.3, top_k=20)]
    alone = [engine.submit(f"neighbour {n}", p).result(WAIT_S).token_ids for n, p in enumerate(neighbours)]
    whole = engine.submit(SECRET, params(BROKEN, **fields)).result(WAIT_S).token_ids
    breaks(monkeypatch)
    generations = [engine.submit(f"neighbour {n}", p) for n, p in enumerate(neighbours)]
    broken = engine.submit(SECRET, params(BROKEN, **fields))
    with pytest.raises(GenerationError) as failure:
        broken.result(WAIT_S)
    assert str(failure.value).startswith(sentence)
    assert broken.result_so_far().token_ids == whole[:5]
    assert [generation.result(WAIT_S).token_ids for generation in generations] == alone
    eventually(lambda: not engine.snapshot()["queue"]["running"])
    assert engine.snapshot()["totals"]["restarts"] == 0 and engine.ready
    assert "secret" not in caplog.text and len(caplog.records) == 1


def test_a_race_whose_text_breaks_fails_alone(tiny_engine, monkeypatch):
    engine = tiny_engine()
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda self, token_id: 1 / 0 if self is broken else push(self, token_id))
    broken = None
    race = engine.compare("The lighthouse", 300)
    broken = race._lanes["cached"]._detokenizer
    with pytest.raises(GenerationError, match="could not be turned into text"):
        race.result(WAIT_S)
    assert engine.compare("The lighthouse", 5).result(WAIT_S)["identical"]


def test_a_tokenizer_that_breaks_refuses_that_text(tiny_engine, monkeypatch):
    engine = tiny_engine()
    tokenizer = engine.prompts.tokenizer

    class Broken:
        chat_template = tokenizer.chat_template

        def __call__(self, text, **_):
            raise OverflowError(SECRET)

    monkeypatch.setattr(engine.prompts, "tokenizer", Broken())
    with pytest.raises(ValueError, match=r"this model's tokenizer does not take this text \(OverflowError\)$"):
        engine.submit(SECRET)
    monkeypatch.setattr(engine.prompts, "tokenizer", tokenizer)
    assert isinstance(engine.prompts, PromptEncoder) and engine.submit("abc", params(1)).result(WAIT_S).text


def test_texts_that_are_far_too_long_cost_the_front_little(tiny_engine, monkeypatch):
    """It serves everybody else meanwhile."""
    engine, encoded = tiny_engine(max_context=256), []
    encode = PromptEncoder.encode
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, turns: encoded.append(len(turns)) or encode(self, turns))
    turns = [{"role": role, "content": ""} for _ in range(5000) for role in ("user", "assistant")]
    kept, dropped = engine.fit_chat([*turns, {"role": "user", "content": "last"}], 50)
    assert kept[0]["role"] == "user" and kept[-1]["content"] == "last" and len(kept) + dropped == 10_001
    assert len(encode(engine.prompts, kept)) + 50 <= 256 < len(encode(engine.prompts, [*turns[:2], *kept])) + 50
    assert len(encoded) < 9 and max(encoded) <= 256
    monkeypatch.undo()
    monkeypatch.setattr(engine.prompts, "tokenizer", lambda *_, **__: pytest.fail("the tokenizer was asked"))
    with pytest.raises(ValueError, match="prompt is too long: 1,000,000 characters"):
        engine.submit("x" * 1_000_000, SamplingParams(max_new_tokens=1, truncate=256))


# ---- readers and clocks


def test_a_reader_that_reads_late_or_never_holds_up_nobody_and_keeps_no_more_than_its_tokens(tiny_engine):
    engine = tiny_engine(max_context=4096)
    never = engine.submit("a", params(1, max_new_tokens=900))

    async def slow_reader(never: Generation) -> tuple[list[int], list[int]]:
        generation = engine.submit("b", params(2, max_new_tokens=300))
        events = aiter(generation)
        first = await anext(events)
        # It looks again only when everybody else has finished.
        others = [engine.submit(str(n), params(n)) for n in range(8)]
        for other in [*others, never]:
            while not other.done:
                await other.changed(timeout=1)
        assert all(len(other.events) == 40 for other in others)
        return [first.token_id, *[event.token_id async for event in events]], generation.result(WAIT_S).token_ids

    read, result = asyncio.run(slow_reader(never))
    assert read == result and len(read) == 300
    assert len(never.events) == 900 and not never._signal._tasks
    assert len(never.result_so_far().token_ids) == 900, "it can still be read"
    gone = weakref.ref(never)
    del never
    eventually(lambda: gc.collect() is not None and gone() is None)


def test_a_clock_that_jumps_changes_no_duration_and_no_history(tiny_engine, monkeypatch):
    engine = tiny_engine()
    began, true_time, jump_s = time.monotonic(), time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: true_time() + jump_s)
    first = true_time()
    generations = []
    for jump_s in (0.0, 7200.0, -86_400.0, 0.0, 3600.0):
        generation = engine.submit("abc", params(1, max_new_tokens=60), probe=True)
        next(iter(generation))
        jump_s += 1800.0
        generation.result(WAIT_S)
        generations.append(generation)
        snapshot = engine.snapshot()
        assert snapshot["throughput"]["tokens_per_second"] > 0
    elapsed = time.monotonic() - began
    for generation in generations:
        timings = generation.result().timings
        assert 0 <= timings.queue_s <= timings.first_token_s <= elapsed and 0 < timings.decode_s <= elapsed
        assert timings.tokens_per_second > 59 / elapsed
    eventually(lambda: len(engine.snapshot()["requests"]) == 5 and not engine.snapshot()["queue"]["running"])
    snapshot = engine.snapshot()
    for kept in ("history", "steps", "probes"):
        times = [entry["time"] for entry in snapshot[kept]]
        assert times == sorted(times) and first - 1 < times[0] <= times[-1] < first + elapsed + 5
    spans = engine.timeline(60, 0)["requests"]
    assert [span["request"] for span in spans] == [generation.id for generation in generations]
    stations = [span[name] for span in spans for name in ("queued", "prefill", "decode", "ended")]
    assert stations == sorted(stations)
