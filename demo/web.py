"""Plain HTTP beside the page: health, metrics, what the panels ask for, and static files."""

from pathlib import Path
from typing import Any

import gradio
import plotly
from fastapi.exceptions import RequestValidationError
from gradio.route_utils import FnIndexInferError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from demo.api import Page
from demo.gate import Gate, refuse_call, refuse_fields
from demo.live import Live
from demo.metrics import EngineCollector, health
from demo.panel import STATIC
from demo.tokens import Answers
from engine import Engine
from engine.telemetry import TIMELINE_S

PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
WEB_COMPONENT_JS = Path(gradio.__file__).parent / "templates" / "frontend" / "gradio.js"
A_WEEK = {"Cache-Control": "public, max-age=604800"}


def app_kwargs(engine: Engine, page: Page, live: Live, answers: Answers) -> dict[str, Any]:
    """What Gradio's application is made with, so that these routes come before Gradio's own."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

    async def healthz(_: Request) -> Response:
        state = health(engine)
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def live_message(_: Request) -> Response:
        return Response(live.message(), media_type="application/json", headers={"Cache-Control": "no-store"})

    async def timeline(request: Request) -> Response:
        asked = [request.query_params.get(name, "") for name in ("window", "back")]
        if not all(text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= TIMELINE_S for text in asked):
            return PlainTextResponse("window and back must be seconds, at most ten minutes", status_code=422)
        window, back = map(int, asked)
        return JSONResponse(live.timeline(max(window, 1), back), headers={"Cache-Control": "no-store"})

    async def tokens(request: Request) -> Response:
        start = request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 9):
            return PlainTextResponse("from must be a whole number from 0", status_code=422)
        message = answers.message(request.query_params.get("answer", ""), int(start))
        return JSONResponse(message, headers={"Cache-Control": "no-store"})

    async def plotly_js(_: Request) -> Response:
        return FileResponse(PLOTLY_JS, media_type="text/javascript", headers=A_WEEK)

    async def web_component_js(_: Request) -> Response:
        # Imports Gradio's own `/assets`, so that a page with a `gradio-app` in it needs no other host.
        return FileResponse(WEB_COMPONENT_JS, media_type="text/javascript")

    routes = [
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/kvscope/live", live_message),
        Route("/kvscope/timeline", timeline),
        Route("/kvscope/tokens", tokens),
        Route("/gradio.js", web_component_js),
        Route("/kvscope/plotly.min.js", plotly_js),
        Mount("/kvscope", StaticFiles(directory=STATIC)),
    ]
    return {
        "routes": routes,
        "middleware": [Middleware(Gate, known=page.calls.known)],
        "exception_handlers": {
            TypeError: refuse_call,
            KeyError: refuse_call,
            FnIndexInferError: refuse_call,
            RequestValidationError: refuse_fields,
        },
    }
