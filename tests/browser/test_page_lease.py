"""The GPU lease as the page shows it: who pays, how long, who shares it, and what a visitor is told."""

import re
import threading
from collections.abc import Iterator

import psutil
import pytest
from device_api import DeviceApi, device_api
from pages import ANSWER, NOTE, ask, prompt_field, set_new_tokens, wait_until_answered
from playwright.sync_api import Page, expect
from running_app import RunningApp, eventually
from visitors import at_rest, lease, on_zerogpu, open_lease, token

LEASE = '#header [data-part="lease"]'
PENDING = '#conversation [data-part="label"]'
NOTICE = '#conversation [data-part="notice"]'
LENIENT_S = 60  # before a lease is killed that its worker ends by itself: however slow this machine is just now
ANN = {"extra_http_headers": {"X-IP-Token": token("ann")}}


@pytest.fixture(scope="module")
def leased(slow_model) -> Iterator[tuple[RunningApp, DeviceApi]]:
    shortest = {"KVSCOPE_LEASE_MIN_S": 8, "KVSCOPE_LEASE_MAX_S": 9}
    with device_api() as api, on_zerogpu(slow_model, api, SPACE_ID="owner/name", **shortest) as app:
        yield app, api


@pytest.fixture
def app(leased) -> RunningApp:
    return leased[0]


@pytest.fixture
def api(leased) -> Iterator[DeviceApi]:
    with at_rest(leased[1]) as api:
        yield api


def say(page: Page, text: str) -> None:
    prompt_field(page).fill(text)
    prompt_field(page).press("Enter")


def test_who_pays_and_who_shares_it(open_page, app, api):
    ann, stranger = open_page(app, **ANN), open_page(app, width=400)
    expect(ann.locator(LEASE)).to_contain_text("No GPU is held now")
    expect(ann.locator("#race-cost")).to_contain_text(re.compile(r"Runs on your GPU quota: about \d+ s of GPU"))
    expect(ann.locator("#visitors-said")).to_contain_text("Runs on your GPU quota")

    api.queue_for = threading.Event()
    say(ann, "Tell me about lighthouses.")
    expect(ann.locator(PENDING)).to_contain_text(re.compile(r"waiting for a GPU · \d+ s · at your expense"))
    expect(ann.locator(LEASE)).to_contain_text(re.compile(r"Asking for \d s of GPU, at your expense"))
    say(stranger, "And about ships.")
    expect(stranger.locator(PENDING)).to_contain_text("at another visitor's expense")
    notice = stranger.locator(NOTICE)
    expect(notice).to_contain_text("Nobody is signed in here")
    expect(notice.get_by_role("link", name="open the Space itself")).to_have_attribute(
        "href", "https://huggingface.co/spaces/owner/name"
    )
    expect(ann.locator(NOTICE)).to_be_hidden()

    api.queue_for.set()
    expect(ann.locator(LEASE)).to_contain_text(re.compile(r"GPU lease at your expense · \d s left · shared by 2"))
    expect(stranger.locator(LEASE)).to_contain_text("GPU lease at another visitor's expense")
    for page in (ann, stranger):
        page.locator("#stop button, button#stop").first.click()
    expect(ann.locator(LEASE)).to_contain_text("No GPU is held now")


def test_an_answer_goes_on_in_the_next_lease_and_says_so(open_page, app, api):
    page = open_page(app, **ANN)
    api.lifetimes = [LENIENT_S]
    set_new_tokens(page, 100)
    ask(page, "Tell me about lighthouses.")
    worker = psutil.Process(open_lease(api).pid)
    worker.suspend()  # so that the time runs out in the middle of the answer
    eventually(lambda: lease(app)["left_s"] == 0)
    api.gate.clear()
    worker.resume()
    expect(page.locator(NOTICE)).to_have_text("Your answer goes on in the next GPU lease, from where it is.")
    expect(page.locator(ANSWER)).not_to_be_empty()
    api.gate.set()
    note = wait_until_answered(page)
    assert "100 tokens" in note and "went on in 1 more GPU lease" in note
    expect(page.locator(NOTICE)).to_be_hidden()
    expect(page.locator(LEASE)).to_contain_text("handover")


def test_no_quota_left_is_said_with_the_link_that_helps_and_the_question_comes_back(open_page, app, api):
    api.refusals = {None: (429, 0)}
    page = open_page(app)
    say(page, "Tell me about lighthouses.")
    notice = page.locator(NOTICE)
    expect(notice).to_contain_text("Space app has reached its GPU limit")
    expect(notice.get_by_role("link", name="open the Space itself")).to_be_visible()
    expect(prompt_field(page)).to_have_value("Tell me about lighthouses.")
    expect(page.locator(ANSWER)).to_have_count(0)


def test_an_answer_that_breaks_off_keeps_what_was_said(open_page, app, api):
    page = open_page(app, **ANN)
    api.lifetimes = [LENIENT_S]
    set_new_tokens(page, 1024)  # more than a slow machine can finish before the worker is held
    ask(page, "Tell me about lighthouses.")
    api.refusals = {token("ann"): (429, 0)}
    worker = psutil.Process(open_lease(api).pid)
    worker.suspend()
    eventually(lambda: lease(app)["left_s"] == 0)
    worker.resume()
    expect(page.locator(NOTICE)).to_contain_text("You have exceeded your ZeroGPU quota")
    expect(page.locator(ANSWER)).not_to_be_empty()
    expect(page.locator(NOTE)).to_contain_text("broke off")


def test_with_little_left_there_are_no_probes_races_or_visitors(open_page, app, api):
    page = open_page(app, **ANN)
    api.refusals = {token("ann"): (429, 8)}
    set_new_tokens(page, 1024)  # for which more is asked than is left
    before = app.stats()
    ask(page, "Tell me about lighthouses.")
    eventually(lambda: app.stats()["totals"]["tokens"] >= before["totals"]["tokens"] + 60)
    page.locator("#stop").click()
    wait_until_answered(page)
    assert len(app.stats()["probes"]) == len(before["probes"])
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator('#race [data-part="notice"]')).to_contain_text("Little of your GPU quota is left")
    page.locator("#visitors").click()
    said = page.locator("#visitors-said")
    expect(said).to_contain_text("Little of your GPU quota is left")
    expect(said.get_by_role("link", name="a PRO account")).to_be_visible()

    other = open_page(app, extra_http_headers={"X-IP-Token": token("bob")})
    ask(other, "Tell me about lighthouses.")
    eventually(lambda: len(app.stats()["probes"]) > len(before["probes"]))


def test_brought_visitors_come_at_the_pressers_expense_and_leave_with_the_page(open_page, app, api):
    page = open_page(app, **ANN)
    api.queue_for = threading.Event()
    page.locator("#visitors").click()
    said = page.locator("#visitors-said")
    expect(said).to_contain_text(re.compile(r"waiting for a GPU · \d+ s · at your expense"))
    expect(page.locator(LEASE)).to_contain_text(re.compile(r"Asking for \d s of GPU, at your expense"))
    api.queue_for.set()
    expect(page.locator(LEASE)).to_contain_text("GPU lease at your expense")
    expect(said).to_contain_text("6 came.")
    page.close()
    eventually(lambda: lease(app)["state"] == "none", timeout=5)


def test_brought_visitors_without_a_quota_are_told_of_and_no_more_come(open_page, app, api):
    api.refusals = {None: (429, 0)}
    page = open_page(app)
    page.locator("#visitors").click()
    expect(page.locator("#visitors-said")).to_contain_text("Space app has reached its GPU limit")
    expect(page.locator("#visitors-said").get_by_role("link", name="open the Space itself")).to_be_visible()
    assert len(api.asked) < 3
