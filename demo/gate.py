"""What may come in: the routes that the page and its API need, and bodies that can be what they take.

Gradio brings more than this page uses (uploads, files, a proxy, links that write to the disk, an editor), and answers
some calls that it cannot understand with a crash. Both are refused here, before they reach it.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from demo.refusals import ERRORS

MOST_BODY_BYTES = 4 * 2**20  # a long conversation has a tenth of it
MOST_SESSION_CHARACTERS = 64
BODY_S = 20.0

_UPLOAD = re.compile(r"^(/gradio_api)?/upload(_progress)?/*$")
_CLOSED = re.compile(
    r"^(/gradio_api)?/(file[=/]|proxy=|stream/|custom_component/|deep_link|component_server|process_recording"
    r"|(undo-)?vibe-|mcp/(sse|messages)|run-history/|runs|monitoring|dev/|svelte/)"
)
_CALL = re.compile(r"^/gradio_api/call/(?!v2/)[^/]+/([^/]+)$")
_READ_AS_JSON = re.compile(r"^/gradio_api/(call|run|api|queue|cancel|reset|mcp)\b")


class Gate:
    """Middleware: refuses with 4xx and a sentence.

    `known` says whether there is anything to be fetched under the id of an event or a session.
    """

    def __init__(self, app: ASGIApp, known: Callable[[str], bool]):
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_route(scope)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                body = await self._read(receive)
                if _READ_AS_JSON.match(scope["path"]) and scope["method"] == "POST":
                    check_call(body, scope["path"])
                receive = again(body, receive)
        except HTTPException as refusal:
            ERRORS.labels("not_understood").inc()
            # What of the request is still to come is not waited for.
            answer = PlainTextResponse(refusal.detail, refusal.status_code, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(named(scope), receive, send)

    async def _read(self, receive: Receive) -> bytes:
        """The body, for as long as a sender may take: what is read of it lies in memory until then."""
        try:
            async with asyncio.timeout(BODY_S):
                return await read_body(receive)
        except TimeoutError:
            raise HTTPException(408, f"A request may take at most {BODY_S:.0f} s to be sent.") from None

    def _check_route(self, scope: Scope) -> None:
        path = scope["path"]
        if _UPLOAD.match(path):
            raise HTTPException(403, "This page takes no files.")
        if _CLOSED.match(path):
            raise HTTPException(404, "There is nothing here.")
        if (call := _CALL.match(path)) and not self._known(call[1]):
            raise HTTPException(404, "There is no such call; it may have been fetched already.")
        if path == "/gradio_api/queue/data":
            (session,) = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[:1]
            if not self._known(session):
                raise HTTPException(404, "Nothing was asked in this session.")


def named(scope: Scope) -> Scope:
    """Gradio answers a tool's call by one of its own from this machine: that one is to count for who made the first."""
    if not scope["path"].startswith("/gradio_api/mcp"):
        return scope
    name = b"x-forwarded-for"
    others = [header for header in scope["headers"] if header[0] != name]
    return {**scope, "headers": [*others, (name, scope["client"][0].encode())] if scope["client"] else others}


async def read_body(receive: Receive) -> bytes:
    """All of it; refused as soon as it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "The request broke off.")
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"A request may have at most {MOST_BODY_BYTES:,} bytes.")
        if not message.get("more_body"):
            return bytes(body)


def again(body: bytes, receive: Receive) -> Receive:
    """`receive` as it was before `body` was read."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def check_call(body: bytes, path: str) -> None:
    """`HTTPException` for a body that no call has, whatever its endpoint."""
    try:
        call = json.loads(body or b"null")
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body must be JSON, not nested too deeply.") from None
    if path.startswith("/gradio_api/mcp"):
        return  # which has words of its own for the rest
    if not isinstance(call, dict):
        raise HTTPException(422, f"The body must be a JSON object, not {type(call).__name__}.")
    _check_fields(call)


def _check_fields(call: Mapping[str, Any]) -> None:
    for name in ("session_hash", "event_id"):
        value = call.get(name)
        if not (value is None or _is_name(value)):
            raise HTTPException(422, f"{name} must be text of at most {MOST_SESSION_CHARACTERS} plain characters.")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_SESSION_CHARACTERS and value.isascii() and value.isprintable()


async def refuse_fields(_: Request, error: Exception) -> Response:
    """A sentence where fields are missing or of the wrong type, without repeating them as FastAPI would."""
    ERRORS.labels("not_understood").inc()
    problems: list[dict[str, Any]] = getattr(error, "errors", list)()
    named = (f"{'.'.join(map(str, problem['loc'][1:])) or 'body'}: {problem['msg']}" for problem in problems[:3])
    return JSONResponse({"error": "; ".join(named)}, status_code=422)


async def refuse_call(request: Request, error: Exception) -> Response:
    """A sentence where Gradio raises about an endpoint, an event or a name that it does not know.

    Anything else stays a crash and is logged as one.
    """
    path = request.url.path.rstrip("/")
    call = re.search(r"/gradio_api/(call/v2|call|run|api|queue)/([^/]+)$", path)
    if not call:
        raise error
    if isinstance(error, TypeError) and call[1] != "call/v2":
        raise error
    ERRORS.labels("not_understood").inc()
    known_by = f"endpoint /{call[2]}" if call[1] != "queue" else "such event"
    sentence = str(error).partition(" Please")[0] if isinstance(error, TypeError) else f"there is no {known_by}"
    return JSONResponse({"error": sentence}, status_code=422)
