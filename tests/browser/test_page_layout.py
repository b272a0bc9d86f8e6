"""How the page sits on screens: themes, widths, one panel alone, fingers, reduced motion."""

import re

import pytest
from pages import ask, prompt_field, set_new_tokens, wait_until_answered, watch_frames
from playwright.sync_api import Page, expect

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize(
    "query, page_color, card_color, ink",
    [
        ("?__theme=light", "rgb(247, 247, 244)", "rgb(255, 255, 255)", "rgb(29, 33, 41)"),
        ("?__theme=dark", "rgb(16, 20, 24)", "rgb(23, 28, 34)", "rgb(232, 234, 237)"),
    ],
)
def test_both_themes_have_their_colours(open_page, app, query, page_color, card_color, ink):
    page = open_page(app, query)
    expect(page.locator("body")).to_have_css("background-color", page_color)
    expect(page.locator("gradio-app")).to_have_css(
        "background-color", re.compile(f"{re.escape(page_color)}|rgba.*, 0\\)")
    )
    for card in ("#chat", "#speed-now", "#race"):
        expect(page.locator(card)).to_have_css("background-color", card_color)
    expect(page.locator("#speed-now h2")).to_have_css("color", ink)
    expect(prompt_field(page)).to_have_css("color", ink)


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_nothing_scrolls_sideways(open_page, app, width):
    page = open_page(app, width=width, height=900)
    assert page.evaluate(OVERFLOW) <= 0
    ask(page, "x" * 300)
    for tab in ("Speed", "Cache", "Batch", "Race") if width < 1100 else ():
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate(OVERFLOW) <= 0, tab
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(OVERFLOW) <= 0
    outside = page.evaluate(
        """[...document.querySelectorAll('button, textarea, input, h2, .plot')]
            .filter((node) => node.checkVisibility() && node.getBoundingClientRect().right > innerWidth + 1)
            .map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert outside == []
    if width == 1600:
        assert page.evaluate("document.documentElement.scrollHeight - innerHeight") <= 0


def test_fingers_can_hit_everything_at_400(open_page, app):
    page = open_page(app, width=400, height=800, has_touch=True)
    heights, reached = {}, 0

    def touch(selector: str) -> None:
        nonlocal reached
        for control in page.locator(selector).all():
            if control.is_visible():
                # A trial click scrolls there and fails where something else lies on top.
                control.click(trial=True)
                heights[control.inner_text() or control.get_attribute("id")] = control.bounding_box()["height"]
                reached += 1

    touch("#chat button, #tabs button")
    for tab, selector in (("Batch", "#visitors"), ("Race", "#race-start"), ("Race", "#race .choice label")):
        page.get_by_role("tab", name=tab).click()
        touch(selector)
    touch("#race .switch button, .header button")
    assert {"Send", "Stop", "A haiku", "Speed", "Race", "Bring 6 visitors", "Start the race", "160 tokens"} <= set(
        heights
    )
    assert {name: height for name, height in heights.items() if height < 44} == {}
    ask(page, "hello", new_tokens=20)
    wait_until_answered(page)
    heights.clear()
    touch("#conversation footer button, #chips button")
    assert {"Copy", "Retry", "Edit", "New chat"} <= set(heights)
    assert {name: height for name, height in heights.items() if height < 44} == {}


def test_the_keyboard_reaches_every_control(open_page, app):
    page = open_page(app)
    names = set()
    page.locator("body").press("Tab")
    for _ in range(40):
        names.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        page.keyboard.press("Tab")
    wanted = {"send", "stop", "Why a cache?", "Settings", "visitors", "race-start"}
    assert wanted <= names, names
    prompt_field(page).focus()
    assert page.evaluate("document.activeElement.closest('#prompt') !== null")


@pytest.mark.parametrize(
    "view, shown", [("race", "race"), ("cache", "cache-growth"), ("batch", "batch-timeline"), ("chat", "chat")]
)
def test_one_panel_alone(open_page, app, view, shown):
    page = open_page(app, f"?view={view}&compact=1", width=420, height=700)
    for part in ("chat", "speed-now", "cache-growth", "batch-timeline", "race", "header", "tabs"):
        locator = page.locator(f"#{part}")
        expect(locator).to_be_visible() if part == shown else expect(locator).to_be_hidden()
    link = page.get_by_role("link", name="open the full page")
    expect(link).to_be_visible()
    expect(link).to_have_attribute("href", app.url)
    expect(page.locator("#footer")).to_contain_text(re.compile(r"measured live on .* · CPU · fp32"))
    assert page.evaluate(OVERFLOW) <= 0


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_by_itself_where_motion_is_unwanted(open_page, app, motion):
    page: Page = open_page(app, reduced_motion=motion)
    set_new_tokens(page, 100)
    watch_frames(page, "document.getAnimations().some(({ playState }) => playState === 'running')")
    page.locator("#race").get_by_text("48", exact=True).click()
    page.locator("#race-start").click()
    ask(page, "hello")
    expect(page.locator('#race [data-part="same"]')).to_have_text("48 of 48")
    wait_until_answered(page)
    # Where motion is welcome, the bars of the race slide: so this would be seen.
    assert ("true" in page.evaluate("window.seen")) == (motion == "no-preference")
