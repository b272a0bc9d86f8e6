"""Programs that use the Space: the README's Python example, a JavaScript client, and a model's MCP client."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from running_app import ROOT, RunningApp, eventually, running_app

INSTALL_S, RUN_S = 180, 60


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder) as app:
        yield app


def test_the_python_example_of_the_readme_runs(app, capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from gradio_client .*?)```", readme, re.DOTALL)
    assert "http://127.0.0.1:7860" in example
    exec(compile(example.replace("http://127.0.0.1:7860", app.url), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "'token_id'" in printed and "'waiting': 0" in printed


@pytest.fixture(scope="module")
def node_client(tmp_path_factory) -> Path:
    """The JavaScript program with its one dependency, installed from npm."""
    if not (shutil.which("node") and shutil.which("npm")):
        if os.environ.get("KVSCOPE_REQUIRE_BROWSER") == "1":
            pytest.fail("node and npm are not installed, and KVSCOPE_REQUIRE_BROWSER=1 forbids to skip")
        pytest.skip("node and npm are not installed (on Debian: apt-get install nodejs npm)")
    folder = tmp_path_factory.mktemp("js")
    for name in ("package.json", "client.mjs"):
        shutil.copy(ROOT / "tests" / "js" / name, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error"]
    subprocess.run(install, cwd=folder, check=True, timeout=INSTALL_S, stdout=subprocess.DEVNULL)
    return folder


def test_a_javascript_client_streams_races_and_is_refused(app, node_client):
    command = ["node", "client.mjs", app.url]
    done = subprocess.run(command, cwd=node_client, check=True, timeout=RUN_S, stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout)
    assert len(told["texts"]) > 1 or told["texts"][0]
    assert all(later.startswith(text) for text, later in zip(told["texts"], told["texts"][1:], strict=False))
    assert told["verdict"]["identical"] and [lane["tokens"] for lane in told["verdict"]["lanes"]] == [8, 8]
    assert told["queue"]["running"] == 0
    assert "prompt must not be empty" in told["refused"]


def test_a_model_finds_three_tools_and_calls_them(app):
    asyncio.run(use_tools(app))


async def use_tools(app: RunningApp) -> None:
    async with (
        streamablehttp_client(f"{app.url}gradio_api/mcp/") as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert set(tools) == {"generate", "compare", "stats"}
        assert all(tool.description and len(tool.description) > 40 for tool in tools.values())
        assert {"prompt", "max_new_tokens", "temperature", "seed"} <= set(tools["generate"].inputSchema["properties"])
        assert "required" not in tools["stats"].inputSchema or not tools["stats"].inputSchema["required"]

        asked = {"prompt": "Once upon a time", "max_new_tokens": 24, "temperature": 0}
        generated = await session.call_tool("generate", asked)
        assert not generated.isError and len(generated.content[0].text) > 5
        verdict = await session.call_tool("compare", {"prompt": "The lighthouse stood", "new_tokens": 8})
        assert not verdict.isError and "identical" in verdict.content[0].text
        stats = await session.call_tool("stats", {})
        assert not stats.isError and "max_batch_size" in stats.content[0].text
        refused = await session.call_tool("generate", {"prompt": "", "max_new_tokens": 1})
        assert refused.isError and "prompt must not be empty" in refused.content[0].text


def test_calls_of_tools_hold_up_nobody_count_for_who_makes_them_and_end_with_them(ending):
    worker = ending.worker()
    worker.suspend()
    try:
        # More than there are threads for everything that is not async, and their first ones at the same time.
        callers = [call_tool(ending, address=f"10.6.0.{number + 1}") for number in range(44)]
        waiting = 40  # of those that call at once: Gradio's client takes no more
        eventually(lambda: in_line(ending) == waiting)
        assert ending.get("").status_code == ending.get("config").status_code == 200
        for caller in callers:
            caller.close()
        eventually(lambda: in_line(ending) == 0)
        # An address that nobody has to believe: not from this machine's own, from which proxies are trusted.
        own = [call_tool(ending, source="127.0.0.2", address=f"10.6.1.{number + 1}") for number in range(2)]
        eventually(lambda: in_line(ending) == 2)
        with call_tool(ending, source="127.0.0.2", address="10.6.1.9") as third:
            third.settimeout(10)  # less than between two signs of life
            said = b""
            while b"isError" not in said and (more := third.recv(65536)):
                said += more
        assert b"Your network address already has 2 requests" in said
        for caller in own:
            caller.close()
        eventually(lambda: in_line(ending) == 0)
    finally:
        worker.resume()


def in_line(app: RunningApp) -> int:
    queue = app.queue()
    return queue["waiting"] + queue["running"]


def call_tool(app: RunningApp, address: str, source: str = "127.0.0.1") -> socket.socket:
    """Asked, and not read."""
    call = {"name": "generate", "arguments": {"prompt": "a", "max_new_tokens": 4000}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    caller = socket.create_connection(("127.0.0.1", app.port), timeout=20, source_address=(source, 0))
    head = (
        f"POST /gradio_api/mcp/ HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: {address}\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\r\n"
    )
    caller.sendall(f"{head}{body}".encode())
    return caller
