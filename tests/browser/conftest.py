"""Debian's Chromium on the running app. No page may log an error or ask another host for anything."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from running_app import RunningApp, running_app, save_talkative_model

# Not the pages that the address bar loads for every visitor. (It replaces Playwright's list, which nothing here needs.)
WITHOUT = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", WITHOUT]
PATIENCE_MS = 30_000

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="session")
def chromium() -> str:
    if path := shutil.which("chromium"):
        return path
    if os.environ.get("KVSCOPE_REQUIRE_BROWSER") == "1":
        pytest.fail("chromium is not installed, and KVSCOPE_REQUIRE_BROWSER=1 forbids to skip")
    pytest.skip("chromium is not installed (on Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[Browser]:
    # Of a module, not of the session: while Playwright runs, nothing else in this thread can use asyncio.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    """Gibberish without an end, slow enough to be watched."""
    return save_talkative_model(tmp_path_factory.mktemp("slow"), layers=20)


@pytest.fixture(scope="session")
def app(slow_model) -> Iterator[RunningApp]:
    with running_app(slow_model) as app:
        yield app


class Watched:
    """A page, and what it did that it must not do."""

    def __init__(self, page: Page, hosts: set[str], provokes: str | None):
        self.hosts, self.provokes = hosts, provokes
        self.errors: list[str] = []
        self.foreign: set[str] = set()
        page.on("console", lambda message: message.type == "error" and self._failed(message.text))
        page.on("pageerror", lambda error: self._failed(error.stack or str(error)))
        page.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda socket: self._asked(socket.url))

    def _failed(self, error: str) -> None:
        if not (self.provokes and re.search(self.provokes, error)):
            self.errors.append(error)

    def _asked(self, url: str) -> None:
        address = urlsplit(url)
        if address.scheme not in ("data", "blob") and address.netloc not in self.hosts:
            self.foreign.add(url)


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each in a context (a visitor) of its own; checks all of them at the end.

    A test that provokes console errors says which by a pattern. `at` is another site's page, which embeds the app's;
    `script` runs before the page's own.
    """
    contexts: list[BrowserContext] = []
    watched: list[Watched] = []

    def open_page(
        app: RunningApp,
        query: str = "",
        width: int = 1440,
        height: int = 940,
        provokes: str | None = None,
        at: str | None = None,
        script: str = "",
        **options,
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        context.add_init_script(script)
        page = context.new_page()
        watched.append(Watched(page, {urlsplit(url).netloc for url in (app.url, at or app.url)}, provokes))
        page.goto(at or app.url + query)
        if at:
            return page
        # The panels are alive once the first message about everybody has reached them.
        page.wait_for_function(
            "['ready', 'none'].includes(document.documentElement.dataset.worker) && !!document.querySelector('#prompt')"
        )
        expect(page.locator('#header [data-part="model"]')).not_to_have_text("connecting")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [error for one in watched for error in one.errors] == []
    assert set().union(*(one.foreign for one in watched)) == set()


@pytest.fixture
def page(open_page, app) -> Iterator[Page]:
    """The page of the talkative model; nobody is here before and after."""
    app.wait_idle()
    yield open_page(app)
