"""Time that runs out, workers that hang, and the end of everything."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from device_api import device_api
from running_app import eventually
from visitors import Visitor, at_rest, last, lease, on_zerogpu, open_lease, released, speaks

LONG = 300


def test_sampled_sequences_that_outlast_their_lease_are_those_of_one_long_run(hasty, alone):
    app, api = hasty
    with at_rest(api):
        jobs = [Visitor(app, name).ask(LONG, seed) for seed, name in enumerate(("ann", "bob", "cy"))]
        eventually(lambda: all(speaks(job) for job in jobs))
        slow = psutil.Process(open_lease(api).pid)
        slow.suspend()  # so that its time runs out before anybody's answer is complete
        eventually(lambda: lease(app)["left_s"] == 0)
        slow.resume()
        assert [last(job) for job in jobs] == [alone(LONG, seed) for seed in range(3)]
        assert len(api.grants) > 1 and not any(grant.killed for grant in api.grants)


def test_a_worker_that_hangs_is_killed_at_its_duration_and_replaced(hasty, alone):
    app, api = hasty
    with at_rest(api):
        job = Visitor(app, "ann").ask(LONG)
        eventually(lambda: speaks(job))
        hanging = open_lease(api)
        psutil.Process(hanging.pid).suspend()
        assert last(job) == alone(LONG)
        assert hanging.killed


def test_a_release_that_is_not_heard_holds_up_nobody_for_long(hasty, alone):
    app, api = hasty
    with at_rest(api):
        api.release_status = 500
        assert last(Visitor(app, "ann").ask(30)) == alone(30)
        released(api)
        api.release_status = 200
        assert last(Visitor(app, "bob").ask(30), 30) == alone(30)
        assert len({grant.pid for grant in api.grants}) == 1


def test_a_lease_ends_with_the_app_by_a_signal_and_however_that_goes(slow_model):
    with ThreadPoolExecutor() as pool:  # a start keeps one core busy, and hardly more
        for done in [pool.submit(ends, slow_model) for ends in (ends_by_a_signal, ends_with_its_parent)]:
            done.result()


def ends_by_a_signal(model: Path) -> None:
    with device_api() as api, on_zerogpu(model, api) as app:
        job = Visitor(app, "ann").ask(LONG)
        eventually(lambda: speaks(job))
        assert app.end() == 0
        released(api, timeout=0)
        assert "Traceback" not in app.log


def ends_with_its_parent(model: Path) -> None:
    with device_api() as api, on_zerogpu(model, api) as app:
        job = Visitor(app, "ann").ask(LONG)
        eventually(lambda: speaks(job))
        worker = psutil.Process(open_lease(api).pid)
        app.process.kill()
        app.process.wait()
        eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, timeout=10)
