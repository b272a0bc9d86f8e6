"""Pictures of the running page, with the default model and real numbers.

    python tests/screenshot.py                                   the picture in the documentation
    python tests/screenshot.py --state race --theme dark --width 400 --out race.png

States: idle, reading (a long prompt), streaming (with visitors), race (finished), error (a refused prompt),
tokens (an answer's tokens and what is known of one), schema (the example of an answer as JSON).
Fetches the default model where it has not been fetched yet; needs Debian's Chromium.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "browser")]

from pages import ANSWER, FIGURES, prompt_field, wait_until_answered  # noqa: E402
from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402
from running_app import RunningApp, eventually, running_app  # noqa: E402

PATIENCE_MS = 120_000
FILLED_S = 60


def idle(page: Page, app: RunningApp) -> None:
    """Nobody has spoken yet."""


def reading(page: Page, app: RunningApp) -> None:
    """A long prompt is being read."""
    page.get_by_role("button", name="A long page").click()
    expect(page.locator('#conversation [data-part="label"]')).to_have_text(re.compile(r"^reading [1-9]"))


def streaming(page: Page, app: RunningApp) -> None:
    """An answer is written while brought visitors share its batch, and all panels have something to show."""
    page.get_by_role("button", name="Why a cache?").click()
    expect(page.locator(ANSWER)).not_to_be_empty()
    expect(page.locator('#speed-now [data-part="ratio"]')).to_have_text(re.compile("×"))
    # Under load nothing is measured, so the line comes before the crowd. (None by then: the answer is over.)
    count = page.locator('#speed-now [data-part="count"]')
    eventually(lambda: re.search(r"[4-9] times|\d\d times", count.text_content()) or not answering(page), FILLED_S)
    show_tab(page, "Batch")
    # Without the scrolling that a click by mouse would do: the picture shows the top of the panels.
    page.locator("#visitors").evaluate("node => node.click()")
    expect(page.locator("#visitors-said")).to_contain_text("came")
    eventually(lambda: app.queue()["running"] > 3 or not answering(page), FILLED_S)
    page.wait_for_function(f"document.querySelector('{FIGURES['batch']}').data.at(-1).y.length > 3")
    show_tab(page, "Cache")
    page.wait_for_function(f"document.querySelectorAll('{FIGURES['cache']} .scatterlayer .trace').length > 3")
    show_tab(page, "Speed")


def race(page: Page, app: RunningApp) -> None:
    """A race is over."""
    show_tab(page, "Race")
    page.locator("#race-start").click()
    expect(page.locator('#race [data-part="ratio"]')).to_have_text(re.compile("×"))
    page.locator("#race").scroll_into_view_if_needed()


def error(page: Page, app: RunningApp) -> None:
    """A prompt was refused."""
    prompt_field(page).fill("far too long " * 3_000)
    prompt_field(page).press("Enter")
    expect(page.locator('#conversation [data-part="notice"]')).to_be_visible()


def tokens(page: Page, app: RunningApp) -> None:
    """An answer is over and shown as its tokens, one of which is looked at."""
    page.get_by_role("button", name="A haiku").click()
    expect(page.locator(ANSWER)).not_to_be_empty()
    wait_until_answered(page)
    page.get_by_role("button", name="Tokens").click()
    page.locator("#conversation .token").nth(2).focus()
    expect(page.locator("#token-card")).to_be_visible()


def schema(page: Page, app: RunningApp) -> None:
    """The example of a schema was asked; Settings stand open beside its answer."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Use the example").click()
    expect(prompt_field(page)).not_to_have_value("")
    prompt_field(page).press("Enter")
    expect(page.locator(ANSWER)).not_to_be_empty()
    wait_until_answered(page)
    page.locator("#settings").evaluate("node => { node.scrollTop = node.scrollHeight; }")


STATES = {state.__name__: state for state in (idle, reading, streaming, race, error, tokens, schema)}


def show_tab(page: Page, name: str) -> None:
    tab = page.get_by_role("tab", name=name)
    if tab.is_visible():
        tab.click()


def answering(page: Page) -> bool:
    return page.locator("html[data-answering]").count() == 1


def take(options: argparse.Namespace, app: RunningApp) -> None:
    """Bring the page into the wanted state and save what is seen then."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        size = {"width": options.width, "height": options.height}
        page = browser.new_page(viewport=size, device_scale_factor=options.scale, reduced_motion="reduce")
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.goto(f"{app.url}?__theme={options.theme}&{options.query}")
        page.wait_for_function("document.documentElement.dataset.worker === 'ready'")
        STATES[options.state](page, app)
        page.mouse.move(0, 0)
        page.screenshot(path=options.out, full_page=options.full)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", choices=STATES, default="streaming")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=940)
    parser.add_argument("--scale", type=float, default=1, help="pixels of the picture for one of the page")
    parser.add_argument("--query", default="", help="more of the address, such as 'view=race&compact=1'")
    parser.add_argument("--full", action="store_true", help="the whole page, not only what is in sight")
    parser.add_argument("--out", type=Path, default=HERE.parent / "demo/static/screenshot.png")
    options = parser.parse_args()
    with running_app(None, KVSCOPE_THREADS=0) as app:
        take(options, app)
    print(options.out)


if __name__ == "__main__":
    main()
