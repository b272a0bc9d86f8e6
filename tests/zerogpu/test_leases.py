"""One lease serves everybody who waits; who pays, when it ends, and that nobody loses a token by it."""

import random
import threading

import pytest
from running_app import eventually, stream
from visitors import Visitor, last, lease, leave, open_lease, refusal, released, speaks

LONG, SHORT = 300, 30


def test_one_lease_serves_everybody_and_later_arrivals_join_it(app, api, alone):
    first, *others = [Visitor(app, name) for name in ("ann", "bob", "cy", "dee")]
    long = first.ask(LONG)
    eventually(lambda: speaks(long))
    fork = open_lease(api).pid
    jobs = [visitor.ask(SHORT, seed) for seed, visitor in enumerate(others)]
    assert [last(job) for job in jobs] == [alone(SHORT, seed) for seed in range(len(jobs))]
    assert [asked for asked, _ in api.asked] == [first.token] and len(api.grants) == 1
    assert app.stats()["queue"]["peak_batch_size"] >= 2
    leave(long)
    released(api)
    assert api.grants[0].pid == fork


def test_the_lease_ends_soon_after_its_payers_request_and_one_who_waits_pays_the_next(app, api, alone):
    ann, bob = Visitor(app, "ann"), Visitor(app, "bob")
    api.gate.clear()
    short = ann.ask(SHORT)
    eventually(lambda: lease(app)["state"] == "asked")
    before = lease(app)["handovers"]
    long = bob.ask(LONG, seed=3)
    eventually(lambda: lease(app)["sharing"] == 2)
    api.gate.set()
    assert last(short) == alone(SHORT)
    assert last(long) == alone(LONG, 3)
    assert [asked for asked, _ in api.asked][:2] == [ann.token, bob.token]
    assert lease(app)["handovers"] > before
    assert api.grants[0].pid == api.grants[1].pid  # where its cache was


def test_in_fresh_processes_too(app, api, alone):
    api.reuse = False
    jobs = [Visitor(app, name).ask(LONG, seed) for seed, name in enumerate(("ann", "bob"))]
    eventually(lambda: all(speaks(job) for job in jobs))
    leave(jobs[0])  # who pays: so the other has to go on elsewhere
    assert last(jobs[1], 120) == alone(LONG, 1)
    assert len(api.grants) > 1 and len({grant.pid for grant in api.grants}) == len(api.grants)


def test_an_idle_lease_is_released_and_its_process_used_again(app, api):
    visitor = Visitor(app, "ann")
    last(visitor.ask(SHORT))
    released(api, timeout=5)
    last(visitor.ask(SHORT))
    first, second = api.grants[-2:]
    assert first.pid == second.pid


def test_a_visitor_who_leaves_while_running_costs_nothing_further(app, api):
    job = Visitor(app, "ann").ask(LONG)
    eventually(lambda: speaks(job))
    leave(job)
    released(api, timeout=5)
    assert app.stats()["queue"] == {**app.stats()["queue"], "running": 0, "waiting": 0}


def test_a_payer_who_leaves_hands_over_to_who_is_still_here(app, api, alone):
    ann, bob = Visitor(app, "ann"), Visitor(app, "bob")
    leaving = ann.ask(LONG)
    eventually(lambda: speaks(leaving))
    staying = bob.ask(LONG, seed=4)
    eventually(lambda: speaks(staying))
    leave(leaving)
    assert last(staying) == alone(LONG, 4)
    assert {asked for asked, _ in api.asked} == {ann.token, bob.token}


def test_a_visitor_who_leaves_while_queueing_is_followed_by_the_next(app, api, alone):
    api.queue_for = threading.Event()
    ann, bob = Visitor(app, "ann"), Visitor(app, "bob")
    leaving = ann.ask(SHORT)
    eventually(lambda: api.pings)
    staying = bob.ask(SHORT, seed=5)
    eventually(lambda: lease(app)["sharing"] == 2)
    assert lease(app)["state"] == "asked" and app.get("healthz").json()["status"] == "asked"
    payer = lease(app)["payer"]
    leave(leaving)
    eventually(lambda: lease(app).get("payer") not in (payer, None) and api.queueing == 1)
    api.queue_for.set()
    assert last(staying) == alone(SHORT, 5)
    assert [asked for asked, _ in api.asked] == [bob.token]


def test_the_last_one_to_leave_leaves_the_queue(app, api):
    api.queue_for = threading.Event()
    job = Visitor(app, "ann").ask(SHORT)
    eventually(lambda: api.queueing)
    leave(job)
    eventually(lambda: not api.queueing and lease(app)["state"] == "none")
    assert not api.asked


def test_thirty_at_once_are_served(app, api, alone):
    visitors = [Visitor(app, f"visitor {number}") for number in range(30)]
    jobs = [visitor.ask(SHORT, number % 5) for number, visitor in enumerate(visitors)]
    assert [last(job, 120) for job in jobs] == [alone(SHORT, number % 5) for number in range(30)]
    assert len(api.grants) < 30 and "queue is full" not in app.log.lower() and "Traceback" not in app.log


def test_a_race_runs_inside_a_lease_at_its_pressers_expense(app, api):
    headers = {"X-IP-Token": Visitor(app, "ann").token}
    *_, verdict = stream(app, "compare", "The lighthouse stood", 20, headers=headers)
    assert verdict["identical"] and verdict["ratio"] > 0
    assert [asked for asked, _ in api.asked] == [headers["X-IP-Token"]]


def test_a_race_waits_for_a_lease_of_its_own_visitors(app, api, alone):
    ann, bob = Visitor(app, "ann"), Visitor(app, "bob")
    long = ann.ask(LONG)
    eventually(lambda: speaks(long))
    race = bob.client.submit("The lighthouse stood", 20, api_name="/compare")
    eventually(lambda: lease(app)["sharing"] == 2)
    assert last(long) == alone(LONG)
    assert race.result(60)["identical"]
    assert [asked for asked, _ in api.asked] == [ann.token, bob.token]


# ---- faults


def test_a_worker_killed_at_any_moment_costs_nobody_a_token(app, api, alone):
    moments = random.Random(4)
    for _ in range(3):
        api.lifetimes = [moments.uniform(0.0, 1.5)]
        jobs = [Visitor(app, name).ask(150, seed) for seed, name in enumerate(("ann", "bob"))]
        assert [last(job, 120) for job in jobs] == [alone(150, seed) for seed in range(2)]


@pytest.mark.parametrize("release_status", [200, 500])
def test_a_worker_that_dies_on_its_way_is_replaced_whatever_becomes_of_its_release(app, api, alone, release_status):
    api.reuse, api.doomed, api.release_status = False, 1, release_status
    assert last(Visitor(app, "ann").ask(SHORT)) == alone(SHORT)
    assert len(api.asked) == 2


def test_two_workers_that_die_on_their_way_end_in_a_sentence(app, api):
    api.reuse, api.doomed = False, 2
    assert "died twice" in refusal(Visitor(app, "ann").ask(SHORT))
    assert len(api.asked) == 2


def test_a_worker_killed_in_the_middle_is_replaced_and_nobody_loses_a_token(app, api, alone):
    jobs = [Visitor(app, name).ask(LONG, seed) for seed, name in enumerate(("ann", "bob"))]
    eventually(lambda: all(speaks(job) for job in jobs))
    api.kill(open_lease(api))
    assert [last(job, 120) for job in jobs] == [alone(LONG, seed) for seed in range(2)]


def test_a_second_death_fails_clearly_and_the_next_visitor_is_served(app, api, alone):
    job = Visitor(app, "ann").ask(2 * LONG)
    eventually(lambda: speaks(job))
    first = open_lease(api)
    said = len(job.outputs()[-1])
    api.kill(first)
    second = eventually(lambda: next((grant for grant in api.open if grant.pid not in (None, first.pid)), None))
    eventually(lambda: len(job.outputs()[-1]) > said)
    api.kill(second)
    assert "died twice" in refusal(job)
    assert last(Visitor(app, "bob").ask(SHORT)) == alone(SHORT)
