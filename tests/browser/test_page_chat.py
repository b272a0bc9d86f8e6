"""A visitor's conversation in a real browser: typing, streaming, stopping, and what may go wrong."""

import json
import re

import pytest
from pages import (
    ANSWER,
    AWAY,
    FIGURES,
    NOTE,
    ask,
    prompt_field,
    set_new_tokens,
    wait_for_growth,
    wait_until_answered,
)
from playwright.sync_api import Page, expect
from running_app import eventually, free_port, running_app


def test_text_grows_and_the_panel_moves(page: Page, app):
    ask(page, "Why is the sky dark at night?")
    wait_for_growth(page, ANSWER)
    expect(page.locator('#speed-now [data-part="ratio"]')).to_have_text(re.compile(r"^\d+(\.\d)?×$"))
    measured = page.locator('#speed-now [data-part="count"]')
    expect(measured).to_have_text(re.compile(r"^without, (measured (once|twice)|middle of the last 3)$"))
    page.wait_for_function(
        f"document.querySelector('{FIGURES['speed']}').data?.some(({{ y }}) => y.some((v) => v > 0))"
    )
    # The stacked areas are the traces of requests: `meta` says whose each is.
    page.wait_for_function(
        f"document.querySelector('{FIGURES['cache']}').data?.some(({{ meta, y }}) => meta && y.some((v) => v > 0))"
    )
    page.wait_for_function(
        f"document.querySelector('{FIGURES['batch']}').data?.some(({{ x }}) => x.some((v) => v > 0))"
    )
    note = wait_until_answered(page)
    assert re.fullmatch(r"256 tokens · first after [\d.]+ s · [\d.]+ tokens/s · cut at its limit", note)
    assert app.stats()["requests"][-1]["tokens"] == 256
    expect(page.locator('#conversation [data-part="context"]')).to_have_text(re.compile("of 2,048 tokens of context"))


def test_stop_stops(page: Page, app):
    ask(page, "Tell me everything.", new_tokens=1024)
    wait_for_growth(page, ANSWER)
    page.locator("#stop").click()
    assert wait_until_answered(page).endswith("stopped")
    request = app.wait_idle(timeout=5)["requests"][-1]
    assert request["finish_reason"] == "cancelled" and 0 < request["tokens"] < 1024
    # What was written stays, and the conversation goes on.
    assert page.locator(ANSWER).inner_text()
    set_new_tokens(page, 8)
    ask(page, "And in short?")
    assert wait_until_answered(page).startswith("8 tokens")


def test_a_closed_page_is_cancelled(open_page, app):
    page = open_page(app)
    ask(page, "Tell me everything.", new_tokens=1024)
    page.context.close()
    request = app.wait_idle(timeout=5)["requests"][-1]
    assert request["finish_reason"] == "cancelled" and request["tokens"] < 1024


def test_shift_and_enter_breaks_the_line(page: Page):
    field = prompt_field(page)
    field.fill("one")
    field.press("Shift+Enter")
    field.type("two")
    expect(field).to_have_value("one\ntwo")
    expect(page.locator("#conversation article")).to_have_count(0)
    field.press("Enter")
    expect(page.locator("#conversation article.user .text")).to_have_text("one\ntwo")
    expect(field).to_have_value("")


def test_retry_edit_copy_and_new_chat(open_page, app):
    page = open_page(app, permissions=["clipboard-read", "clipboard-write"])
    articles, answer = page.locator("#conversation article"), page.locator(ANSWER)
    ask(page, "What is a lighthouse?", new_tokens=40)
    wait_until_answered(page)

    page.locator("article.user").get_by_role("button", name="Copy").click()
    eventually(lambda: page.evaluate("navigator.clipboard.readText()") == "What is a lighthouse?")

    first = answer.text_content()
    page.get_by_role("button", name="Retry").click()
    # A new seed each time: forty random bytes do not come twice.
    page.wait_for_function("([s, old]) => document.querySelector(s)?.textContent !== old", arg=[ANSWER, first])
    wait_until_answered(page)
    expect(articles).to_have_count(2)
    assert answer.text_content() and answer.text_content() != first

    page.get_by_role("button", name="Edit").click()
    expect(articles).to_have_count(0)
    expect(prompt_field(page)).to_have_value("What is a lighthouse?")
    prompt_field(page).press("Enter")
    expect(answer).not_to_be_empty()
    wait_until_answered(page)

    page.get_by_role("button", name="New chat").click()
    expect(articles).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask a small model something.")).to_be_visible()
    expect(prompt_field(page)).to_have_value("")


def test_a_starter_is_asked_at_one_click(page: Page):
    page.get_by_role("button", name="A haiku").click()
    expect(page.locator("#conversation article.user .text")).to_have_text("Write a haiku about memory.")
    expect(page.locator(ANSWER)).not_to_be_empty()


@pytest.mark.parametrize(
    "text, notice",
    [("   ", r"The prompt is empty: write at least one character\."), ("a" * 9_000, r"must together be at most 2048")],
    ids=["blank", "too long"],
)
def test_a_refused_prompt_says_why_and_is_kept(page: Page, text, notice):
    prompt_field(page).fill(text)
    prompt_field(page).press("Enter")
    said = page.locator('#conversation [data-part="notice"]')
    expect(said).to_have_text(re.compile(notice))
    expect(said).to_be_in_viewport()
    expect(prompt_field(page)).to_have_value(text)
    expect(page.locator("#conversation article")).to_have_count(0)
    ask(page, "A better one")
    expect(said).to_be_hidden()


@pytest.mark.parametrize(
    "label, value, notice",
    [("Seed (empty: a new one each time)", "lucky", "seed must be a whole number from 0, or empty, not 'lucky'")],
)
def test_a_refused_setting_says_why(page: Page, label, value, notice):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(label).fill(value)
    prompt_field(page).fill("hello")
    prompt_field(page).press("Enter")
    expect(page.locator('#conversation [data-part="notice"]')).to_have_text(notice)
    expect(prompt_field(page)).to_have_value("hello")


HOSTILE = (
    "<img src=x onerror='window.pwned=1'><script>window.pwned=2</script> ${window.pwned=3} {{window.pwned=4}} "
    "![picture](http://example.invalid/a.png) [link](javascript:window.pwned=5) \u202egnp.exe"
)
MARKS = "a" + "\u0301" * 400
LONG = "x" * 500
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("width", [400, 1280])
def test_a_hostile_prompt_is_only_text(open_page, app, width):
    page = open_page(app, width=width)
    text = f"{HOSTILE} {MARKS} {LONG}"
    ask(page, text, new_tokens=20)
    wait_until_answered(page)
    expect(page.locator("#conversation article.user .text")).to_have_text(text)
    assert page.locator("#conversation").locator("img, script, iframe, svg, a").count() == 0
    assert page.evaluate("window.pwned") is None
    assert page.evaluate(OVERFLOW) <= 0
    # What is piled up on a letter stays in its message.
    expect(page.locator("#conversation article.user .text")).to_have_css("overflow-y", "auto")
    expect(page.locator(ANSWER)).to_have_css("overflow-y", "clip")


def test_a_mountain_of_marks_is_refused_and_can_be_taken_back(page: Page):
    prompt_field(page).fill("a" + "\u0301" * 100_000)
    prompt_field(page).press("Enter")
    said = page.locator('#conversation [data-part="notice"]')
    expect(said).to_have_text(
        re.compile("prompt is too long: 100,[0-9]{3} characters do not fit a context of [0-9,]+ tokens", re.I)
    )
    assert page.evaluate(OVERFLOW) <= 0
    prompt_field(page).fill("")
    ask(page, "Better", new_tokens=3)


def test_what_a_model_is_made_to_say_is_only_text(open_page, ending):
    """A schema admits this one answer: the model has to say it, token by token."""
    text = f"{HOSTILE} {MARKS}"
    page = open_page(ending, width=400)
    set_new_tokens(page, 1024)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answer as JSON (schema)").fill(json.dumps({"enum": [text]}))
    page.get_by_role("button", name="Settings").click()
    ask(page, "Say it")
    note = wait_until_answered(page)
    assert json.loads(page.locator(f"{ANSWER} pre.json").text_content()) == text, note
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator("#conversation .token").nth(20)).to_be_visible()
    assert page.locator("#conversation").locator("img, script, iframe, svg, a").count() == 0
    assert page.evaluate("window.pwned") is None
    assert page.evaluate(OVERFLOW) <= 0
    # Its words are in no figure: these know lengths and times.
    assert "pwned" not in "".join(page.locator("#side").all_inner_texts())


def test_a_hostile_answer_is_only_text(page: Page):
    # What a model says cannot be told it; the function that shows it can.
    found = page.evaluate(
        """async (text) => {
            const { markdown } = await import('/kvscope/markdown.js');
            const box = document.querySelector('#conversation [data-part="messages"]');
            box.replaceChildren(...markdown(`# ${text}\\n- ${text}\\n\\n**${text}**\\n\\n\\`${text}\\`\\n\\n` +
                '```\\n' + text + '\\n```'));
            return [...box.querySelectorAll('*')].map((node) => node.tagName).filter((tag) =>
                !['H4', 'UL', 'LI', 'P', 'STRONG', 'EM', 'CODE', 'PRE'].includes(tag));
        }""",
        HOSTILE,
    )
    assert found == []
    expect(page.locator('#conversation [data-part="messages"]')).to_contain_text("window.pwned=2")
    assert page.evaluate("window.pwned") is None


def test_two_browsers_share_one_batch(open_page, app):
    app.wait_idle()
    pages = [open_page(app), open_page(app)]
    for page in pages:
        set_new_tokens(page, 1024)
    for page in pages:
        ask(page, "Tell me a long story.")
    stats = eventually(lambda: (s := app.stats())["queue"]["running"] == 2 and s)
    assert stats["queue"]["peak_batch_size"] >= 2
    assert len({slot["client"] for slot in stats["cache"]["slots"] if slot["state"] == "running"}) == 2
    for page in pages:
        page.locator("#stop").click()
        assert "shared its batch with 1 other" in wait_until_answered(page)


def test_a_page_outlives_its_server_and_keeps_what_was_written(open_page, slow_model):
    port = free_port()
    with running_app(slow_model, port=port, KVSCOPE_MAX_BATCH_SIZE=1, KVSCOPE_MAX_WAITING=1) as app:
        page = open_page(app, provokes=AWAY)
        banner, speed = (page.locator(f'#header [data-part="{part}"]') for part in ("banner", "speed"))
        expect(banner).to_be_hidden()
        expect(page.locator("#cache-growth .empty")).to_be_visible()
        ask(page, "Remember this.", new_tokens=20)
        wait_until_answered(page)
        ask(page, "Tell me everything.", new_tokens=1024)
        wait_for_growth(page, ANSWER)
        prompt_field(page).fill("Are you there?")
        other = page.context.new_page()
        other.goto(app.url)
        prompt_field(other).fill("Me, too")
        prompt_field(other).press("Enter")
        expect(banner).to_contain_text("The line is full.")
        app.worker().kill()
        expect(banner).to_contain_text("The worker stopped and is starting again.")
        expect(banner).to_contain_text("The line is full.")
        app.process.terminate()
        expect(banner).to_contain_text("new questions are refused.")
        other.close()
        expect(speed).to_be_visible()
        app.process.kill()
        app.process.wait()
    expect(banner).to_have_text("The connection is lost. The page tries again by itself; what you wrote stays here.")
    expect(speed).to_be_hidden()  # nobody knows it now
    wait_until_answered(page)  # it does not look as if more were to come
    expect(page.locator('#conversation [data-part="notice"]')).to_have_text(re.compile("^The connection broke while"))
    prompt_field(page).press("Enter")
    expect(page.locator(".toast-body")).to_have_count(0)  # Gradio's own sentence
    expect(page.locator("#conversation article")).to_have_count(4)
    half = page.locator(ANSWER).last.text_content()
    with running_app(slow_model, port=port):
        expect(banner).to_be_hidden()
        expect(prompt_field(page)).to_have_value("Are you there?")
        assert half and page.locator(ANSWER).last.text_content() == half
        expect(page.locator("#settings").get_by_label("number input for Most new tokens")).to_have_value("1024")
        set_new_tokens(page, 20)
        prompt_field(page).press("Enter")
        expect(page.locator(NOTE)).to_have_count(3)
        assert wait_until_answered(page).startswith("20 tokens")
        assert page.evaluate("history.state?.kvscope") is None
        page.context.close()


def test_an_answer_that_broke_off_is_not_waited_for(open_page, app):
    """As where a laptop sleeps: the stream is gone, the server is not."""
    page = open_page(app, provokes=AWAY)
    page.route(re.compile("queue/data"), lambda route: route.abort())
    prompt_field(page).fill("Tell me everything.")
    with page.expect_event("requestfailed", lambda request: "queue/data" in request.url):
        prompt_field(page).press("Enter")
    # Gradio does nothing any more: the page loads itself anew, with the question.
    page.wait_for_function("performance.getEntriesByType('navigation')[0].type === 'reload'")
    page.unroute(re.compile("queue/data"))
    expect(prompt_field(page)).to_have_value("Tell me everything.")
    set_new_tokens(page, 8)
    prompt_field(page).press("Enter")
    expect(page.locator(NOTE)).to_have_text(re.compile("^8 tokens .* cut at its limit$"))
    page.context.close()


def test_the_real_model_speaks_and_says_what_it_reads(open_page, embedded_folder):
    with running_app(embedded_folder, KVSCOPE_THREADS=0) as app:
        page = open_page(app)
        page.get_by_role("button", name="Why a cache?").click()
        expect(page.locator(ANSWER)).to_have_text(re.compile("[a-z]{3,} [a-z]{2,} "))
        expect(page.locator('#speed-now [data-part="ratio"]')).to_have_text(re.compile(r"^\d+(\.\d)?×$"))
        page.locator("#stop").click()
        wait_until_answered(page)
        page.get_by_role("button", name="A long page").click()
        expect(page.locator('#conversation [data-part="label"]')).to_have_text(
            re.compile(r"^reading \d+ of [\d,]+ tokens")
        )
        page.locator("#stop").click()
        assert wait_until_answered(page).startswith("0 tokens")
        page.context.close()
