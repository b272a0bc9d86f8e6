"""No quota, no GPU, no identity: whom it concerns is told in a sentence, and the others go on."""

import threading

import pytest
from running_app import eventually
from visitors import Visitor, last, lease, leave, refusal, released, speaks

SHORT = 30


def test_who_has_no_quota_left_is_told_and_the_others_go_on(app, api, alone):
    ann, bob, cy = (Visitor(app, name) for name in ("ann", "bob", "cy"))
    api.refusals = {ann.token: (429, 0)}
    api.gate.clear()
    refused = ann.ask(SHORT)
    eventually(lambda: lease(app)["state"] == "asked")
    others = []
    for seed, visitor in enumerate((bob, cy)):
        others.append(visitor.ask(SHORT, seed))
        eventually(lambda: lease(app)["sharing"] == len(others) + 1)
    api.gate.set()
    said = refusal(refused)
    assert "exceeded your ZeroGPU quota" in said and "0s left" in said
    assert "https://huggingface.co/settings/tokens" in said  # as `spaces` tells a program
    assert [last(job) for job in others] == [alone(SHORT, seed) for seed in range(2)]
    assert [asked for asked, _ in api.asked][:2] == [ann.token, bob.token]
    race = ann.client.submit("The lighthouse stood", 20, api_name="/compare")
    assert "Little of your GPU quota is left" in refusal(race)


@pytest.mark.parametrize(
    "status, sentence", [(401, "Expired ZeroGPU proxy token"), (503, "No GPU was available"), (500, "try again")]
)
def test_where_no_gpu_comes_the_next_payer_is_tried(app, api, alone, status, sentence):
    ann, bob = Visitor(app, "ann"), Visitor(app, "bob")
    api.refusals = {ann.token: (status, 0)}
    api.gate.clear()
    refused = ann.ask(SHORT)
    eventually(lambda: lease(app)["state"] == "asked")
    other = bob.ask(SHORT)
    eventually(lambda: lease(app)["sharing"] == 2)
    api.gate.set()
    assert sentence in refusal(refused)
    assert last(other) == alone(SHORT)


def test_a_queue_that_leads_nowhere_says_so(app, api):
    api.queue_for = threading.Event()
    ann = Visitor(app, "ann")
    api.refusals = {ann.token: (503, 0)}
    job = ann.ask(SHORT)
    eventually(lambda: api.pings)
    api.queue_for.set()
    assert "No GPU was available after 60s" in refusal(job)


def test_a_queue_is_seen_while_it_lasts(app, api, alone):
    api.queue_for = threading.Event()
    job = Visitor(app, "ann").ask(SHORT)
    eventually(lambda: api.pings)
    assert lease(app)["state"] == "asked" and app.queue()["waiting"] == 1
    api.queue_for.set()
    assert last(job) == alone(SHORT)


def test_with_little_left_what_is_left_is_asked_for_and_kept_for_questions(app, api):
    ann = Visitor(app, "ann")
    last(ann.ask(SHORT))
    released(api)
    (_, wanted) = api.asked[-1]

    api.refusals = {ann.token: (429, wanted)}  # enough for a question, not for a long one
    long = ann.ask(2000)
    eventually(lambda: speaks(long))
    assert api.asked[1][1] > wanted and api.asked[2] == (ann.token, wanted)
    leave(long)
    race = ann.client.submit("The lighthouse stood", 20, api_name="/compare")
    assert "Little of your GPU quota is left" in refusal(race)


def test_where_only_short_leases_are_given_a_short_one_is_asked_for(app, api, alone):
    api.longest = 12
    long = Visitor(app, "ann").ask(2000)
    eventually(lambda: speaks(long))
    (first, second) = (seconds for _, seconds in api.asked)
    assert first > 12 and second == 10
    leave(long)


def test_nobody_known_is_told_how_to_become_somebody(app, api):
    api.refusals = {None: (429, 0)}
    said = refusal(Visitor(app).ask(SHORT))
    assert "Space app has reached its GPU limit" in said
    assert "Nobody is signed in here" in said and "https://huggingface.co/spaces" in said


def test_a_token_with_an_error_is_explained(app, api):
    ann = Visitor(app, "ann", error="expired session")
    api.refusals = {ann.token: (429, 0)}
    said = refusal(ann.ask(SHORT))
    assert "Your sign-in could not be used (expired session)" in said


def test_a_broken_token_is_the_apis_business(app, api, alone):
    ann = Visitor(app, "ann")
    ann.client.headers["X-IP-Token"] = "not a token"
    assert last(ann.ask(SHORT)) == alone(SHORT)
