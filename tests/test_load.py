"""Under a crowd: the short form of `tests/bench/load.py`; readers who do not read; and what is kept of calls."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from inspect import isasyncgenfunction, iscoroutinefunction
from pathlib import Path

import gradio as gr
import httpx
import pytest
from gradio_client import Client
from running_app import (
    PLAIN,
    RunningApp,
    eventually,
    free_port,
    generate_data,
    running_app,
    save_talkative_model,
    stream,
)

sys.path.append(str(Path(__file__).parent / "bench"))

import load
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn import config

from demo import connections, gate, sessions, streams
from demo.api import Page
from demo.page import build_page
from demo.quota import Quotas
from demo.settings import PageSettings
from demo.tokens import Answers
from demo.visitors import Visitors

CLIENTS, SECONDS = 300, 30


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    model = save_talkative_model(tmp_path_factory.mktemp("talkative"))
    with running_app(
        model, KVSCOPE_MAX_BATCH_SIZE=6, KVSCOPE_MAX_WAITING=4, KVSCOPE_MAX_CONTEXT=4096, KVSCOPE_PROBE_SHARE=0
    ) as app:
        yield app


def test_a_crowd_that_comes_and_goes_as_it_likes_leaves_nothing_wrong_and_nothing_behind(app):
    outcome = load.run(app, CLIENTS, SECONDS)
    assert outcome.wrong == {}
    # Everything that it can do was done, and the line was full.
    assert set(outcome.counts) == {*load.WEIGHTS, "told to come back"}
    assert outcome.places_seen > 0
    ended = [line["finish_reason"] for line in app.requests_log]
    assert set(ended) == {"length", "cancelled"} and len(ended) == app.stats()["totals"]["requests"]


def open_and_never_read(app: RunningApp, *data: object) -> socket.socket:
    """A stream whose reader takes nothing but what the operating system takes for it."""
    call = httpx.post(f"{app.url}gradio_api/call/details", json={"data": data}, **PLAIN).json()
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", app.port))
    reader.sendall(f"GET /gradio_api/call/details/{call['event_id']} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return reader


def test_the_batch_does_not_wait_for_a_browser_that_is_stuck(app):
    app.wait_idle()
    stuck = [open_and_never_read(app, *generate_data("on", max_new_tokens=600, top_n_tokens=20)) for _ in range(4)]
    text = list(stream(app, "generate", *generate_data("beside them", max_new_tokens=200)))[-1]
    assert text
    requests = app.wait_idle(timeout=60)["requests"][-5:]
    # All were computed to their ends: four answers that nobody reads, and one that somebody does.
    assert [request["tokens"] for request in sorted(requests, key=lambda r: r["tokens"])] == [200, *[600] * 4]
    for reader in stuck:
        reader.close()


# ---- what is kept, with shorter times


class Endless:
    """A source that always has something new, until it is cancelled."""

    done = False

    async def changed(self, timeout: float) -> bool:
        await asyncio.sleep(0.001)
        return True

    def cancel(self) -> None:
        self.done = True


def test_little_waits_for_who_does_not_read_and_nothing_for_long(monkeypatch):
    for module, name, value in ((streams, "FASTEST", 0.001), (streams, "PATIENCE_S", 1.0), (streams, "SLOWEST", 0.01)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sessions, "UNFETCHED_S", 0.5)
    sessions.adapt()
    source = Endless()
    page = Page(16)
    all_streams = streams.Streams(PageSettings(), page.calls.reader_is_behind)

    async def count(request: gr.Request) -> AsyncIterator[int]:
        with all_streams.follow(source, request.session_hash) as following:
            number = 0
            while await following.next():
                yield (number := number + 1)

    with page:
        gr.api(count, api_name="count", concurrency_limit=None)
    page.queue(max_size=16)
    page._queue = calls = page.calls
    _, url, _ = page.launch(
        prevent_thread_lock=True, quiet=True, server_port=free_port(), ssr_mode=False, _frontend=False
    )
    try:
        call = httpx.post(f"{url}gradio_api/call/count", json={"data": []}, **PLAIN).json()["event_id"]
        messages = eventually(lambda: calls.pending_messages_per_session.get(call))
        eventually(lambda: messages.qsize() >= sessions.MOST_UNREAD)
        assert not source.done
        eventually(lambda: source.done)  # its patience was at an end
        eventually(lambda: not calls.event_ids_to_events)
        assert messages.qsize() <= sessions.MOST_UNREAD + 2
        assert call not in page.state_holder.session_data and not calls.event_analytics
        assert calls.known(call)  # for whoever asks a moment later
        eventually(lambda: not calls.known(call))
        assert not calls.pending_event_ids_session
    finally:
        page.close(verbose=False)


def test_a_session_keeps_no_copy_of_the_page_and_of_what_was_typed_there():
    sessions.adapt()
    with gr.Blocks() as page:
        box = gr.Textbox("at first")
    session = sessions.Session(page)
    session._update_value_in_config(box._id, "secret")
    assert session[box._id] is box and list(session.components) == []


def test_a_session_keeps_nothing_of_its_calls():
    """Gradio kept a component more, for good, with each call that left one of its inputs as it was."""
    sessions.adapt()

    async def change_nothing(text: str):
        return gr.skip()

    with gr.Blocks() as page:
        box = gr.Textbox("at first")
        box.submit(change_nothing, box, box, api_name="nothing")
    known = len(page.default_config.blocks)
    _, url, _ = page.launch(
        prevent_thread_lock=True, quiet=True, server_port=free_port(), ssr_mode=False, _frontend=False
    )
    try:
        client = Client(url, verbose=False)
        for text in "abc":
            client.predict(text, api_name="/nothing")
        assert len(page.state_holder[client.session_hash].blocks_config.blocks) == known
    finally:
        page.close(verbose=False)


def test_no_call_and_no_page_that_is_closed_takes_a_thread(tiny_engine):
    """A thousand pages that were closed at once had five hundred."""
    engine, settings, quotas = tiny_engine(), PageSettings(), Quotas()
    page = build_page(engine, Visitors(engine, settings, quotas), Answers(engine), settings, quotas)
    handlers = [block_fn.fn for block_fn in page.fns.values() if block_fn.fn]
    assert len(handlers) > 15
    assert [handler for handler in handlers if not (iscoroutinefunction(handler) or isasyncgenfunction(handler))] == []


def test_nobody_waits_for_who_says_nothing_does_not_finish_or_does_not_read(monkeypatch):
    for module, name in ((connections, "HEAD_S"), (connections, "READ_S"), (gate, "BODY_S")):
        monkeypatch.setattr(module, name, 0.4)
    monkeypatch.setitem(config.HTTP_PROTOCOLS, "auto", config.HTTP_PROTOCOLS["auto"])
    connections.adapt()

    async def long(_: Request) -> Response:
        await asyncio.sleep(1)  # an answer may take longer than a question
        return PlainTextResponse("x" * 20_000_000)

    with Page(16) as page:
        gr.Markdown("a page")
    kwargs = {"routes": [Route("/long", long)], "middleware": [Middleware(gate.Gate, known=page.calls.known)]}
    port = free_port()
    page.launch(
        prevent_thread_lock=True, quiet=True, server_port=port, ssr_mode=False, _frontend=False, app_kwargs=kwargs
    )
    get, post = b"GET /long HTTP/1.1\r\nHost: a\r\n", b"POST /gradio_api/call/x HTTP/1.1\r\nHost: a\r\n"
    try:
        assert said_to(port, b"") == said_to(port, get) == b""
        assert said_to(port, post + b"Content-Length: 9\r\n\r\n{").startswith(b"HTTP/1.1 408")
        assert len(said_to(port, get + b"\r\n" + get)) > 20_000_000, "cut only after the first, which is whole"
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", port))
            reader.sendall(get + b"\r\n")
            eventually(lambda: page.server.server_state.connections)
            eventually(lambda: not page.server.server_state.connections)
    finally:
        page.close(verbose=False)


def said_to(port: int, words: bytes) -> bytes:
    """All that comes until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(words)
        return b"".join(iter(lambda: connection.recv(2**20), b""))
