"""The panels beside the chat: the race, the visitors, and figures that stand still while data arrives."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pages import ANSWER, FIGURES, ask, count_updates, set_new_tokens, wait_until_answered, watch_frames
from playwright.sync_api import Page, expect
from running_app import eventually

from demo.race_figures import TITLES


def test_a_race_from_start_to_verdict(page: Page, app):
    race = page.locator("#race")
    race.get_by_text("48", exact=True).click()
    race.locator("#race-start").click()
    lanes = [race.locator(f'[data-lane="{name}"]') for name in ("naive", "cached")]
    for lane in lanes:
        expect(lane.locator('[data-part="said"]')).to_have_text(re.compile(r"^48 of 48 · [\d.]+ tokens/s · [\d.]+ s$"))
    expect(race.locator('[data-part="same"]')).to_have_text("48 of 48")
    expect(race.locator('[data-part="ratio"]')).to_have_text(re.compile(r"^\d+\.\d×$"))
    expect(race.locator('[data-part="notice"]')).to_be_hidden()
    expect(race.locator("#race-start")).to_be_visible()
    texts = [lane.locator('[data-part="text"]').text_content() for lane in lanes]
    assert texts[0] and texts[0] == texts[1]
    expect(race.locator('[data-part="explanation"]')).to_have_text(re.compile(r"^Of [\d.]+ s, [\d.]+ s went into \w+"))
    race.get_by_role("radio", name="Time so far").click()
    expect(page.locator(FIGURES["race"] + " .ytick")).not_to_have_count(0)
    lengths = page.locator(FIGURES["race"]).evaluate("node => node.data.map(({ x }) => x.length)")
    assert lengths == [49, 49]
    race.get_by_role("radio", name="Time so far").press("ArrowRight")
    expect(race.get_by_role("radio", name="Each token")).to_be_focused()
    assert not app.stats()["races"]["running"]


def test_a_race_of_all_lanes_from_the_address_to_the_files(open_page, app):
    app.wait_idle()
    settings = "race_tokens=10&race_lanes=naive_all,naive,by_hand,generate,cached,shared&race_choice=sampled"
    page = open_page(app, f"?{settings}&race_start=cold&race_first=shared&race_prompt=no+such+thing")
    race = page.locator("#race")
    expect(race.locator(".lane h3")).to_have_text(list(TITLES.values()))  # those of the address, before it starts
    race.get_by_text("Lanes and conditions").click()
    for name in ("naive, all logits", "shared batch", "sampled", "cold", "10", "A lighthouse"):
        expect(race.get_by_label(name, exact=True)).to_be_checked()
    expect(race.get_by_label("Who steps first")).to_have_value("shared batch first")
    race.locator("#race-start").click()
    result = race.locator('[data-part="result"]')
    expect(result.locator("tbody tr")).to_have_count(6)
    expect(race.locator('[data-part="same"]')).to_have_text("10 of 10")

    with page.expect_download() as download:
        result.get_by_role("link", name="JSON").click()
    told = json.loads(Path(download.value.path()).read_text())
    assert [lane["tokens"] for lane in told["lanes"]] == [10] * 6
    assert {"model", "dtype", "device", "torch", "transformers", "date", "choice", "warm_up"} <= set(told["conditions"])
    assert told["conditions"]["first"] == "shared" and told["conditions"]["warm_up"].startswith("none")
    parts = sum(part["seconds"] for part in told["gap"]["parts"])
    assert parts == pytest.approx(told["gap"]["from_s"] - told["gap"]["to_s"])
    with page.expect_download() as download:
        result.get_by_role("link", name="CSV").click()
    lines = [line for line in Path(download.value.path()).read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "lane,token,context,step_ms,forward_ms" and len(lines) == 1 + 6 * 10
    link = parse_qs(urlsplit(result.get_by_role("link", name="link to these settings").get_attribute("href")).query)
    assert link["race_start"] == ["cold"] and link["race_lanes"][0].split(",")[0] == "naive_all"


def test_a_race_can_be_stopped(page: Page, app):
    race = page.locator("#race")
    race.get_by_text("160 tokens").click()
    race.locator("#race-start").click()
    expect(race.locator('[data-lane="cached"] [data-part="text"]')).not_to_be_empty()
    race.locator("#forum-start").click()  # which wants the machine for itself
    expect(race.locator('[data-part="answer"]')).to_contain_text("Somebody else needs the machine just now")
    race.locator("#race-stop").click()
    expect(race.locator('[data-part="notice"]')).to_have_text("Stopped before the end: no verdict.")
    app.wait_idle(timeout=5)


def test_visitors_fill_the_batch(page: Page, app):
    page.locator("#visitors").click()
    eventually(lambda: app.queue()["running"] > 1)
    assert app.queue()["peak_batch_size"] > 1
    expect(page.locator('#batch-timeline [data-part="caption"]')).to_have_text(re.compile(r"^[1-9]\d* of 16 rows"))
    expect(page.locator("#visitors-said")).to_contain_text("6 came.")
    # Each is drawn, also one that said only a word; those who were here together in lanes of their own.
    bars = f"document.querySelector('{FIGURES['batch']}').data.filter(({{ type }}) => type === 'bar')"
    page.wait_for_function(
        f"new Set({bars}.flatMap(({{ customdata }}) => customdata.map(([client]) => client))).size >= 6"
    )
    page.wait_for_function(f"new Set({bars}.flatMap(({{ y }}) => y)).size > 1")


def test_a_request_tells_its_story_and_the_past_can_be_scrolled_back_to(page: Page, app):
    set_new_tokens(page, 40)
    ask(page, "Tell me a story.")
    wait_until_answered(page)
    batch = page.locator("#batch")
    yours = batch.get_by_label("Request").locator("option", has_text="you ·").first
    expect(yours).to_be_attached()
    batch.get_by_label("Request").select_option(yours.get_attribute("value"))
    story = r"^Request \d+, you · in line [\d.]+ s · \d+ tokens of prompt.* · first token after [\d.]+ s · 40 tokens at"
    expect(batch.locator('[data-part="detail"]')).to_have_text(re.compile(story))
    with page.expect_response(re.compile(r"kvscope/timeline\?window=120&back=0")) as past:
        batch.get_by_label("Show").select_option("120")
    told = past.value.json()
    assert [entry["tokens"] for entry in told["requests"]][-1] == 40
    ticks = batch.locator(".xaxislayer-above .xtick, .xtick")
    expect(ticks.first).to_have_text("−2:00 min")


def test_the_last_seconds_can_be_seen_step_by_step(page: Page, app):
    set_new_tokens(page, 30)
    ask(page, "Tell me a story.")
    wait_until_answered(page)
    with page.expect_response(re.compile(r"kvscope/timeline\?window=5&back=0")) as seconds:
        page.locator("#batch").get_by_label("Show").select_option("5")
    bars = seconds.value.json()["figure"]["data"][-1]
    assert bars["name"] == "speed of steps" and len(bars["x"]) >= 29
    page.wait_for_function(f"document.querySelector('{FIGURES['batch']}').data.some(({{ name }}) => name === 'steps')")


def test_what_one_visitor_read_of_a_preset_is_lent_to_the_next(open_page, app):
    for _ in range(2):
        page = open_page(app)
        set_new_tokens(page, 20)
        page.get_by_role("button", name="A haiku").click()
        expect(page.locator(ANSWER)).not_to_be_empty()
        wait_until_answered(page)
    saved = page.locator('#cache-growth [data-part="shared"]')
    expect(saved).to_have_text(re.compile(r"^Prefix reuse has saved all visitors together [\d,]+ tokens"))
    told = page.request.get(f"{app.url}kvscope/live").json()
    assert told["public_tokens"] > 0 and told["public_bytes"] > 0


def test_another_models_cache_is_reckoned_in_the_page(page: Page, app):
    card = page.locator("#cache-growth")
    card.get_by_text("What would another model hold?").click()
    card.get_by_label("Model").select_option("Mistral 7B v0.1")
    card.get_by_role("spinbutton", name="Sequences").fill("1")
    formula = "2 × 8 heads × 128 × 2 bytes × (0 layers × 8,192 + 32 layers × 4,096 tokens) × 1 sequence = 536.9 MB"
    expect(card.locator('[data-part="whatif-formula"]')).to_have_text(formula)
    expect(card.locator('[data-part="whatif-said"]')).to_contain_text("32 of 32 layers look back 4,096 tokens only")
    card.get_by_label("Model").select_option("Llama 2 7B")
    expect(card.locator('[data-part="whatif-said"]')).to_contain_text("Every query head has its own keys and values")
    card.get_by_label("Model").select_option("Falcon 7B")
    expect(card.locator('[data-part="whatif-formula"]')).to_contain_text("2 × 1 head ×")
    expect(card.locator('[data-part="whatif-said"]')).to_contain_text("One KV head serves 71 query heads")


def test_brought_visitors_leave_with_the_page_that_brought_them(open_page, app):
    app.wait_idle()
    page = open_page(app)
    page.locator("#visitors").click()
    eventually(lambda: app.queue()["running"] > 1)
    page.close()
    app.wait_idle(timeout=5)


@pytest.mark.parametrize("figure", ["cache", "batch", "speed"])
def test_a_figure_keeps_its_zoom_while_data_arrives(page: Page, app, figure):
    set_new_tokens(page, 1024)
    ask(page, "Tell me a long story.")
    node = page.locator(FIGURES[figure])
    # What others have measured is drawn, and then hidden, before one's own measurements begin.
    expect(page.locator("#speed-now .explanation")).to_have_text(re.compile("Without a cache|does not pay yet"))
    page.wait_for_function(f"document.querySelector('{FIGURES[figure]}').data?.some(({{ x }}) => x.length)")
    node.scroll_into_view_if_needed()
    whole = node.evaluate("node => [...node.layout.xaxis.range]")
    count_updates(page, FIGURES[figure])
    box = node.locator(".nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    # Whoever drags slowly drags while data arrives.
    for _ in range(2):
        page.wait_for_event("response", lambda response: "kvscope/live" in response.url)
    page.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=5)
    page.mouse.up()
    page.wait_for_function(
        f"(from) => document.querySelector('{FIGURES[figure]}').layout.xaxis.range[0] > from", arg=whole[0]
    )
    zoomed = node.evaluate("node => [...node.layout.xaxis.range]")
    updates = page.evaluate("window.updates")
    page.wait_for_function("(updates) => window.updates >= updates + 2", arg=updates)
    assert node.evaluate("node => [...node.layout.xaxis.range]") == zoomed
    assert page.locator("html[data-answering]").count() == 1, "data no longer arrived"
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], middle)
    page.wait_for_function(
        f"(from) => document.querySelector('{FIGURES[figure]}').layout.xaxis.range[0] === from", arg=whole[0]
    )
    page.locator("#stop").click()
    wait_until_answered(page)


def test_nothing_jumps_while_text_streams(page: Page, app):
    page.set_viewport_size({"width": 1120, "height": 900})  # the narrowest with two columns
    page.locator("#visitors").scroll_into_view_if_needed()  # now, so that no click has to
    watch_frames(
        page,
        """['composer', 'chat', 'speed-now', 'cache-growth', 'batch-timeline', 'race'].map((id) => {
            const { x, y, width, height } = document.getElementById(id).getBoundingClientRect();
            return [id, x, y, width, height].join(' ');
        })""",
    )
    ask(page, "Why is the sky dark at night?")
    page.locator("#visitors").click()
    expect(page.locator('#speed-now [data-part="ratio"]')).to_have_text(re.compile("×"))
    expect(page.locator("#visitors-said")).to_contain_text("came")
    wait_until_answered(page)
    seen = page.evaluate("window.seen")
    assert len(seen) == 1, "\n".join(seen)
