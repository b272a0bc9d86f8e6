"""The page in another site's documentation: three frames on another origin, one out of sight at first."""

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from pages import AWAY
from playwright.sync_api import Frame, Page, expect
from running_app import RunningApp

HOST_PAGE = """<!doctype html><title>Documentation</title><h1>Why a cache?</h1>
<iframe name="chat" src="{app}?view=chat&compact=1&prompt=Why%20a%20cache%3F" width="600" height="500"></iframe>
<iframe name="cache" src="{app}?view=cache&compact=1&__theme=dark" width="420" height="300"></iframe>
<div style="height: 6000px"></div>
<iframe name="race" loading="lazy" src="{app}?view=race&compact=1&race_tokens=10" width="420" height="300"></iframe>
<script>
  addEventListener("message", ({{ data, source }}) => {{
    if (data?.kvscope !== "height") return;
    for (const frame of document.querySelectorAll("iframe"))
      if (frame.contentWindow === source) frame.style.height = `${{data.height}}px`;
  }});
</script>"""

COMPONENT_PAGE = """<!doctype html><title>Documentation</title><link rel="icon" href="data:,"><h1>Why a cache?</h1>
<script type="module" src="{app}gradio.js"></script><gradio-app src="{app}"></gradio-app>"""
PAGES = {"/": HOST_PAGE, "/component": COMPONENT_PAGE}


@pytest.fixture
def documentation(app: RunningApp) -> Iterator[str]:
    """Another site with pages that embed the app; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in PAGES else 204)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            if self.path in PAGES:
                self.wfile.write(PAGES[self.path].format(app=app.url).encode())

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://localhost:{server.server_port}/"  # another site than 127.0.0.1, not only another port
    server.shutdown()
    server.server_close()
    thread.join()


def content(page: Page, name: str) -> Frame:
    frame = page.wait_for_selector(f"iframe[name={name}]").content_frame()
    assert frame
    return frame


def ready(page: Page, name: str) -> Frame:
    frame = content(page, name)
    frame.wait_for_function("document.documentElement.dataset.worker === 'ready'")
    return frame


def loaded(page: Page, name: str) -> bool:
    return content(page, name).url.startswith("http")


def test_three_frames_on_another_site(open_page, app, documentation):
    app.wait_idle()
    page: Page = open_page(app, at=documentation)
    chat, cache = ready(page, "chat"), ready(page, "cache")
    assert not loaded(page, "race")  # lazily: it is far below

    expect(chat.locator("#prompt textarea")).to_have_value("Why a cache?")
    chat.locator("#prompt textarea").press("Enter")
    expect(chat.locator("#conversation article.assistant .text")).not_to_be_empty()
    expect(cache.locator('#cache-growth [data-part="figure"] .scatterlayer')).to_be_visible()
    assert cache.evaluate("document.body.classList.contains('dark')")
    assert not cache.locator("#header").is_visible() and not cache.locator("#race").is_visible()
    expect(cache.get_by_role("link", name="open the full page")).to_be_visible()

    page.locator("iframe[name=race]").scroll_into_view_if_needed()
    race = ready(page, "race")
    race.locator("#race-start").click()
    expect(race.locator('#race [data-part="same"]')).to_have_text("10 of 10")
    for frame in (cache, race):
        frame.wait_for_function("document.documentElement.scrollHeight <= innerHeight + 1")
        # As tall as its content, which does not follow: so nothing grows for ever.
        tall = "document.querySelector('main.contain').getBoundingClientRect().height"
        frame.wait_for_function(f"Math.abs({tall} - innerHeight) <= 1")


def test_a_frame_out_of_sight_asks_for_nothing_until_it_is_seen_again(open_page, app, documentation):
    app.wait_idle()
    page: Page = open_page(app, at=documentation)
    cache = ready(page, "cache")
    page.evaluate("scrollTo(0, 2500)")
    # By the clock: a frame out of sight draws nothing.
    cache.wait_for_function("document.documentElement.dataset.connection === 'paused'", polling=100)
    assert not loaded(page, "race")
    with page.expect_request(lambda request: request.frame == cache and "kvscope/live" in request.url):
        page.evaluate("scrollTo(0, 0)")
    cache.wait_for_function("document.documentElement.dataset.connection === 'open'")


def test_the_web_component_needs_no_other_host_either(open_page, app, documentation):
    app.wait_idle()
    page: Page = open_page(app, at=documentation + "component")
    page.locator("#prompt textarea").fill("Tell me a story.")
    page.locator("#prompt textarea").press("Enter")
    expect(page.locator("#conversation article.assistant .text")).not_to_be_empty()
    expect(page.locator('#batch-timeline [data-part="figure"] .barlayer').first).to_be_attached()
    page.locator("#stop").click()
    expect(page.get_by_role("heading", name="Why a cache?")).to_be_visible()


def test_the_web_component_never_loads_its_host_anew(open_page, app, documentation):
    app.wait_idle()
    page: Page = open_page(app, at=documentation + "component", provokes=AWAY)
    page.route(re.compile("queue/data"), lambda route: route.abort())
    page.locator("#prompt textarea").fill("Tell me a story.")
    page.locator("#prompt textarea").press("Enter")
    banner = page.locator('#header [data-part="banner"]')
    expect(banner).to_contain_text("does not know this page: load it again to ask more.")
    assert page.evaluate("performance.getEntriesByType('navigation')[0].type") == "navigate"


def test_without_storage_the_page_is_the_same(open_page, app):
    app.wait_idle()
    script = """for (const name of ['localStorage', 'sessionStorage', 'indexedDB'])
        Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });
        Object.defineProperty(document, 'cookie', { get: () => '', set() { throw new Error('cookie'); } });"""
    page = open_page(app, "?prompt=Hello", script=script)
    expect(page.locator("#prompt textarea")).to_have_value("Hello")
    page.locator("#prompt textarea").press("Enter")
    expect(page.locator("#conversation article.assistant .text")).not_to_be_empty()
    page.locator("#stop").click()
