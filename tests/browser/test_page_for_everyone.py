"""For everyone: axe-core finds nothing serious, the keyboard reaches everything, and the tour shows the real page."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from pages import ask
from playwright.sync_api import Page, expect

STATES = {
    "light, wide, while an answer streams": ("?__theme=light", 1280),
    "dark, wide, while an answer streams": ("?__theme=dark", 1280),
    "light, narrow, while an answer streams": ("?__theme=light", 400),
    "dark, narrow, while an answer streams": ("?__theme=dark", 400),
    "dark, one panel": ("?__theme=dark&view=race&compact=1", 1280),
    "light, one narrow panel": ("?__theme=light&view=batch&compact=1", 400),
}


@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing_serious(open_page, app, state):
    query, width = STATES[state]
    page = open_page(app, query, width=width)
    if "answer" in state:
        ask(page, "Tell me a story.", new_tokens=1024)  # still streaming when axe looks
        for tab, closed in (("Race", "Lanes and conditions"), ("Cache", "What would another model hold?")):
            if width == 400:
                page.get_by_role("tab", name=tab).click()
            page.get_by_text(closed).click()
    violations = Axe().run(page).response["violations"]
    if "answer" in state:
        assert page.locator("html[data-answering]").count() == 1, "the answer was over before axe looked"
        page.locator("#stop").click()
    assert [
        (found["id"], [node["target"] for node in found["nodes"]][:4])
        for found in violations
        if found["impact"] in ("serious", "critical")
    ] == []


def test_the_tour_drives_the_page_by_the_keyboard(open_page, app):
    app.wait_idle()
    page: Page = open_page(app)
    start = page.get_by_role("button", name="Show me around")
    start.press("Enter")
    tour = page.get_by_role("dialog", name="A tour in five steps")
    expect(tour).to_be_focused()
    ask_for_me = tour.get_by_role("button", name="Ask for me")
    expect(ask_for_me).to_have_css("color", "rgb(255, 255, 255)")  # on ink: no other button's grey
    expect(page.get_by_role("textbox", name="Your question")).to_be_in_viewport()
    ask_for_me.press("Enter")
    expect(page.locator("#conversation article.assistant .text")).not_to_be_empty()
    for panel in ("#speed-now", "#cache-growth", "#batch-timeline"):
        tour.get_by_role("button", name="Next").press("Enter")
        expect(page.locator(panel)).to_have_attribute("data-toured", "")
    tour.get_by_role("button", name="Bring visitors").press("Enter")
    expect(tour).to_contain_text(re.compile("[2-9] requests shared? each step of the model"))
    page.keyboard.press("Escape")
    expect(tour).to_be_hidden()
    expect(start).to_be_focused()
    expect(page.locator("[data-toured]")).to_have_count(0)


def test_words_of_the_trade_are_explained_where_they_stand(open_page, app):
    page = open_page(app)
    term = page.locator("#batch .term").first
    term.focus()
    note = page.get_by_role("tooltip")
    expect(note).to_be_visible()
    assert term.get_attribute("aria-describedby") == note.get_attribute("id")
    term.press("Escape")
    expect(note).to_be_hidden()


def test_figures_say_what_they_show(open_page, app):
    page = open_page(app)
    ask(page, "Tell me a story.")
    for panel in ("speed-now", "cache-growth", "batch"):
        expect(page.locator(f'#{panel} [data-part="figure"]')).to_have_attribute("role", "img")
        expect(page.locator(f'#{panel} [data-part="figure"]')).not_to_have_attribute("aria-label", "")
    page.locator("#stop").click()
