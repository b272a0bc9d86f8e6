"""What the page says of GPU quotas, without a GPU, a hub or a page."""

import base64
import json

import pytest

from demo.quota import KNOWN_VISITORS, Quotas, counted, identity, seconds_left, space_url


def token(**payload) -> str:
    part = base64.urlsafe_b64encode(json.dumps(payload).encode()).decode().rstrip("=")
    return f"{part}.{part}.signature"


def test_a_known_visitor_needs_no_explanation():
    assert identity({"x-ip-token": token(user="ann")}) == ""


def test_nobody_known_is_sent_to_the_space_itself(monkeypatch):
    monkeypatch.setenv("SPACE_ID", "owner/name")
    assert "[open the Space itself](https://huggingface.co/spaces/owner/name)" in identity({})
    monkeypatch.delenv("SPACE_ID")
    assert space_url() == "https://huggingface.co/spaces"


def test_an_error_in_the_token_is_named():
    assert "could not be used (session expired)" in identity({"x-ip-token": token(error="session expired")})


@pytest.mark.parametrize("broken", ["", "x", "a.b.c", "a.e30", token()[:10], f"x.{'!' * 9}.y", "a.W10.c", "a.MQ.c"])
def test_a_token_that_cannot_be_read_is_the_apis_business(broken):
    assert identity({"x-ip-token": broken}) == ""


def test_the_hardwares_factor_is_said_where_it_matters():
    assert counted(20, 1.0) == "20 s of GPU"
    assert counted(20, 1.5) == "20 s of GPU, which count as 30 s"


@pytest.mark.parametrize(
    "refusal, left",
    [
        ("You have exceeded your free ZeroGPU quota (60s requested vs. 41s left). Try again in 1:00:00. ", 41),
        ("Space app has reached its GPU limit.", None),
        ("", None),
    ],
)
def test_what_is_left_is_read_from_the_refusal(refusal, left):
    assert seconds_left(refusal) == left


def test_little_left_is_remembered_for_a_while_and_for_so_many(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("demo.quota.time.monotonic", lambda: now[0])
    quotas = Quotas()
    quotas.require_some("ann")
    quotas.note_little_left("ann")
    with pytest.raises(ValueError, match="Little of your GPU quota is left"):
        quotas.require_some("ann")
    quotas.require_some("bob")
    now[0] += 601
    quotas.require_some("ann")
    for number in range(KNOWN_VISITORS + 1):
        quotas.note_little_left(number)
    assert not quotas.little_left(0) and quotas.little_left(KNOWN_VISITORS)
