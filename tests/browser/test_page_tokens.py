"""What stands behind an answer: its tokens, how likely each was, and answers that have to fit a schema."""

import json
import math
import re

import pytest
from pages import ANSWER, NOTE, ask, prompt_field, set_new_tokens, wait_for_growth, wait_until_answered
from playwright.sync_api import Locator, Page, expect
from test_page_chat import HOSTILE

TOKEN = "#conversation .token"
CARD = "#token-card"
NOTICE = '#conversation [data-part="notice"]'


def toggle(page: Page) -> Locator:
    return page.locator("#conversation article.assistant").last.get_by_role("button", name="Tokens")


def show_tokens(page: Page, new_tokens: int = 180) -> list[dict]:
    """Ask, wait for the end, and look at the answer's tokens; what the page was told about them.

    So many that gibberish has a few letters among them: of 60, one answer in eight has no three.
    """
    ask(page, "Why is the sky dark at night?", new_tokens)
    wait_until_answered(page)
    with page.expect_response(re.compile("kvscope/tokens")) as response:
        toggle(page).click()
    expect(page.locator(TOKEN)).to_have_count(new_tokens)
    page.mouse.move(0, 0)  # where it clicked there may be a token now
    return response.value.json()["tokens"]


def readable(tokens: list[dict]) -> list[int]:
    """The numbers of the tokens that can be pointed at for certain: those of one letter or digit."""
    found = [n for n, token in enumerate(tokens) if re.fullmatch("[A-Za-z0-9]", token["text"])]
    assert len(found) > 2, tokens
    return found


def percent(text: str) -> float:
    return float(text.strip("<>%"))


def card(page: Page) -> tuple[float, list[float], list[bool]]:
    """What the card says: the token's percentage, those in its list, and which of these it is."""
    expect(page.locator(CARD)).to_be_visible()
    rows = page.locator(f"{CARD} li")
    shares = [percent(text) for text in rows.locator("span").all_inner_texts()]
    chosen = rows.evaluate_all("rows => rows.map((row) => row.className === 'chosen')")
    return percent(page.locator(f"{CARD} output").inner_text()), shares, chosen


def assert_the_card_tells(page: Page, token: dict) -> None:
    own, shares, chosen = card(page)
    best = shares[:5]
    assert best == sorted(best, reverse=True) and sum(shares) <= 100 + 0.05 * len(shares) + 0.05
    assert chosen.count(True) == 1 and shares[chosen.index(True)] == own
    assert own == pytest.approx(100 * math.exp(token["logprob"]), abs=0.1)
    assert best == pytest.approx([100 * math.exp(logprob) for _, logprob, _ in token["top"]], abs=0.1)
    assert len(shares) == 5 + (not any(is_chosen for *_, is_chosen in token["top"]))
    expect(page.locator(CARD)).to_contain_text("own probabilities, before temperature")
    widths = page.locator(f"{CARD} .bar > i").evaluate_all("bars => bars.map((bar) => parseFloat(bar.style.width))")
    assert widths == pytest.approx(shares, abs=0.1)
    inside = page.locator(CARD).evaluate(
        """card => { const { left, top, right, bottom } = card.getBoundingClientRect();
                     return left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight; }"""
    )
    assert inside


def test_an_answer_can_be_seen_as_its_tokens_and_as_text_again(page: Page):
    asked_for: list[str] = []
    page.on("request", lambda request: "kvscope/tokens" in request.url and asked_for.append(request.url))
    ask(page, "Why is the sky dark at night?", new_tokens=60)
    wait_until_answered(page)
    text = page.locator(ANSWER).text_content()
    assert asked_for == []

    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; }")
    page.locator("article.assistant").get_by_role("button", name="Copy").click()
    expect(toggle(page)).to_have_attribute("aria-pressed", "false")
    toggle(page).click()
    expect(toggle(page)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(TOKEN)).to_have_count(60)
    assert len(asked_for) == 1
    assert "".join(page.locator(TOKEN).all_text_contents()) == page.evaluate("window.copied")
    expect(page.locator("#conversation .hint")).to_contain_text("The stronger the tint")

    toggle(page).click()
    expect(toggle(page)).to_have_attribute("aria-pressed", "false")
    expect(page.locator(TOKEN)).to_have_count(0)
    assert page.locator(ANSWER).text_content() == text
    expect(page.locator("#conversation .hint")).to_be_hidden()


def test_pointing_at_a_token_shows_its_probability_and_the_runners_up(page: Page):
    tokens = show_tokens(page)
    expect(page.locator(CARD)).to_be_hidden()
    for number in readable(tokens)[:3]:
        page.locator(TOKEN).nth(number).hover()
        expect(page.locator(f"{CARD} header code")).to_have_text(tokens[number]["text"])
        assert_the_card_tells(page, tokens[number])
    prompt_field(page).hover()
    expect(page.locator(CARD)).to_be_hidden()


def test_tokens_are_tinted_by_how_unlikely_they_were(page: Page):
    tokens = show_tokens(page)
    doubts = page.locator(TOKEN).evaluate_all(
        "nodes => nodes.map((node) => Number(node.style.getPropertyValue('--doubt')))"
    )
    assert doubts == pytest.approx([1 - math.exp(token["logprob"]) for token in tokens])
    colours = page.locator(TOKEN).evaluate_all("nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)")
    assert len(set(colours)) > 5


def test_the_keyboard_goes_from_token_to_token(page: Page):
    tokens = show_tokens(page)
    focused = page.locator(f"{TOKEN}:focus")
    toggle(page).focus()
    # The one place of Tab in them stands right before the buttons.
    page.keyboard.press("Shift+Tab")
    expect(page.locator(TOKEN).nth(0)).to_be_focused()
    last = len(tokens) - 1
    for number, key in [(1, "ArrowRight"), (2, "ArrowRight"), (1, "ArrowLeft"), (last, "End"), (0, "Home")]:
        page.keyboard.press(key)
        expect(page.locator(TOKEN).nth(number)).to_be_focused()
        expect(focused).to_have_attribute("aria-describedby", "token-card")
        assert_the_card_tells(page, tokens[number])
    page.keyboard.press("Escape")
    expect(page.locator(CARD)).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(page.locator(CARD)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(CARD)).to_be_hidden()
    expect(toggle(page)).to_be_focused()


def test_a_tap_shows_the_card_at_400(open_page, app):
    page = open_page(app, width=400, height=800, has_touch=True)
    tokens = show_tokens(page)
    for number in readable(tokens)[:3]:
        page.locator(TOKEN).nth(number).tap()
        expect(page.locator(f"{CARD} header code")).to_have_text(tokens[number]["text"])
        assert_the_card_tells(page, tokens[number])
    page.locator("#conversation article.user").tap()
    expect(page.locator(CARD)).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_card_goes_out_of_sight_with_its_token(page: Page):
    tokens = show_tokens(page)
    page.locator(TOKEN).nth(readable(tokens)[0]).focus()
    expect(page.locator(CARD)).to_be_visible()
    page.locator('#conversation [data-part="scroll"]').evaluate(
        "node => { node.style.paddingBottom = '2000px'; node.scrollTop = node.scrollHeight; }"
    )
    expect(page.locator(CARD)).to_be_hidden()


def press_while_it_moves(page: Page, button: Locator) -> None:
    """Press it, and let go only when the growing answer has moved it away."""
    button.hover()
    page.mouse.down()
    before = button.bounding_box()
    page.wait_for_function(
        "([node, y]) => Math.abs(node.getBoundingClientRect().y - y) > 20", arg=[button.element_handle(), before["y"]]
    )
    page.mouse.up()


def test_tokens_can_be_watched_while_they_are_written(page: Page):
    ask(page, "Tell me a long story.", new_tokens=1024)
    press_while_it_moves(page, toggle(page))
    expect(page.locator(TOKEN)).not_to_have_count(0)
    wait_for_growth(page, ANSWER)
    expect(page.locator("html[data-answering]")).to_have_count(1)
    page.locator("#stop").click()
    count = re.match(r"(\d+) tokens", wait_until_answered(page))
    assert count
    expect(page.locator(TOKEN)).to_have_count(int(count[1]))


def test_only_the_last_answers_have_tokens_and_a_new_chat_forgets_them(page: Page, app):
    set_new_tokens(page, 3)
    for number in range(9):
        ask(page, f"Question {number}")
        expect(page.locator(NOTE)).to_have_count(number + 1)
        wait_until_answered(page)
    first = page.locator("#conversation article.assistant").first
    first.get_by_role("button", name="Tokens").click()
    expect(first.locator(".hint")).to_have_text(
        "The tokens of this answer are gone: they are kept for your last 8 answers."
    )
    expect(first.get_by_role("button", name="Tokens")).to_have_attribute("aria-pressed", "false")
    with page.expect_response(re.compile("kvscope/tokens")) as response:
        toggle(page).click()
    expect(page.locator(TOKEN)).to_have_count(3)
    # The address has to be known, and then leads nowhere any more.
    address = response.value.url.removeprefix(app.url)
    assert len(app.get(address).json()["tokens"]) == 3
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#conversation article")).to_have_count(0)
    assert app.get(address).json()["tokens"] is None


def test_hostile_tokens_are_only_text(page: Page):
    token = {"text": HOSTILE, "logprob": -0.5, "special": False, "top": [[HOSTILE, -0.5, True], ["<b>", -1.5, False]]}
    special = {"text": "", "name": HOSTILE, "logprob": -3.0, "special": True, "top": []}
    body = json.dumps({"from": 0, "tokens": [token, special], "kept": 8})
    page.route(re.compile("kvscope/tokens"), lambda route: route.fulfill(body=body, content_type="application/json"))
    ask(page, "hello", new_tokens=3)
    wait_until_answered(page)
    toggle(page).click()
    expect(page.locator(TOKEN)).to_have_count(2)
    for number in (0, 1):
        page.locator(TOKEN).nth(number).focus()
        expect(page.locator(CARD)).to_contain_text("onerror=")
    assert page.locator(f"#conversation {TOKEN} *, {CARD} :is(img, script, b, a)").count() == 0
    assert page.evaluate("window.pwned") is None


def test_tokens_that_cannot_be_fetched_leave_the_text(open_page, app):
    page = open_page(app, provokes="Failed to load resource")
    ask(page, "hello", new_tokens=20)
    wait_until_answered(page)
    page.route(re.compile("kvscope/tokens"), lambda route: route.abort())
    toggle(page).click()
    expect(page.locator("#conversation .hint")).to_have_text("The tokens could not be fetched. Try again in a moment.")
    page.unroute(re.compile("kvscope/tokens"))
    toggle(page).click()
    expect(page.locator(TOKEN)).to_have_count(20)
    page.context.close()


# ---- answers that have to fit


def schema_field(page: Page) -> Locator:
    return page.get_by_label("Answer as JSON (schema)")


def use_example(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Use the example").click()
    expect(schema_field(page)).to_have_value(re.compile(r'"known_for"'))
    page.get_by_role("button", name="Settings").click()


def test_the_example_of_a_schema_is_asked_and_its_answer_fits(open_page, ending):
    page = open_page(ending)
    set_new_tokens(page, 1024)
    use_example(page)
    expect(prompt_field(page)).to_have_value("Describe the city of Lisbon.")
    expect(page.locator("html[data-json]")).to_have_count(1)
    # The tiny model would fill every string to its end.
    shorter = re.sub(r'"maxLength": \d+', '"maxLength": 8', schema_field(page).input_value())
    page.get_by_role("button", name="Settings").click()
    schema_field(page).fill(shorter)
    page.get_by_role("button", name="Settings").click()
    prompt_field(page).press("Enter")
    expect(page.locator(f"{ANSWER} pre.json")).not_to_be_empty()
    note = wait_until_answered(page)
    assert "limit" not in note
    shown = page.locator(f"{ANSWER} pre.json").text_content()
    city = json.loads(shown)
    assert list(city) == ["name", "country", "population", "known_for"]
    assert isinstance(city["population"], int) and 1 <= len(city["known_for"]) <= 3
    # On lines of its own, as far as its words allow.
    assert shown.startswith('{\n  "name": "') and shown.endswith("\n  ]\n}")
    # Without the schema the next answer is free again.
    page.get_by_role("button", name="Settings").click()
    schema_field(page).fill("")
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("html[data-json]")).to_have_count(0)
    set_new_tokens(page, 8)
    prompt_field(page).fill("And freely?")
    prompt_field(page).press("Enter")
    expect(page.locator(NOTE)).to_have_count(2)
    wait_until_answered(page)
    expect(page.locator(f"{ANSWER} pre.json")).to_have_count(1)


def test_the_example_leaves_a_prompt_that_is_there(page: Page):
    prompt_field(page).fill("What is my own question?")
    use_example(page)
    expect(prompt_field(page)).to_have_value("What is my own question?")


def test_a_schema_that_cannot_be_used_is_refused_before_queueing(page: Page, app):
    before = app.stats()["totals"]["requests"]
    page.get_by_role("button", name="Settings").click()
    schema_field(page).fill('{"type": "strin"}')
    page.get_by_role("button", name="Settings").click()
    prompt_field(page).fill("Describe Lisbon.")
    prompt_field(page).press("Enter")
    said = page.locator(NOTICE)
    expect(said).to_have_text(
        re.compile(r"^grammar must be a JSON schema that can be followed, not .*Invalid type: strin")
    )
    expect(said).to_be_in_viewport()
    expect(prompt_field(page)).to_have_value("Describe Lisbon.")
    assert app.stats()["totals"]["requests"] == before
    # Without it the prompt is answered.
    page.get_by_role("button", name="Settings").click()
    schema_field(page).fill("")
    page.get_by_role("button", name="Settings").click()
    prompt_field(page).press("Enter")
    expect(page.locator(ANSWER)).not_to_be_empty()


def test_unfinished_json_is_already_laid_out(page: Page):
    laid_out = page.evaluate(
        """async () => {
            const { indented } = await import('/kvscope/json.js');
            const text = JSON.stringify({ a: 'x{,"}\\\\', b: [1, [], {}, null], c: { d: true } });
            const all = [...text].map((_, end) => indented(text.slice(0, end + 1)));
            return { text, last: all.at(-1), grows: all.every((part, n) => !n || part.trimEnd().length >= 1) };
        }"""
    )
    assert json.loads(laid_out["last"]) == json.loads(laid_out["text"]) and laid_out["grows"]
    assert laid_out["last"] == json.dumps(json.loads(laid_out["text"]), indent=2)
