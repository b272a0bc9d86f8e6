"""Entry point of the Space: settings, engine, page, launch."""

import spaces  # noqa: I001  (has to come before anything that may load torch)

import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from demo import connections, logs, sessions, tools
from demo.live import Live
from demo.page import HEAD, build_page
from demo.prompts import public_prompts
from demo.quota import Quotas
from demo.settings import PageSettings, load_settings
from demo.theme import build_theme
from demo.tokens import Answers
from demo.visitors import Visitors
from demo.web import app_kwargs
from engine import Engine, EngineConfig, LoadingError
from engine.config import load_config, read_settings
from engine.lease import LeaseTerms


FAREWELL_S = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)
MOST_SESSIONS = 4000  # of open pages, and of those that were: some 10 KB each

if TYPE_CHECKING:
    from demo.zerogpu import ZeroGPU


def main() -> int:
    """Serve the page until a signal comes; the exit status."""
    try:
        config, settings, terms = load_config(), load_settings(), read_settings(LeaseTerms)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    logs.set_up()
    for number in ENDING:
        signal.signal(number, end_waiting)
    try:
        serve(config, settings, terms)
    except LoadingError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def serve(config: EngineConfig, settings: PageSettings, terms: LeaseTerms) -> None:
    """Until a signal comes as `KeyboardInterrupt`; `LoadingError` if there is nothing to serve."""
    host = choose_host(config, terms)
    with Engine(config, host, public_prompts()) as engine:
        connections.adapt()
        sessions.adapt()
        quotas = Quotas() if isinstance(host, str) else host.quotas
        visitors = Visitors(engine, settings, quotas)
        answers = Answers(engine)
        page = build_page(engine, visitors, answers, settings, quotas)
        try:
            page.launch(
                prevent_thread_lock=True,
                ssr_mode=False,
                mcp_server=True,
                show_error=True,
                max_threads=settings.max_streams,
                theme=build_theme(),
                head_paths=HEAD,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                state_session_capacity=MOST_SESSIONS,
                app_kwargs=app_kwargs(engine, page, Live(engine, visitors, quotas), answers),
            )
            tools.adapt(page)
            engine.wait_ready()
            threading.Event().wait()  # Gradio's own waiting ends by waiting for its streams
        finally:
            end_streams(engine)
            page.close(verbose=False)


def end_waiting(_number: int, _frame: object) -> None:
    """The first signal ends the waiting in `serve`; a second one the process, at once."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def end_streams(engine: Engine) -> None:
    """Let answers end, close the engine, and let whoever was listening hear of it before the server goes."""
    snapshot = engine.snapshot()
    listened_to = any(snapshot[what][part] for what in ("queue", "races") for part in ("waiting", "running"))
    engine.drain()
    engine.close()
    if listened_to:
        time.sleep(FAREWELL_S)


def choose_host(config: EngineConfig, terms: LeaseTerms) -> "str | ZeroGPU":
    """A process of its own for the worker; on ZeroGPU, leases."""
    if not spaces.config.Config.zero_gpu:
        return "process"
    from demo.zerogpu import ZeroGPU  # imports torch, which other hosts' front does without

    return ZeroGPU(config, terms)


if __name__ == "__main__":
    sys.exit(main())
