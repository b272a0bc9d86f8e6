"""The front: streams, stops, refusals, resumption, and what snapshots say."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_app import eventually

from engine import (
    Engine,
    EngineBusy,
    EngineConfig,
    EngineNotReady,
    EngineStopped,
    GenerationError,
    LoadingError,
    SamplingParams,
)

WAIT_S = 60


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 60, "temperature": 1.0, "ignore_eos": True, "seed": 5, **fields})


# ---- streams and results


def test_events_add_up_to_the_result(tiny_engine):
    engine = tiny_engine()
    generation = engine.submit("Once upon a time", sampled(max_new_tokens=40), client="me")
    events = list(generation)
    result = generation.result(WAIT_S)
    assert len(events) == len(result.token_ids) == len(result.logprobs) == 40
    assert "".join(event.text for event in events) == result.text == generation.text
    assert result.text == engine.prompts.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.finish_reason == "length" and result.seed == 5
    assert result.prompt_token_ids == engine.tokenize("Once upon a time") and result.prompt_tokens == 16
    assert [event.context_length for event in events] == list(range(16, 56))
    assert all(math.isfinite(event.logprob) and event.logprob <= 0 for event in events)
    timings = result.timings
    assert timings.first_token_s >= timings.prefill_s >= 0 and timings.tokens_per_second > 0


def test_async_iteration_and_changes(tiny_engine):
    engine = tiny_engine()

    async def stream() -> tuple[str, str, int]:
        generation = engine.submit("abc", sampled())
        text = "".join([event.text async for event in generation])
        other = engine.submit("abc", sampled())
        changes = 0
        while not other.done:
            changes += await other.changed(timeout=5)
        return text, other.text, changes

    text, again, changes = asyncio.run(stream())
    assert text == again and text and changes > 1


def test_a_change_that_does_not_come_ends_by_its_timeout(tiny_engine):
    engine = tiny_engine()

    async def wait() -> bool:
        generation = engine.submit("abc", SamplingParams(max_new_tokens=1))
        generation.result(WAIT_S)
        await generation.changed(timeout=1)
        return await generation.changed(timeout=0.05)

    assert asyncio.run(wait()) is False


def test_a_drawn_seed_is_reported_and_repeats_the_text(tiny_engine):
    engine = tiny_engine()
    first = engine.submit("abc", sampled(seed=None)).result(WAIT_S)
    again = engine.submit("abc", sampled(seed=first.seed)).result(WAIT_S)
    other = engine.submit("abc", sampled(seed=None)).result(WAIT_S)
    assert again.token_ids == first.token_ids
    assert other.seed != first.seed and other.token_ids != first.token_ids


def test_messages_go_through_the_chat_template_and_text_does_not(tiny_engine):
    engine = tiny_engine()
    tokenizer = engine.prompts.tokenizer
    chat = engine.tokenize([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "<start>user\nhi<end>\n<start>assistant\n"
    assert chat[0] == 257 and chat.count(257) == 2
    assert engine.tokenize("hi") == tokenizer("hi")["input_ids"]
    assert engine.tokenize([1, 2, 3]) == [1, 2, 3]


def test_stop_strings_end_the_text_before_them_and_the_tokens_with_them(tiny_engine):
    engine = tiny_engine()
    free = engine.submit("abc", sampled()).result(WAIT_S)
    stop = re.search("[ -~]{2}", free.text[10:])[0]
    start = free.text.index(stop)
    generation = engine.submit("abc", sampled(stop=[stop, "never there"]))
    shown = "".join(event.text for event in generation)
    result = generation.result(WAIT_S)
    assert result.finish_reason == "stop_sequence"
    assert shown == result.text == free.text[:start]
    assert result.token_ids == free.token_ids[: len(result.token_ids)]
    assert stop in engine.prompts.tokenizer.decode(result.token_ids)
    assert stop not in engine.prompts.tokenizer.decode(result.token_ids[:-1])
    eventually(lambda: engine.snapshot()["queue"]["running"] == 0)


def test_the_stop_string_has_the_last_word_over_length(tiny_engine):
    engine = tiny_engine()
    free = engine.submit("abc", sampled()).result(WAIT_S)
    text = [engine.prompts.tokenizer.decode(token_id) for token_id in free.token_ids]
    last = next(i for i in range(10, 60) if " " < text[i] < "~" and text[i] not in text[:i])
    stop = text[last]
    result = engine.submit("abc", sampled(max_new_tokens=last + 1, stop=stop)).result(WAIT_S)
    assert result.token_ids == free.token_ids[: last + 1]
    assert result.finish_reason == "stop_sequence" and stop not in result.text


def test_truncate_keeps_the_right_end(tiny_engine):
    engine = tiny_engine()
    result = engine.submit("abcdefgh", SamplingParams(max_new_tokens=1, truncate=3)).result(WAIT_S)
    assert result.prompt_token_ids == engine.tokenize("fgh")
    for too_long in ("x" * 1_000_000 + "fgh", [5] * 9999 + engine.tokenize("fgh")):
        result = engine.submit(too_long, SamplingParams(max_new_tokens=1, truncate=3)).result(WAIT_S)
        assert result.prompt_token_ids == engine.tokenize("fgh")


def test_greedy_at_temperature_zero_whatever_else_is_set(tiny_engine):
    engine = tiny_engine()
    greedy = engine.submit("abc", SamplingParams(max_new_tokens=20)).result(WAIT_S)
    cold = engine.submit("abc", SamplingParams(max_new_tokens=20, temperature=0, top_k=50, top_p=0.5)).result(WAIT_S)
    assert greedy.token_ids == cold.token_ids


# ---- ends before the end


def test_cancelling_keeps_what_there_is_and_frees_the_row(tiny_engine):
    engine = tiny_engine(max_context=4096)
    generation = engine.submit("abc", sampled(max_new_tokens=3000))
    next(iter(generation))
    generation.cancel()
    generation.cancel()
    result = generation.result(WAIT_S)
    assert result.finish_reason == "cancelled" and 0 < len(result.token_ids) < 3000
    assert result.text == "".join(event.text for event in generation)
    eventually(lambda: engine.snapshot()["queue"]["running"] == 0)


def test_a_result_that_is_not_there_in_time_says_so(tiny_engine):
    engine = tiny_engine(max_context=4096)
    generation = engine.submit("abc", sampled(max_new_tokens=3000))
    with pytest.raises(TimeoutError):
        generation.result(timeout=0.05)
    generation.cancel()


def test_a_full_line_refuses_at_once_and_says_when_to_come_back(tiny_engine):
    engine = tiny_engine(max_batch_size=2, max_waiting=3, max_context=4096)
    engine.submit("warm", SamplingParams(max_new_tokens=5)).result(WAIT_S)
    accepted = [engine.submit("abc", sampled(max_new_tokens=2000), client=i) for i in range(5)]
    with pytest.raises(EngineBusy, match=r"3 requests are waiting. Come back in about \d+ s") as refusal:
        engine.submit("abc", sampled())
    assert refusal.value.retry_after_s >= 1
    eventually(lambda: accepted[1].position == 0 and accepted[2].position == 1)
    assert [generation.position for generation in accepted] == [0, 0, 1, 2, 3]
    assert accepted[4].wait_estimate_s > 0
    accepted[3].cancel()
    assert [generation.position for generation in accepted] == [0, 0, 1, 0, 2]
    for generation in accepted:
        generation.cancel()
    assert engine.submit("abc", SamplingParams(max_new_tokens=3)).result(WAIT_S).finish_reason == "length"


def test_many_at_once_share_one_batch(tiny_engine):
    engine = tiny_engine(max_batch_size=8, max_waiting=100)
    generations = [engine.submit(f"number {i}", sampled(seed=i), client=i) for i in range(40)]
    texts = [generation.result(WAIT_S).text for generation in generations]
    assert max(generation.shared_with for generation in generations) == 7
    assert engine.snapshot()["queue"]["peak_batch_size"] == 8
    alone = engine.submit("number 17", sampled(seed=17)).result(WAIT_S).text
    assert texts[17] == alone


# ---- the worker


def test_a_killed_worker_is_replaced_and_everyone_goes_on_token_for_token(tiny_engine):
    engine = tiny_engine("process", max_context=4096, max_batch_size=2)
    expected = [engine.submit(f"n {i}", sampled(seed=i, max_new_tokens=400)).result(WAIT_S).token_ids for i in range(3)]
    generations = [engine.submit(f"n {i}", sampled(seed=i, max_new_tokens=400)) for i in range(3)]
    eventually(lambda: len(generations[0].events) > 20)
    os.kill(engine._workers.current.pid, signal.SIGKILL)
    results = [generation.result(WAIT_S) for generation in generations]
    assert [result.token_ids for result in results] == expected
    assert generations[0].resumed and not generations[2].resumed, "one that only waited has lost nothing"
    assert engine.snapshot()["totals"]["restarts"] == 1

    # The same sequence loses its worker a second time: it fails clearly, and later requests work.
    twice = engine.submit("abc", sampled(max_new_tokens=3000))
    for _ in range(2):
        before = len(twice.events)
        eventually(lambda before=before: len(twice.events) > before)
        os.kill(engine._workers.current.pid, signal.SIGKILL)
        eventually(lambda: twice.done or engine.snapshot()["worker"] == "restarting")
    with pytest.raises(GenerationError, match="died twice"):
        twice.result(WAIT_S)
    assert engine.submit("n 0", sampled(seed=0, max_new_tokens=400)).result(WAIT_S).token_ids == expected[0]


def test_the_worker_ends_with_its_parent_however_that_ends(tiny_folder):
    script = (
        "import sys, os; from engine import *\n"
        f"engine = Engine.from_pretrained({str(tiny_folder)!r}, device='cpu')\n"
        "engine.submit('abc', SamplingParams(max_new_tokens=1000))\n"
        "print(engine._workers.current.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    with parent:
        worker_pid = int(parent.stdout.readline())
        assert Path(f"/proc/{worker_pid}").exists()
        parent.kill()
    eventually(lambda: not Path(f"/proc/{worker_pid}").exists() or "Z" in state_of(worker_pid))


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_the_front_does_without_torch(tiny_folder, embedded_folder):
    script = (
        "import sys; from engine import *\n"
        "engine = Engine(EngineConfig(device='cpu'))\n"
        "engine.wait_ready(60); engine.submit('abc', SamplingParams(max_new_tokens=2)).result(60); engine.close()\n"
        "print('torch' in sys.modules, 'gradio' in sys.modules, 'plotly' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["False"] * 3, done.stderr


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(LoadingError, match="KVSCOPE_MODEL") as error:
        Engine.from_pretrained(str(tmp_path / "nothing"), device="cpu", host="thread")
    assert "\n" not in str(error.value)


def test_nothing_can_be_asked_of_an_engine_that_loads_or_is_closed(tiny_folder):
    engine = Engine(EngineConfig(model=str(tiny_folder), device="cpu"), host="thread")
    try:
        with pytest.raises(EngineNotReady, match="still loading"):
            engine.submit("abc")
        engine.wait_ready(WAIT_S)
        generation = engine.submit("abc", SamplingParams(max_new_tokens=1500))
    finally:
        engine.close()
    with pytest.raises(GenerationError, match="closed"):
        generation.result(WAIT_S)
    with pytest.raises(EngineStopped, match="closed"):
        engine.submit("abc")
    assert engine.snapshot()["worker"] == "stopped"


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ("a" * 5000, r"\(5000 tokens\)"),
        ("a" * 1_000_000, "too long"),
        ("half \ud83d of a pair", "character 5 is half of a surrogate pair"),
        (None, "text, a list of token ids or a list of chat messages"),
        (17, "text, a list of token ids"),
        ([1, 2, 999], "from 0 to 258"),
        ([1, True], "from 0 to 258"),
        ([1, -1], "from 0 to 258"),
        ([1, "2"], "from 0 to 258"),
        ([{"role": "robot", "content": "hi"}], "role"),
        ([{"role": "user", "content": None}], "content"),
        ([{"content": "hi"}], "role"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_queued(tiny_engine, prompt, message):
    engine = tiny_engine(max_context=4096)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(max_new_tokens=5))
    assert engine.snapshot()["totals"]["requests"] == 0


def test_control_characters_are_text_like_any_other(tiny_engine):
    engine = tiny_engine()
    result = engine.submit("nul \x00 bell \x07 \u202e", SamplingParams(max_new_tokens=3)).result(WAIT_S)
    assert len(result.token_ids) == 3


def test_prompt_and_new_tokens_beyond_the_context_name_both(tiny_engine):
    engine = tiny_engine(max_context=64)
    with pytest.raises(ValueError, match=r"prompt \(60 tokens\) and max_new_tokens \(10\) must together be at most 64"):
        engine.submit("a" * 60, SamplingParams(max_new_tokens=10))
    assert engine.submit("a" * 60, SamplingParams(max_new_tokens=4, ignore_eos=True)).result(WAIT_S).text is not None


def test_a_long_chat_drops_its_oldest_turns_and_keeps_the_system_message(tiny_engine):
    engine = tiny_engine(max_context=256)
    messages = [{"role": "system", "content": "be kind"}]
    for turn in range(10):
        messages += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": "x" * 20}]
    messages.append({"role": "user", "content": "last"})
    kept, dropped = engine.fit_chat(messages, 50)
    assert dropped % 2 == 0 and 0 < dropped < 20
    assert kept == [messages[0], *messages[1 + dropped :]]
    assert len(engine.tokenize(kept)) + 50 <= 256
    assert engine.fit_chat(kept, 50) == (kept, 0)


# ---- the race


def test_a_race_ends_in_a_verdict(tiny_engine):
    engine = tiny_engine()
    result = engine.compare("The lighthouse", 24).result(WAIT_S)
    assert set(result) == {"conditions", "lanes", "ratio", "identical", "first_difference", "gap"}
    naive, cached = result["lanes"]
    assert (naive["name"], cached["name"]) == ("naive", "cached")
    for lane in (naive, cached):
        assert lane["tokens"] == len(lane["step_ms"]) == 24
        assert lane["total_s"] == pytest.approx(sum(lane["step_ms"]) / 1000)
        assert lane["ms_per_token"] == pytest.approx(lane["total_s"] * 1000 / 24)
    assert result["ratio"] == pytest.approx(naive["ms_per_token"] / cached["ms_per_token"])
    assert result["identical"] is True and result["first_difference"] is None
    assert result["conditions"]["prompt_tokens"] == 14 and result["conditions"]["dtype"] == "float32"
    json.dumps(result)


def test_a_race_is_bounded_and_can_be_cancelled(tiny_engine):
    engine = tiny_engine(max_race_tokens=64)
    with pytest.raises(ValueError, match=r"new_tokens \(60\) must together be at most 64"):
        engine.compare("a" * 10, 60)
    with pytest.raises(ValueError, match="new_tokens must be a whole number from 1 to 64, not 0"):
        engine.compare("a", 0)
    race = engine.compare("a" * 10, 50)
    race.cancel()
    with pytest.raises(GenerationError, match="cancelled"):
        race.result(WAIT_S)


# ---- the snapshot


def test_the_snapshot_is_json_and_says_what_the_contract_says(tiny_engine):
    engine = tiny_engine(max_context=4096)
    generation = engine.submit("secret words", sampled(max_new_tokens=2000), client="me", probe=True)
    eventually(lambda: engine.snapshot()["queue"]["running"] and len(generation.events) > 30 and generation.probes)
    snapshot = engine.snapshot()
    text = json.dumps(snapshot, allow_nan=False)
    assert "secret" not in text and '"me"' not in text
    assert set(snapshot["model"]) >= {
        "id", "source", "dtype", "device", "layers", "kv_heads", "head_dim", "bytes_per_token",
    }  # fmt: skip
    assert snapshot["model"]["bytes_per_token"] == 2 * 3 * 2 * 8 * 4
    assert set(snapshot["queue"]) >= {"waiting", "running", "max_batch_size", "peak_batch_size"}
    (slot,) = snapshot["cache"]["slots"]
    assert (slot["state"], slot["client"], slot["prompt_tokens"]) == ("running", engine.client_number("me"), 12)
    assert snapshot["cache"]["used_bytes"] == slot["tokens"] * snapshot["model"]["bytes_per_token"]
    assert snapshot["cache"]["allocated_bytes"] >= snapshot["cache"]["used_bytes"]
    assert set(snapshot["steps"][-1]) >= {"time", "batch_size", "prefill_tokens", "forward_ms", "decode_ms"}
    assert snapshot["totals"]["requests"] == 1 and snapshot["totals"]["tokens"] > 0
    assert snapshot["throughput"]["tokens_per_second"] > 0
    (request,) = snapshot["requests"]
    assert request["request"] == generation.id and request["queued"] <= request["prefill"] <= request["decode"]
    assert snapshot["probes"][0]["naive_ms"] > 0 and snapshot["history"][-1]["used"][str(generation.id)] > 0
    generation.cancel()
    eventually(lambda: [s["state"] for s in engine.snapshot()["cache"]["slots"]] == ["retained"])
    assert engine.snapshot()["cache"]["used_bytes"] == 0
