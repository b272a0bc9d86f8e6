"""Entry point of the Space: settings, engine, page, launch."""

import spaces  # noqa: F401, I001  (has to come before anything that may load torch)

import signal
import sys

from demo.live import Live
from demo.page import HEAD, build_page
from demo.settings import load_settings
from demo.theme import build_theme
from demo.tokens import Answers
from demo.visitors import Visitors
from demo.web import app_kwargs
from engine import Engine, LoadingError
from engine.config import load_config


def main() -> int:
    """Serve the page until a signal comes; the exit status."""
    try:
        config, settings = load_config(), load_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both signals end the wait below
    with Engine(config) as engine:
        visitors = Visitors(engine, settings.visitors_per_press, settings.max_brought_visitors)
        answers = Answers(engine)
        page = build_page(engine, visitors, answers, settings)
        try:
            page.launch(
                prevent_thread_lock=True,
                ssr_mode=False,
                show_error=True,
                max_threads=settings.max_streams,
                theme=build_theme(),
                head_paths=HEAD,
                footer_links=[],
                app_kwargs=app_kwargs(engine, Live(engine, visitors), answers),
            )
            engine.wait_ready()
            page.block_thread()
        except LoadingError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0
        finally:
            page.close(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
