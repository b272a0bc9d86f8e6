"""The running app over HTTP: its API, its refusals, its limits, and how it starts and ends."""

import asyncio
import json
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from running_app import (
    DEFAULTS,
    PLAIN,
    ROOT,
    ApiError,
    EventParser,
    RunningApp,
    eventually,
    generate_data,
    running_app,
    save_talkative_model,
    stream,
)
from tiny import SPECIAL

from engine import SamplingParams

CONTEXT = 4096
BATCH = 16


@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("talkative"))


@pytest.fixture(scope="module")
def app(talkative) -> Iterator[RunningApp]:
    with running_app(talkative, KVSCOPE_MAX_CONTEXT=CONTEXT, KVSCOPE_MAX_BATCH_SIZE=BATCH) as app:
        yield app


@pytest.fixture(scope="module")
def client(app) -> Client:
    return Client(app.url, verbose=False, ssl_verify=False)


def generate(app: RunningApp, prompt: Any, **overrides: Any) -> list[str]:
    """Everything that `/generate` streams."""
    return list(stream(app, "generate", *generate_data(prompt, **overrides)))


def assert_grows(texts: list[str]) -> None:
    assert len(texts) > 2, texts
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert len(texts[-1]) > len(texts[0])


# ---- plain HTTP


def metrics(app: RunningApp) -> dict[str, float]:
    """Every number by its name and labels."""
    lines = re.findall(r"^(kvscope_\S+) (\S+)$", app.get("metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def test_metrics_are_prometheus_text_without_anybodys_words(app):
    before = metrics(app)
    generate(app, "my secret words", max_new_tokens=5)
    with pytest.raises(ApiError):
        generate(app, "my secret words", max_new_tokens=0)
    app.stats()  # what is published is up to a quarter of a second old; now it is not
    assert app.get("metrics").headers["content-type"].startswith("text/plain")
    values = metrics(app)
    assert values["kvscope_ready"] == 1
    assert {"kvscope_requests_waiting", "kvscope_requests_running", "kvscope_worker_restarts_total"} <= set(values)
    more = {name: value - before.get(name, 0) for name, value in values.items()}
    assert (more["kvscope_requests_total"], more["kvscope_tokens_total"]) == (1, 5)
    assert (more["kvscope_first_token_seconds_count"], more["kvscope_token_gap_seconds_count"]) == (1, 4)
    assert more['kvscope_first_token_seconds_bucket{le="+Inf"}'] == 1
    assert 0 < more["kvscope_token_gap_seconds_sum"] < 60
    assert more['kvscope_requests_ended_total{reason="length"}'] == 1
    assert more['kvscope_errors_total{kind="invalid"}'] == 1
    for path in ("metrics", "kvscope/live", "kvscope/timeline?window=60&back=0"):
        assert "secret" not in app.get(path).text
    assert "secret" not in json.dumps(app.stats())
    assert "secret" not in app.log


def test_each_request_leaves_one_line_of_lengths_and_times(app):
    known = {line["request"] for line in app.requests_log}
    answer = generate(app, "my secret words", max_new_tokens=12, seed=3)[-1]
    (line,) = [line for line in app.requests_log if line["request"] not in known]
    assert line["event"] == "request ended" and line["finish_reason"] == "length" and line["client"] > 0
    assert (line["prompt_tokens"], line["new_tokens"]) == (len("my secret words"), 12)
    assert 0 <= line["queue_s"] <= line["first_token_s"] < 60
    assert set(line) == {
        "time", "event", "request", "client", "finish_reason", "prompt_tokens", "reused_tokens", "new_tokens",
        "queue_s", "prefill_s", "first_token_s", "decode_s", "tokens_per_second", "resumed",
    }  # fmt: skip
    written = json.dumps(app.requests_log, ensure_ascii=False)
    assert "secret" not in written and answer not in written


@pytest.mark.parametrize("path", ["gradio_api/upload", "upload", "gradio_api/upload/"])
def test_uploads_are_refused(app, path):
    response = httpx.post(app.url + path, files={"files": ("a.txt", b"text")}, **PLAIN)
    assert (response.status_code, response.text) == (403, "This page takes no files.")


def test_plotly_comes_from_here_and_may_be_kept(app):
    response = app.get("kvscope/plotly.min.js")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/javascript")
    assert re.search(r"public, max-age=\d{5,}", response.headers["cache-control"])
    assert b"plotly.js" in response.content[:200]


@pytest.mark.parametrize(
    "path",
    [
        "kvscope/../../requirements.txt",
        "kvscope/%2e%2e/%2e%2e/requirements.txt",
        "kvscope/..%2f..%2frequirements.txt",
        "kvscope//etc/passwd",
        "kvscope/%2fetc%2fpasswd",
        "gradio_api/file=requirements.txt",
        "gradio_api/file=app.py",
        "gradio_api/file=demo/../requirements.txt",
        f"gradio_api/file={ROOT}/requirements.txt",
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=/proc/self/environ",
        "static/../../requirements.txt",
        "static/..%2f..%2f..%2frequirements.txt",
        "theme.css/../../requirements.txt",
    ],
)
def test_no_file_of_the_server_can_be_fetched(app, path):
    # By hand: clients tidy such paths up before they send them.
    host = {"Host": f"127.0.0.1:{app.port}"}
    url = httpx.URL(app.url).copy_with(raw_path=f"/{path}".encode())
    response = httpx.get(url, headers=host, **PLAIN)
    assert response.status_code in (400, 403, 404), response.text[:200]
    assert not re.search(r"gradio>=|root:|import spaces|KVSCOPE_", response.text)


# ---- the API as its clients use it


def test_only_the_five_endpoints_are_listed(client):
    api = client.view_api(return_format="dict", print_info=False)
    assert set(api["named_endpoints"]) == {"/generate", "/details", "/chat", "/compare", "/stats"}
    assert not api["unnamed_endpoints"]


@pytest.mark.parametrize("endpoint", ["/generate", "/details"])
def test_every_parameter_is_listed_by_name_with_its_default_and_type(client, endpoint):
    api = client.view_api(return_format="dict", print_info=False)["named_endpoints"][endpoint]
    parameters = {p["parameter_name"]: p for p in api["parameters"]}
    # These came first, and stay where they were.
    assert list(parameters)[:7] == [
        "prompt", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed",
    ]  # fmt: skip
    assert set(parameters) == {"prompt", *(field.name for field in fields(SamplingParams))}
    assert [name for name, p in parameters.items() if not p["parameter_has_default"]] == ["prompt"]
    assert {name: p["parameter_default"] for name, p in parameters.items() if name != "prompt"} == DEFAULTS
    kinds = {name: p["python_type"]["type"] for name, p in parameters.items()}
    assert kinds["prompt"] == "str" and kinds["max_new_tokens"] == "int" and kinds["watermark"] == "bool"
    assert "list[str]" in kinds["stop"] and "dict" in kinds["grammar"]


def test_generate_streams_growing_text_and_ends_with_all_of_it(client):
    asked = {"max_new_tokens": 150, "temperature": 1.0, "api_name": "/generate"}
    job = client.submit("Once", seed=11, **asked)
    texts = list(job)
    assert_grows(texts)
    again = client.predict("Once", seed=11, **asked)
    assert again == texts[-1] == job.result()
    other = client.predict("Once", seed=12, **asked)
    assert other != again


def test_generate_needs_nothing_but_a_prompt(app, client):
    before = app.stats()["totals"]["tokens"]
    assert client.predict("Once", api_name="/generate")
    assert app.stats()["totals"]["tokens"] - before == 128


def test_generate_is_greedy_at_temperature_zero(app):
    first, second = (generate(app, "abc", max_new_tokens=40, temperature=0, seed=seed)[-1] for seed in (1, 2))
    assert first == second


def test_over_plain_http_what_is_left_out_at_the_end_has_its_default(app):
    seven = ["Once", 40, 0.7, 0.95, 50, 1.0, 11]
    texts = list(stream(app, "generate", *seven))
    assert texts[-1] == generate(app, "Once", max_new_tokens=40, seed=11)[-1]
    assert list(stream(app, "details", "Once", 40))[-1]["new_tokens"] == 40
    assert list(stream(app, "generate", "Once", 3))[-1]


def call_by_name(app: RunningApp, endpoint: str, **values: Any) -> httpx.Response:
    """Gradio's other plain call: values by name; the events where it was accepted, the refusal where not."""
    response = httpx.post(f"{app.url}gradio_api/call/v2/{endpoint}", json=values, **PLAIN)
    if response.status_code == 200:
        return app.get(f"gradio_api/call/{endpoint}/{response.json()['event_id']}")
    return response


def test_unknown_names_and_too_many_values_are_refused_with_a_sentence(app, client):
    requests, logged = app.stats()["totals"]["requests"], len(app.log)
    with pytest.raises(TypeError, match="`temprature` is not a valid key-word argument"):
        client.predict("a", temprature=1, api_name="/generate")
    for endpoint, values, sentence in [
        ("generate", {"prompt": "a", "temprature": 1}, "Parameter `temprature` is not a valid key-word argument."),
        ("details", {"prompt": "a", "self": 1}, "Parameter `self` is not a valid key-word argument."),
        ("generate", {}, "No value provided for required argument: prompt"),
        ("nothing", {"prompt": "a"}, "there is no endpoint /nothing"),
    ]:
        response = call_by_name(app, endpoint, **values)
        assert (response.status_code, response.json()) == (422, {"error": sentence})
    with pytest.raises(ApiError, match="^/generate takes at most 17 values, not 18$"):
        list(stream(app, "generate", *generate_data("a"), "more"))
    with pytest.raises(ApiError, match="^prompt must be text, not NoneType$"):
        list(stream(app, "generate"))
    assert app.stats()["totals"]["requests"] == requests
    assert app.log[logged:] == ""
    # Known names are served.
    events = call_by_name(app, "generate", prompt="a", max_new_tokens=3, stop=["zzz"], grammar=None)
    assert events.status_code == 200 and "event: complete" in events.text


def test_details_say_everything_about_each_token(app, client):
    asked = {"max_new_tokens": 24, "temperature": 1.0, "seed": 4, "top_n_tokens": 3, "prompt_logprobs": True}
    *progress, last = list(client.submit("Once upon", **asked, api_name="/details"))
    assert all(set(part) == {"text", "finish_reason"} and part["finish_reason"] is None for part in progress)
    assert progress and all(last["text"].startswith(part["text"]) for part in progress)
    assert (last["finish_reason"], last["seed"], last["new_tokens"]) == ("length", 4, 24)
    assert last["text"] == "".join(token["text"] for token in last["tokens"])
    assert last["text"] == client.predict("Once upon", **asked, api_name="/generate")
    assert len(last["tokens"]) == last["new_tokens"]
    for token in last["tokens"]:
        assert set(token) == {"token_id", "text", "logprob", "special", "top_tokens", "forward_ms", "decode_ms"}
        best = [top["logprob"] for top in token["top_tokens"]]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert sum(map(math.exp, best)) <= 1 + 1e-5 and token["logprob"] <= best[0] + 1e-5
        same = [top["logprob"] for top in token["top_tokens"] if top["token_id"] == token["token_id"]]
        assert same == pytest.approx([token["logprob"]] * len(same))
        assert token["forward_ms"] > 0 and token["decode_ms"] >= 0
    first, *rest = last["prompt_logprobs"]
    assert len(rest) + 1 == last["prompt_tokens"] == len("Once upon")
    assert first is None and all(logprob < 0 for logprob in rest)
    assert set(last["timings"]) == {"queue_s", "prefill_s", "first_token_s", "decode_s", "tokens_per_second"}


def test_a_drawn_seed_is_told_and_draws_the_same_again(app):
    first = list(stream(app, "details", *generate_data("Once", max_new_tokens=40, temperature=1.0)))[-1]
    again = list(stream(app, "details", *generate_data("Once", max_new_tokens=40, temperature=1.0, seed=first["seed"])))
    assert again[-1]["text"] == first["text"]
    assert [t["token_id"] for t in again[-1]["tokens"]] == [t["token_id"] for t in first["tokens"]]
    assert first["tokens"][0]["top_tokens"] == [] and first["prompt_logprobs"] is None


def test_each_parameter_reaches_the_engine(app):
    def said(**overrides: Any) -> dict[str, Any]:
        data = generate_data("Once upon a time", **{"max_new_tokens": 60, "seed": 3, **overrides})
        return list(stream(app, "details", *data))[-1]

    usual = said()
    for changed in (
        {"do_sample": False},
        {"typical_p": 0.3},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"truncate": 3},
        {"watermark": True},
    ):
        assert said(**changed)["text"] != usual["text"], changed
    letter = usual["text"].strip()[5]
    stopped = said(stop=[letter])
    assert stopped["finish_reason"] == "stop_sequence"
    assert stopped["text"] == usual["text"][: usual["text"].index(letter)]
    assert said(truncate=3)["prompt_tokens"] == 3


CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "founded": {"type": "integer", "minimum": 0, "maximum": 2000},
        "kinds": {"type": "array", "items": {"enum": ["port", "capital"]}, "maxItems": 2},
    },
    "required": ["name", "founded", "kinds"],
    "additionalProperties": False,
}

MONTH = "[0-9]{4}-[01][0-9]"


def test_answers_fit_the_schema_or_the_pattern(ending):
    client = Client(ending.url, verbose=False, ssl_verify=False)
    for seed in range(5):
        asked = {"max_new_tokens": 240, "temperature": 1.0, "seed": seed}
        *_, last = client.submit("a city", grammar={"type": "json", "value": CITY}, **asked, api_name="/details")
        assert last["finish_reason"] == "eos_token" and last["tokens"][-1]["special"]
        city = json.loads(last["text"])
        assert set(city) == {"name", "founded", "kinds"}
        assert 1 <= len(city["name"]) <= 12 and 0 <= city["founded"] <= 2000 and isinstance(city["founded"], int)
        assert len(city["kinds"]) <= 2 and set(city["kinds"]) <= {"port", "capital"}
        same = client.predict(
            "a city", grammar={"type": "json", "value": json.dumps(CITY)}, **asked, api_name="/generate"
        )
        assert same == last["text"]
        month = {"type": "regex", "value": MONTH}
        assert re.fullmatch(MONTH, client.predict("on", grammar=month, **asked, api_name="/generate"))


def test_an_answer_cut_at_its_limit_is_the_beginning_of_one_that_fits(ending):
    schema = {"type": "json", "value": CITY}
    cut = generate(ending, "a city", max_new_tokens=12, temperature=1.0, seed=1, grammar=schema)[-1]
    assert cut.startswith('{"name": "')


def test_the_end_of_an_answer_can_be_ignored(ending):
    data = {"max_new_tokens": 600, "temperature": 2.0, "seed": 1}
    ended = list(stream(ending, "details", *generate_data("a", **data)))[-1]
    assert ended["finish_reason"] == "eos_token" and ended["tokens"][-1]["token_id"] >= 256
    assert len(SPECIAL) == 3 and ended["new_tokens"] < 600
    on = list(stream(ending, "details", *generate_data("a", ignore_eos=True, **data)))[-1]
    assert (on["finish_reason"], on["new_tokens"]) == ("length", 600)


def test_the_tokens_of_answers_are_told_to_nobody_who_does_not_know_the_key(app):
    response = app.get("kvscope/tokens", params={"answer": "guessed", "from": 3})
    assert response.json() == {"from": 3, "tokens": None, "kept": 8}
    assert response.headers["cache-control"] == "no-store"
    assert app.get("kvscope/tokens").json()["tokens"] is None
    for start in ("-1", "x", "1e3", "9" * 30, "²"):
        response = app.get("kvscope/tokens", params={"answer": "guessed", "from": start})
        assert (response.status_code, response.text) == (422, "from must be a whole number from 0")


def test_chat_answers_after_a_history(client):
    texts = list(client.submit("hello", api_name="/chat"))
    assert_grows(texts)
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    assert client.predict("and now?", history, api_name="/chat")


def test_compare_streams_and_ends_in_a_verdict(client):
    *progress, verdict = list(client.submit("The lighthouse", 24, api_name="/compare"))
    assert progress and {"state", "lanes"} <= set(progress[0])
    assert set(verdict) == {"conditions", "lanes", "ratio", "identical", "first_difference", "gap"}
    naive, cached = verdict["lanes"]
    assert (naive["name"], cached["name"]) == ("naive", "cached")
    assert naive["tokens"] == cached["tokens"] == 24
    assert verdict["ratio"] == pytest.approx(naive["ms_per_token"] / cached["ms_per_token"])
    assert verdict["identical"] is True and verdict["first_difference"] is None


def test_stats_are_a_dict_as_the_contract_says(client):
    stats = client.predict(api_name="/stats")
    assert set(stats) >= {"model", "queue", "cache", "throughput", "totals", "steps", "worker"}
    assert set(stats["model"]) >= {
        "id", "source", "dtype", "device", "layers", "kv_heads", "head_dim", "bytes_per_token",
    }  # fmt: skip
    assert set(stats["queue"]) >= {"waiting", "running", "max_batch_size", "peak_batch_size"}
    assert set(stats["cache"]) >= {"allocated_bytes", "used_bytes", "slots"}
    assert stats["queue"]["max_batch_size"] == BATCH and stats["worker"] == "ready"


# ---- bad input

WHOLE = r"{} must be a whole number from {} to \d+, not "
REFUSED = {
    "empty prompt": (generate_data(""), "prompt must not be empty"),
    "null prompt": (generate_data(None), "prompt must be text, not NoneType"),
    "list as prompt": (generate_data(["a"]), "prompt must be text, not list"),
    "number as prompt": (generate_data(3), "prompt must be text, not int"),
    "half a character": (generate_data("half \ud83d of a smile"), "prompt must .* character 5 is half of a surrogate"),
    "too long": (
        generate_data("a" * CONTEXT),
        rf"prompt \({CONTEXT} tokens\) and max_new_tokens \(128\) must together be at most {CONTEXT} tokens",
    ),
    "too many tokens": (generate_data("a", max_new_tokens=CONTEXT), rf"together be at most {CONTEXT} tokens"),
    "a megabyte": (generate_data("a" * 1_000_000), rf"1,000,000 characters do not fit a context of {CONTEXT} tokens"),
    "no tokens": (generate_data("a", max_new_tokens=0), WHOLE.format("max_new_tokens", 1) + "0"),
    "negative tokens": (generate_data("a", max_new_tokens=-5), WHOLE.format("max_new_tokens", 1) + "-5"),
    "huge tokens": (generate_data("a", max_new_tokens=10**30), WHOLE.format("max_new_tokens", 1) + "1000"),
    "NaN tokens": (generate_data("a", max_new_tokens=math.nan), WHOLE.format("max_new_tokens", 1) + "nan"),
    "a string of tokens": (generate_data("a", max_new_tokens="7"), WHOLE.format("max_new_tokens", 1) + "'7'"),
    "null tokens": (generate_data("a", max_new_tokens=None), WHOLE.format("max_new_tokens", 1) + "None"),
    "half a token": (generate_data("a", max_new_tokens=1.5), WHOLE.format("max_new_tokens", 1) + "1.5"),
    "NaN temperature": (
        generate_data("a", temperature=math.nan),
        "temperature must be a number from 0 to 100, not nan",
    ),
    "infinite temperature": (generate_data("a", temperature=math.inf), "temperature must be a number from 0 to 100"),
    "negative temperature": (generate_data("a", temperature=-0.1), "temperature must be a number from 0 to 100"),
    "worded temperature": (generate_data("a", temperature="hot"), "temperature must be a number from 0 to 100"),
    "no top_p": (generate_data("a", top_p=0), "top_p must be a number above 0 and at most 1, not 0"),
    "top_p of 2": (generate_data("a", top_p=2), "top_p must be a number above 0 and at most 1, not 2"),
    "negative top_k": (generate_data("a", top_k=-1), WHOLE.format("top_k", 0) + "-1"),
    "list as top_k": (generate_data("a", top_k=[1]), WHOLE.format("top_k", 0)),
    "no penalty": (generate_data("a", repetition_penalty=0), "repetition_penalty must be a number above 0"),
    "negative penalty": (generate_data("a", repetition_penalty=-1), "repetition_penalty must be a number above 0"),
    "negative seed": (generate_data("a", seed=-1), WHOLE.format("seed", 0) + "-1"),
    "huge seed": (generate_data("a", seed=2**63), WHOLE.format("seed", 0)),
    "worded seed": (generate_data("a", seed="lucky"), WHOLE.format("seed", 0) + "'lucky'"),
    "seed that is true": (generate_data("a", seed=True), WHOLE.format("seed", 0) + "True"),
    "worded choice": (generate_data("a", do_sample="yes"), "do_sample must be true, false or None, not 'yes'"),
    "no typical_p": (generate_data("a", typical_p=0), "typical_p must be a number above 0 and at most 1, not 0"),
    "null typical_p": (
        generate_data("a", typical_p=None),
        "typical_p must be a number above 0 and at most 1, not None",
    ),
    "huge frequency penalty": (
        generate_data("a", frequency_penalty=3),
        "frequency_penalty must be a number from -2 to 2, not 3",
    ),
    "null frequency penalty": (generate_data("a", frequency_penalty=None), "frequency_penalty must be .* not None"),
    "number as stop": (generate_data("a", stop=3), "stop must be a string or a list of strings, not int"),
    "numbers as stop": (generate_data("a", stop=[3]), "stop must be a string or a list of strings"),
    "empty stop": (generate_data("a", stop=[""]), "stop must hold at most 16 strings of 1 to 256 characters each"),
    "many stops": (generate_data("a", stop=["x"] * 17), "stop must hold at most 16 strings"),
    "null end": (generate_data("a", ignore_eos=None), "ignore_eos must be true or false, not None"),
    "cut to nothing": (generate_data("a", truncate=0), WHOLE.format("truncate", 1) + "0"),
    "too many tops": (generate_data("a", top_n_tokens=21), "top_n_tokens must be a whole number from 0 to 20, not 21"),
    "null tops": (generate_data("a", top_n_tokens=None), "top_n_tokens must be a whole number from 0 to 20, not None"),
    "worded logprobs": (generate_data("a", prompt_logprobs="yes"), "prompt_logprobs must be true or false, not 'yes'"),
    "numbered watermark": (generate_data("a", watermark=1), "watermark must be true or false, not 1"),
    "grammar as text": (
        generate_data("a", grammar="[0-9]+"),
        r"grammar must be \{\"type\": \"json\".* not '\[0-9\]\+'",
    ),
    "unknown grammar": (generate_data("a", grammar={"type": "lark", "value": "x"}), "grammar must be .* not .*lark"),
    "grammar with more": (
        generate_data("a", grammar={"type": "regex", "value": "x", "flags": "i"}),
        "grammar must be .* not .*flags",
    ),
    "schema that does not parse": (
        generate_data("a", grammar={"type": "json", "value": "{"}),
        r"grammar must be a JSON schema that can be followed, not '\{': ",
    ),
    "schema of no type": (
        generate_data("a", grammar={"type": "json", "value": {"type": "strin"}}),
        "grammar must be a JSON schema that can be followed, not .*strin",
    ),
    "pattern that does not parse": (
        generate_data("a", grammar={"type": "regex", "value": "(a"}),
        r"grammar must be a regular expression that can be followed, not '\(a': ",
    ),
    "pattern that cannot match": (
        generate_data("a", grammar={"type": "regex", "value": r"a[^\s\S]"}),
        "grammar must be a regular expression that can be followed, not .*: nothing can match it",
    ),
}
REFUSED_ELSEWHERE = {
    "empty message": ("chat", ["  ", None], "message must not be empty"),
    "null message": ("chat", [None, None], "message must be text, not NoneType"),
    "worded history": ("chat", ["hi", "before"], "history must be a list"),
    "unknown role": ("chat", ["hi", [{"role": "god", "content": "x"}]], "by system, user or assistant"),
    "turn without text": ("chat", ["hi", [{"role": "user", "content": None}]], "history content must be text"),
    "pairs as history": ("chat", ["hi", [["a", "b"]]], "history must be a list"),
    "long message": ("chat", ["a" * CONTEXT, None], rf"must together be at most {CONTEXT} tokens"),
    "race without prompt": ("compare", ["", 8], "prompt must not be empty"),
    "race with a list": ("compare", [["a"], 8], "prompt must be text, not list"),
    "race over nothing": ("compare", ["a", 0], WHOLE.format("new_tokens", 1) + "0"),
    "race over a word": ("compare", ["a", "far"], WHOLE.format("new_tokens", 1) + "'far'"),
    "race too long": ("compare", ["a" * 600, 8], r"prompt \(600 tokens\) and new_tokens \(8\) .* at most 512 tokens"),
}
ALL_REFUSED = {**{name: ("generate", *case) for name, case in REFUSED.items()}, **REFUSED_ELSEWHERE}
ALL_REFUSED["details, too"] = ("details", *REFUSED["no top_p"])


def test_bad_input_gets_a_sentence_and_queues_nothing(app, subtests):
    before, logged = app.stats(), len(app.log)
    for name, (endpoint, data, sentence) in ALL_REFUSED.items():
        with subtests.test(name):
            with pytest.raises(ApiError, match=sentence) as refusal:
                list(stream(app, endpoint, *data))
            assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300
    # What comes after them is served.
    assert generate(app, "good", max_new_tokens=1)
    after = app.stats()
    assert after["totals"]["requests"] - before["totals"]["requests"] == 1
    assert after["races"] == {"waiting": 0, "running": False, "paused": False}
    # A refusal is not a crash: nothing about it is logged.
    assert app.log[logged:] == ""


def test_a_refusal_reaches_python_clients_as_a_sentence(client):
    with pytest.raises(AppError, match="temperature must be a number from 0 to 100, not 101"):
        client.predict("a", temperature=101, api_name="/generate")


def test_control_characters_are_text(app):
    assert generate(app, "nul \x00, bell \x07, \u202e\u0301", max_new_tokens=4)[-1]


# ---- many at once


class Crowd:
    """Many streams at once, each from a network address of its own, over plain HTTP."""

    def __init__(self, app: RunningApp, count: int, new_tokens: int):
        self.app, self.count, self.new_tokens = app, count, new_tokens
        self.texts: list[str] = []
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> "Crowd":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._thread.join()

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.app.url, timeout=90, limits=limits) as http:
            results = await asyncio.gather(*(self._one(http, n) for n in range(self.count)), return_exceptions=True)
        self.failures = [result for result in results if isinstance(result, BaseException)]
        self.texts = [result for result in results if isinstance(result, str)]

    async def _one(self, http: httpx.AsyncClient, number: int) -> str:
        data = generate_data(f"visitor {number}", max_new_tokens=self.new_tokens, seed=number)
        headers = {"X-Forwarded-For": f"10.1.{number // 250}.{number % 250 + 1}"}
        response = await http.post("gradio_api/call/generate", json={"data": data}, headers=headers)
        event_id = response.raise_for_status().json()["event_id"]
        text, parse = "", EventParser()
        async with http.stream("GET", f"gradio_api/call/generate/{event_id}", headers=headers) as events:
            async for line in events.aiter_lines():
                value = parse(line)
                text = text if value is None else value
        return text


def assert_a_crowd_is_served(app: RunningApp) -> None:
    before = app.stats()["totals"]
    worker = app.worker()
    worker.suspend()  # so that nobody is served before the last has come
    with Crowd(app, 100, new_tokens=60) as crowd:
        try:
            # All of them stand in the engine's line, none in Gradio's.
            eventually(lambda: app.queue()["waiting"] == 100, timeout=60)
        finally:
            worker.resume()
    assert crowd.failures == [] and len(crowd.texts) == 100
    assert all(crowd.texts)
    stats = app.stats()
    assert stats["queue"]["peak_batch_size"] == stats["queue"]["max_batch_size"] == BATCH
    assert stats["totals"]["requests"] - before["requests"] == 100
    assert stats["totals"]["tokens"] - before["tokens"] == 100 * 60
    assert "queue is full" not in app.log.lower() and "Traceback" not in app.log
    # Nobody's words depend on the crowd.
    assert generate(app, "visitor 7", max_new_tokens=60, seed=7)[-1] in crowd.texts


def test_a_hundred_streams_at_once(app):
    assert_a_crowd_is_served(app)


def test_one_visitor_or_address_cannot_take_every_place(ending):
    with closing(long_stream(ending)) as first, closing(long_stream(ending)) as second:
        assert next(first) is not None and next(second) is not None
        with pytest.raises(ApiError, match="address already has 2 requests here"):
            generate(ending, "third", max_new_tokens=3)
    ending.wait_idle()
    assert generate(ending, "third", max_new_tokens=3)


@pytest.fixture(scope="module")
def strict(talkative) -> Iterator[RunningApp]:
    """Little for each visitor, and a bit more for each address."""
    with running_app(
        talkative,
        KVSCOPE_MAX_CONTEXT=CONTEXT,
        KVSCOPE_MAX_PER_VISITOR=1,
        KVSCOPE_MAX_RACES_PER_VISITOR=1,
        KVSCOPE_MAX_RACES_PER_ADDRESS=2,
        KVSCOPE_MAX_BROUGHT_PER_ADDRESS=3,
    ) as app:
        yield app


def test_visitors_and_addresses_have_limits_of_their_own(strict):
    one, another = (Client(strict.url, verbose=False, ssl_verify=False) for _ in range(2))
    asked = {"max_new_tokens": 3000, "ignore_eos": True}
    job = one.submit("on and on", **asked, api_name="/generate")
    eventually(lambda: strict.queue()["running"] == 1)
    with pytest.raises(AppError, match="^You already have 1 request here; let one finish.$"):
        one.predict("me again", max_new_tokens=3, api_name="/generate")
    assert another.predict("me too", max_new_tokens=3, api_name="/generate")

    race = one.submit("The lighthouse", 400, api_name="/compare")
    eventually(lambda: strict.stats()["races"]["running"])
    with pytest.raises(AppError, match="^You already have 1 race here; let one finish.$"):
        one.predict("The lighthouse", 8, api_name="/compare")
    with closing(stream(strict, "compare", "The lighthouse", 400)) as second:
        next(second)
        with pytest.raises(ApiError, match="^Your network address already has 2 races here; let one finish.$"):
            list(stream(strict, "compare", "The lighthouse", 8))
        elsewhere = stream(strict, "compare", "The lighthouse", 8, headers={"X-Forwarded-For": "10.9.9.9"})
        assert next(elsewhere)
        elsewhere.close()
    for running in (job, race):
        running.cancel()
    strict.wait_idle()

    worker = strict.worker()
    worker.suspend()  # so that those who came stay
    try:
        assert bring_visitors(strict, "a page") == "3 came."
        assert bring_visitors(strict, "another") == "3 brought visitors are here already"
    finally:
        worker.resume()
    strict.wait_idle()


def bring_visitors(app: RunningApp, session: str) -> str:
    """What the page of that session is told at last."""
    config = app.get("config").json()
    button = next(part["id"] for part in config["components"] if part["props"].get("elem_id") == "visitors")
    event = next(event["id"] for event in config["dependencies"] if [button, "click"] in event["targets"])
    call = {"data": [], "fn_index": event, "session_hash": session}
    httpx.post(f"{app.url}gradio_api/queue/join", json=call, **PLAIN).raise_for_status()
    lines = app.get("gradio_api/queue/data", params={"session_hash": session}).text.splitlines()
    said = [
        message for line in lines for message in re.findall(r"(\d+ came\.|\d+ brought visitors are here already)", line)
    ]
    return said[-1]


# ---- a short line, and those who leave


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Iterator[RunningApp]:
    """One row, one place in line, and a model that takes its time."""
    model = save_talkative_model(tmp_path_factory.mktemp("slow"), layers=12)
    with running_app(
        model, KVSCOPE_MAX_CONTEXT=CONTEXT, KVSCOPE_MAX_BATCH_SIZE=1, KVSCOPE_MAX_WAITING=1, KVSCOPE_PROBE_SHARE=0
    ) as app:
        yield app


def long_stream(app: RunningApp, new_tokens: int = 3500) -> Iterator[str]:
    return stream(app, "generate", *generate_data("on and on", max_new_tokens=new_tokens, seed=1, ignore_eos=True))


def test_who_leaves_is_cancelled_and_a_full_line_says_when_to_come_back(narrow):
    reader, in_line = long_stream(narrow), long_stream(narrow)
    next(text for text in reader if text)
    next(in_line)
    eventually(lambda: narrow.queue()["waiting"] == 1)
    eventually(lambda: narrow.get("kvscope/live").json()["full"])

    requests = narrow.stats()["totals"]["requests"]
    with pytest.raises(ApiError, match=r"The line is full: .* Come back in about \d+ s\."):
        generate(narrow, "no room", max_new_tokens=3)
    assert narrow.stats()["totals"]["requests"] == requests

    in_line.close()
    eventually(lambda: narrow.queue()["waiting"] == 0, timeout=5)
    reader.close()
    stats = narrow.wait_idle(timeout=5)
    left, waited = stats["requests"][-2:]
    assert left["finish_reason"] == waited["finish_reason"] == "cancelled"
    assert 0 < left["tokens"] < 3500 and waited["tokens"] == 0
    assert generate(narrow, "room again", max_new_tokens=3)


def test_a_race_whose_reader_leaves_is_cancelled(narrow):
    race = stream(narrow, "compare", "The lighthouse", 400)
    next(value for value in race if any(lane["tokens"] for lane in value["lanes"]))
    assert narrow.stats()["races"]["running"]
    race.close()
    narrow.wait_idle(timeout=5)


def test_a_killed_worker_is_replaced_and_the_stream_goes_on_token_for_token(narrow):
    restarts = narrow.stats()["totals"]["restarts"]
    undisturbed = list(long_stream(narrow, 300))[-1]
    disturbed = long_stream(narrow, 300)
    seen = [next(text for text in disturbed if text)]
    narrow.worker().send_signal(signal.SIGKILL)
    seen += disturbed
    assert len(seen[0]) < len(undisturbed)
    assert all(after.startswith(before) for before, after in pairwise(seen))
    assert seen[-1] == undisturbed
    stats = narrow.stats()
    assert stats["totals"]["restarts"] == restarts + 1 and stats["worker"] == "ready"
    assert stats["requests"][-1]["finish_reason"] == "length" and stats["requests"][-1]["tokens"] == 300


# ---- starting and ending

AS_SCRIPT = (sys.executable, "app.py")
BY_RUNPY = (sys.executable, "-c", "import runpy; runpy.run_path('app.py', run_name='__main__')")


def side_by_side(what: Callable[..., None], *cases: Sequence[Any]) -> None:
    """Call `what` with each case at the same time: a start keeps one core busy, and hardly more."""
    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(what, *case) for case in cases]:
            done.result()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_says_when_it_is_ready_and_ends_without_a_rest(talkative, signal_number):
    side_by_side(start_and_end, (talkative, AS_SCRIPT, signal_number), (talkative, BY_RUNPY, signal_number))


def start_and_end(model: Path, command: Sequence[str], signal_number: signal.Signals) -> None:
    with running_app(model, command=command, ready=False, KVSCOPE_DRAIN_S=600) as app:
        # The worker is held while it loads, so that there is time to ask.
        worker = eventually(lambda: worker_of(app), timeout=60, every=0.01)
        worker.suspend()
        eventually(lambda: app.health() is not None, timeout=60)
        response = app.get("healthz")
        assert response.status_code == 503
        assert response.json() == {"status": "loading", "live": True, "ready": False, "why": "The model is loading."}
        assert app.get("").status_code == 200
        with pytest.raises(ApiError, match="still loading"):
            generate(app, "early", max_new_tokens=3)
        if signal_number == signal.SIGTERM:
            worker.resume()
            app.wait_ready()
            assert app.get("healthz").json() == {"status": "ready", "live": True, "ready": True, "why": None}
            (drains if command is AS_SCRIPT else ends_at_once)(app, worker)
        else:
            app.process.send_signal(signal_number)
            assert app.process.wait(15) == 0
        eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        assert "Traceback" not in app.log


def told_to_end(app: RunningApp, worker: psutil.Process) -> Iterator[str]:
    """The stream of an answer during which SIGTERM comes; the worker is held, so that there is time to look."""
    running = long_stream(app, 800)
    next(text for text in running if text)
    worker.suspend()
    app.process.send_signal(signal.SIGTERM)
    eventually(lambda: app.health() == 503)
    return running


def drains(app: RunningApp, worker: psutil.Process) -> None:
    """What runs is finished, nothing new is taken."""
    undisturbed = list(long_stream(app, 800))[-1]
    running = told_to_end(app, worker)
    assert app.get("healthz").json()["status"] == "draining"
    for call in (("generate", *generate_data("late", max_new_tokens=3)), ("compare", "late", 3)):
        with pytest.raises(ApiError, match="shutting down. Please come back in a minute"):
            list(stream(app, *call))
    assert app.process.poll() is None
    worker.terminate()  # as by a host that tells all processes: the front decides
    worker.resume()
    assert list(running)[-1] == undisturbed
    assert app.process.wait(15) == 0
    assert app.log.count("loading the weights") == 1


def ends_at_once(app: RunningApp, worker: psutil.Process) -> None:
    """A second signal does not wait for anybody."""
    told_to_end(app, worker)
    app.process.send_signal(signal.SIGTERM)
    assert app.process.wait(3) == -signal.SIGTERM
    worker.resume()


def worker_of(app: RunningApp) -> psutil.Process | None:
    try:
        return app.worker()
    except ValueError:
        return None


def test_a_bad_setting_or_a_missing_model_ends_it_with_one_line_that_names_it(talkative, tmp_path):
    side_by_side(
        cannot_start,
        (talkative, {"KVSCOPE_MAX_BATCH_SIZE": "many"}, 2, "KVSCOPE_MAX_BATCH_SIZE: .*'many'"),
        (talkative, {"KVSCOPE_MAX_PER_ADDRESS": "0"}, 2, "KVSCOPE_MAX_PER_ADDRESS: .*greater than or equal to 1"),
        (tmp_path / "nowhere", {}, 1, ".*nowhere"),
    )


def cannot_start(model: Path, settings: dict[str, str], status: int, named: str) -> None:
    with running_app(model, ready=False, **settings) as app:
        assert app.process.wait(60) == status
        assert re.fullmatch(named + r".*\n", app.log), app.log
