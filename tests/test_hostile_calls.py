"""Calls that nobody means well with: every refusal is a 4xx or a Gradio error with a sentence, and nothing crashes."""

import contextlib
import json
import math
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_app import DEFAULTS, PLAIN, ApiError, RunningApp, generate_data, stream

JSON = {"content-type": "application/json"}
bounded = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(2**63), 2**64, math.nan, math.inf, 1e308]))
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=20), st.sampled_from(["\ud800", "\x00", "é" * 999])
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)


@pytest.fixture(autouse=True)
def no_crash(ending):
    """Whatever a test sends, nothing of it is a crash, and the next visitor is served."""
    before = len(ending.log)
    yield
    assert "Traceback" not in ending.log[before:], ending.log[before:]
    assert list(stream(ending, "generate", *generate_data("still there", max_new_tokens=2)))[-1] is not None


def outcome(app: RunningApp, endpoint: str, data: list[Any]) -> None:
    """The call streams values, or is refused with a sentence of one line."""
    try:
        for _ in stream(app, endpoint, *data):
            pass
    except ApiError as refusal:
        assert str(refusal).strip() and "\n" not in str(refusal) and len(str(refusal)) < 500, refusal
    except httpx.HTTPStatusError as refusal:
        assert refusal.response.status_code < 500 and refusal.response.text


@bounded
@given(
    endpoint=st.sampled_from(["generate", "details"]), changed=st.dictionaries(st.sampled_from([*DEFAULTS]), anything)
)
def test_any_value_of_any_parameter_is_taken_or_refused(ending, endpoint, changed):
    outcome(ending, endpoint, generate_data("a", **{"max_new_tokens": 2, **changed}))


@bounded
@given(
    endpoint=st.sampled_from(["generate", "details", "chat", "compare", "stats"]), data=st.lists(anything, max_size=4)
)
def test_any_values_by_position_are_taken_or_refused(ending, endpoint, data):
    outcome(ending, endpoint, data)


ROUTES = [
    *(f"call/{name}" for name in ("generate", "chat", "nothing", "", "%00", "send")),
    *("call/v2/details", "call/v2/nothing", "run/generate", "api/stats", "queue/join", "cancel", "reset", "mcp/"),
    *("component_server", "process_recording", "upload", "vibe-edit", "stream/x", "login"),
]


@bounded
@given(
    route=st.sampled_from(ROUTES),
    call=st.fixed_dictionaries(
        {},
        optional={
            "data": anything,
            "fn_index": anything,
            "session_hash": anything,
            "event_id": anything,
            "event_data": anything,
            "trigger_id": anything,
            "prompt": anything,
            "jsonrpc": st.just("2.0"),
            "id": anything,
            "method": st.sampled_from(["tools/call", "tools/list", "initialize", "nothing"]),
            "params": anything,
        },
    ),
)
def test_any_call_to_any_route_is_answered_below_500(ending, route, call):
    post(ending, route, json.dumps(call).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"data":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    ]
    + [
        b'{"data":[' + b"9" * 6000 + b"]}",
        b'{"data":["\\ud800"]}',
        b'{"data":[NaN,1e999]}',
        b'{"session_hash":"\\ud800"}',
    ],
)
def test_bodies_that_are_no_calls_are_refused(ending, body):
    for route in ROUTES:
        assert 400 <= post(ending, route, body).status_code < 500 or route == "call/generate" or b"data" in body


def post(app: RunningApp, route: str, body: bytes) -> httpx.Response:
    headers = {**JSON, "accept": "application/json, text/event-stream"}
    response = httpx.post(f"{app.url}gradio_api/{route}", content=body, headers=headers, timeout=20, **PLAIN)
    assert response.status_code < 500, (route, body[:200], response.text[:200])
    assert response.status_code < 400 or response.text
    return response


def test_what_is_too_long_is_refused_while_it_comes(ending):
    with socket.create_connection(("127.0.0.1", ending.port), timeout=20) as connection:
        head = b"POST /gradio_api/call/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
        connection.sendall(head)
        sent = 0
        with contextlib.suppress(ConnectionError):  # it hangs up
            while sent < 32 * 2**20:
                sent += connection.send(b" " * 65536)
        assert sent < 32 * 2**20
    response = httpx.post(f"{ending.url}gradio_api/call/generate", content=b" " * (2**22 + 1), headers=JSON, **PLAIN)
    assert (response.status_code, response.text) == (413, "A request may have at most 4,194,304 bytes.")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "call/generate/unknown",
            "queue/data",
            "queue/data?session_hash=unknown",
            "file=app.py",
            "file=http://a.invalid/",
        ),
        *("file/app.py", "proxy=http://127.0.0.1:1/", "deep_link?session_hash=x", "stream/a/b/0/playlist.m3u8"),
        *(
            "stream/a/b/0/playlist-file",
            "custom_component/x/client/component/../../../app.py",
            "upload_progress",
            "runs",
        ),
        *(
            "run-history/buckets",
            "dev/reload",
            "vibe-code",
            "stream/a/b/0/..%2fapp.py",
            "component_server",
            "mcp/sse",
            "mcp/messages/",
        ),
    ],
)
def test_what_the_page_does_not_need_is_closed(ending, path):
    response = ending.get(f"gradio_api/{path}")
    assert response.status_code in (403, 404, 405) and len(response.text) < 100


def test_nobodys_monitor_and_no_editor(ending):
    for path in ("monitoring", "monitoring/summary", "monitoring/key", "file=app.py", "upload_progress", "svelte/x"):
        assert ending.get(path).status_code in (403, 404)


def test_nothing_that_is_sent_is_taken_for_a_file(ending):
    """Gradio would fetch it for whoever asks: from any host, of any size, onto this disk."""
    with socket.create_server(("127.0.0.1", 0)) as host:
        url = f"http://localhost:{host.getsockname()[1]}/"
        for path in ("/etc/hostname", url, ""):
            file = {"path": path, "url": url, "meta": {"_type": "gradio.FileData"}}
            for endpoint, data in (
                ("generate", generate_data("a", grammar={"type": "json", "value": [[{"deep": file}]]})),
                ("chat", ["a", [{"role": "user", "content": "b", **file}]]),
                ("stats", [file]),
                ("compare", [{**file, "meta": 3}]),
            ):
                with pytest.raises(ApiError, match="This page takes no files"):
                    list(stream(ending, endpoint, *data))
        host.settimeout(0)
        with pytest.raises(BlockingIOError):
            host.accept()


def test_the_pages_own_events_refuse_what_the_page_would_not_send(ending):
    config = ending.get("config").json()
    sent = [event["id"] for event in config["dependencies"] if event["api_visibility"] == "private" and event["inputs"]]
    assert len(sent) > 5
    for number in sent:
        for data in ([], ["x"], [None] * 15, ["a", {"messages": 3}, None, *["x"] * 12], [[["a"]]] * 15):
            call = {"data": data, "fn_index": number, "session_hash": "hostile"}
            post(ending, "queue/join", json.dumps(call).encode())
        with httpx.stream(
            "GET", f"{ending.url}gradio_api/queue/data?session_hash=hostile", timeout=30, **PLAIN
        ) as events:
            said = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
        errors = [message["output"].get("error") or "" for message in said if message["msg"] == "process_completed"]
        assert len(errors) == 5 and not any("\n" in error or "Error(" in error for error in errors), errors
