"""Leases without a GPU: the arithmetic by a clock in the hand, and handovers between workers in threads."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from multiprocessing.connection import Pipe

import pytest
from running_app import eventually, save_talkative_model

from engine import Engine, EngineConfig, GenerationError, SamplingParams
from engine.config import read_settings
from engine.core import EngineCore
from engine.errors import NoLease
from engine.facts import cache_shapes
from engine.hosts import Worker, connected
from engine.lease import Demand, Lease, LeaseTerms, Payer, seconds_needed
from engine.loading import load_model, resolve
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import Cancel, Parked, Shutdown, StartRace, Submit
from engine.worker import make_core

visitor: ContextVar[str] = ContextVar("visitor", default="nobody")


# ---- arithmetic


class Room:
    """A lease with a clock and visitors that the test moves."""

    def __init__(self, **terms):
        self.own, self.others, self.own_served, self.others_served = 1, 0, True, False
        self.now = 100.0
        self.lease = Lease(Payer("a", None), 30, 10, LeaseTerms(**terms), self.demand)
        self.lease.should_end(self.now)

    def demand(self) -> Demand:
        return Demand(self.own, self.others, self.own_served, self.others_served)

    def ends_within(self, seconds: float) -> float | None:
        """After how many seconds the lease wants to end; None if not within that time."""
        steps = round(seconds * 10)
        for step in range(steps + 1):
            if self.lease.should_end(self.now + step / 10):
                self.now += step / 10
                return step / 10
        self.now += seconds
        return None


def test_a_lease_goes_on_while_its_payer_is_served_whoever_else_is():
    room = Room()
    room.others, room.others_served = 5, True
    assert room.ends_within(300) is None
    assert room.lease.others_s == 0 and room.lease.served_s == pytest.approx(300)


def test_with_nobody_left_it_lingers_a_little_and_starts_anew_with_each_arrival():
    room = Room(linger_s=1)
    room.own, room.own_served = 0, False
    assert room.ends_within(0.5) is None
    room.others, room.others_served = 1, True
    assert room.ends_within(0.3) is None
    room.others, room.others_served = 0, False
    assert room.ends_within(5) == pytest.approx(1.0)


def test_the_payer_pays_for_others_alone_no_more_than_the_share():
    room = Room(linger_s=1, share=0.25)
    assert room.ends_within(20) is None
    room.own, room.own_served, room.others, room.others_served = 0, False, 3, True
    assert room.ends_within(60) == pytest.approx(5.0, abs=0.11)
    assert room.lease.others_s <= 0.25 * room.lease.served_s + 0.11


def test_a_payer_who_stands_in_line_is_not_served():
    room = Room(linger_s=1, share=0)
    room.own_served, room.others, room.others_served = False, 16, True
    assert room.ends_within(60) == pytest.approx(1.0, abs=0.11)


def test_a_payer_who_has_left_pays_no_further():
    room = Room()
    assert room.ends_within(20) is None
    room.own, room.own_served, room.others, room.others_served = 0, False, 3, True
    room.lease.payer_left = True
    assert room.ends_within(60) == 0
    room.others = 0
    assert room.ends_within(60) == 0


def test_the_start_of_a_worker_counts_as_the_payers_own_time():
    room = Room(linger_s=0)
    room.own_served, room.others = False, 4
    assert room.ends_within(20) is None


def test_what_is_asked_for_grows_with_the_work_within_its_limits():
    terms = LeaseTerms(min_s=10, max_s=60)
    quick, slow = [10.0] * 5, [200.0] * 5
    assert seconds_needed(1, 1, 0, quick, terms) == 10
    assert 10 < seconds_needed(200, 4, 0, [50.0], terms) < 60
    assert seconds_needed(200, 4, 0, slow, terms) == 60
    assert seconds_needed(200, 4, 0, [], terms) > seconds_needed(100, 4, 0, [], terms)
    assert seconds_needed(1, 1, 1, quick, terms) > seconds_needed(1, 1, 0, quick, terms)


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"KVSCOPE_LEASE_MIN_S": "2"}, "KVSCOPE_LEASE_MIN_S: .*greater than or equal to 5"),
        ({"KVSCOPE_LEASE_SHARE": "all"}, "KVSCOPE_LEASE_SHARE: .*'all'"),
        ({"KVSCOPE_LEASE_MIN_S": "50", "KVSCOPE_LEASE_MAX_S": "20"}, "KVSCOPE_LEASE_MIN_S must not be above"),
    ],
)
def test_bad_terms_are_named(monkeypatch, variables, sentence):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        read_settings(LeaseTerms)


# ---- handovers


class Leases:
    """A lease host whose workers are threads. A lease ends after `steps`, or as the lease itself wishes."""

    def __init__(self, config: EngineConfig, steps: int | None = None, keep: bool = True):
        self.files = resolve(config)
        self.config, self.steps, self.keep = config, steps, keep
        self.terms = LeaseTerms(linger_s=0)
        self.core, self.ready = self._make_core()
        self.payers: list[str] = []
        self.refused: dict[str, str] = {}
        self.asked: list[int] = []
        self.lost: list[Exception] = []  # what comes in the place of the next workers
        self.slow_start_s = 0.0
        self.dies_after: Callable[[int], int | None] = lambda lease: None
        self.held = threading.Event()
        self.held.set()

    def visitor(self) -> str:
        return visitor.get()

    def start(self, lease: Lease) -> Worker:
        ours, theirs = Pipe()
        sentence = self.refused.get(lease.payer.key)
        if sentence or self.lost:
            nothing: Future = Future()
            nothing.set_exception(NoLease(sentence) if sentence else self.lost.pop(0))
            return Worker(nothing, lambda timeout: None)
        self.payers.append(lease.payer.key)
        self.asked.append(lease.seconds)
        assert lease.payer.context.get(visitor, "nobody") == lease.payer.key
        thread = threading.Thread(target=self._serve, args=(theirs, lease, len(self.payers)), daemon=True)
        thread.start()
        return Worker(connected(ours), thread.join)

    def _make_core(self) -> tuple[EngineCore, object]:
        return make_core(self.files, load_model(self.files, self.config), self.config)

    def _serve(self, connection, lease: Lease, number: int) -> None:
        """`engine.worker.run`, but counted in steps, so that nothing depends on clocks."""
        self.held.wait()
        lease.opened(lease.seconds, time.monotonic() - self.slow_start_s)
        if not self.keep:
            self.core, ready = self._make_core()
            connection.send(ready)
        death, done, turns = self.dies_after(number), 0, itertools.count()
        while not (death is None and (done == self.steps or lease.should_end(next(turns) / 10))):
            if done == death:
                self.core.park()
                connection.close()
                return
            while connection.poll(0 if self.core.has_work else 0.01):
                match connection.recv():
                    case Submit(sequence):
                        self.core.submit(sequence)
                    case Cancel(request_id):
                        self.core.cancel(request_id)
                    case StartRace() as race:
                        self.core.start_race(race)
                    case Shutdown():
                        break
            if self.core.has_work:
                connection.send(self.core.step())
                done += 1
        self.core.park()
        connection.send(Parked())
        connection.close()


@pytest.fixture(scope="module")
def talkative(tmp_path_factory, one_thread):
    return save_talkative_model(tmp_path_factory.mktemp("talkative"))


@pytest.fixture
def leased(talkative):
    """Makes engines on leases over the talkative model."""
    engines = []

    def make(most: int = 16, **options) -> tuple[Engine, Leases]:
        config = EngineConfig(model=str(talkative), device="cpu", threads=1, probe_share=0, max_batch_size=most)
        host = Leases(config, **options)
        engines.append(Engine(config, host))
        return engines[-1], host

    yield make
    for engine in engines:
        engine.close()


PROMPTS = {"ann": "a", "bob": "The lighthouse " * 12, "cy": "x" * 200}


def params(name: str, tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0.9, top_k=40, seed=sum(name.encode()))


def ask(engine: Engine, name: str, tokens: int = 40, client: bool = True, probe: bool = False):
    token = visitor.set(name)
    try:
        return engine.submit(PROMPTS[name], params(name, tokens), client=name if client else None, probe=probe)
    finally:
        visitor.reset(token)


@pytest.fixture(scope="module")
def expected(talkative):
    """What everybody is told in one long run."""
    config = EngineConfig(model=str(talkative), device="cpu", threads=1)
    with Engine.from_pretrained(config=config, device="cpu", host="thread") as engine:
        generations = {name: engine.submit(PROMPTS[name], params(name, 120)) for name in PROMPTS}
        return {name: generation.result(60).token_ids for name, generation in generations.items()}


@pytest.mark.parametrize("client", [True, False], ids=["with clients", "without"])
@pytest.mark.parametrize("steps, keep", [(2, True), (7, True), (7, False)])
def test_sequences_cut_by_leases_have_the_tokens_of_one_long_run(leased, expected, steps, client, keep):
    engine, _ = leased(steps=steps, keep=keep)
    generations = {name: ask(engine, name, client=client) for name in PROMPTS}
    for name, generation in generations.items():
        assert generation.result(60).token_ids == expected[name][:40]
        assert generation.handovers >= 40 // steps - 3 and not generation.resumed
        assert generation.reused_tokens == 0


def test_a_process_that_is_used_again_prefills_one_token_of_what_it_still_has(leased, expected):
    engine, host = leased(steps=5)
    reads: list[int] = []
    step = host.core.runner.step
    host.core.runner.step = lambda cache, ids, positions, chunks: (
        reads.extend(len(chunk.token_ids) for chunk in chunks) or step(cache, ids, positions, chunks)
    )
    assert ask(engine, "cy").result(60).token_ids == expected["cy"][:40]
    assert reads == [128, 72, *[1] * (len(host.payers) - 1)]


def test_another_one_pays_for_the_next_lease_as_long_as_there_is_another(leased):
    engine, host = leased(steps=6)
    host.held.clear()
    generations = [ask(engine, name, tokens) for name, tokens in (("ann", 20), ("bob", 20), ("cy", 40))]
    host.held.set()
    for generation in generations:
        generation.result(60)
    assert host.payers[:4] == ["ann", "bob", "ann", "bob"]
    assert host.payers[-1] == "cy" and set(host.payers[4:]) <= {"ann", "bob", "cy"}
    assert engine.snapshot()["lease"]["handovers"] == len(host.payers) - 1


def test_without_work_there_is_no_worker_and_nothing_allocated(leased):
    engine, host = leased()
    engine.wait_ready(5)

    def at_rest() -> dict | None:
        snapshot = engine.snapshot()
        return snapshot if snapshot["worker"] == "none" else None

    before = eventually(at_rest)
    assert before["model"]["layers"] == 3 and before["cache"]["allocated_bytes"] == 0 and before["cache"]["slots"] == []
    assert engine.ready and before["lease"] == {"state": "none", "payer": None, "handovers": 0}
    ask(engine, "ann").result(60)
    after = eventually(at_rest)
    assert after["cache"]["allocated_bytes"] == 0 and host.payers == ["ann"]


def test_who_cannot_pay_is_told_and_the_others_go_on(leased, expected):
    engine, host = leased()
    host.held.clear()
    host.refused = {"bob": "You have exceeded your quota."}
    first = ask(engine, "bob")
    with pytest.raises(GenerationError, match="exceeded your quota"):
        first.result(60)
    ann, bob, cy = (ask(engine, name) for name in ("ann", "bob", "cy"))
    eventually(lambda: host.payers == ["ann"])
    ann.cancel()  # so that the next has to pay, who cannot
    host.held.set()
    with pytest.raises(GenerationError, match="exceeded your quota"):
        bob.result(60)
    assert cy.result(60).token_ids == expected["cy"][:40]
    assert host.payers == ["ann", "cy"]


def test_a_worker_that_dies_is_forgiven_once(leased, expected):
    engine, host = leased()
    host.dies_after = lambda lease: 9 if lease == 1 else None
    ann, cy = ask(engine, "ann"), ask(engine, "cy")
    assert ann.result(60).token_ids == expected["ann"][:40]
    assert cy.result(60).token_ids == expected["cy"][:40]
    assert ann.resumed and not ann.handovers
    assert engine.snapshot()["totals"]["restarts"] == 1

    host.dies_after = lambda lease: 9
    with pytest.raises(GenerationError, match="died twice"):
        ask(engine, "bob").result(60)
    assert engine.snapshot()["worker"] in ("none", "ready")


def test_a_worker_that_dies_before_its_first_step_ends_its_payers_request_the_second_time(leased):
    engine, host = leased()
    host.dies_after = lambda lease: 0
    with pytest.raises(GenerationError, match="died twice"):
        ask(engine, "ann").result(60)
    assert host.payers == ["ann", "ann"]


def test_leases_that_are_too_short_to_begin_with_end_in_a_sentence(leased):
    engine, host = leased(steps=1, keep=False)
    with pytest.raises(GenerationError, match="Two GPU leases ended before"):
        ask(engine, "cy").result(60)
    assert host.payers == ["cy", "cy"]


def test_a_race_that_outlasts_its_lease_says_so_and_one_in_line_goes_on(leased):
    engine, host = leased(steps=12)
    host.held.clear()
    first, second = engine.compare("The lighthouse", 30), engine.compare("The lighthouse", 4)
    host.held.set()
    with pytest.raises(GenerationError, match="lease ended before this race"):
        first.result(60)
    assert second.result(60)["identical"]


def race(engine: Engine, name: str, tokens: int):
    token = visitor.set(name)
    try:
        return engine.compare("The lighthouse", tokens, client=name)
    finally:
        visitor.reset(token)


def test_a_race_runs_in_a_lease_of_its_own_visitor_only(leased, expected):
    engine, host = leased()
    host.held.clear()
    ann, bob = ask(engine, "ann"), race(engine, "bob", 4)
    host.held.set()
    assert ann.result(60).token_ids == expected["ann"][:40]
    assert bob.result(60)["identical"]
    assert host.payers == ["ann", "bob"]


def test_a_race_that_others_left_no_turn_is_not_served_and_waits_for_another_lease(leased, expected):
    engine, host = leased(most=2)
    host.held.clear()
    comparison = race(engine, "cy", 4)
    generations = {name: ask(engine, name) for name in ("ann", "bob")}
    host.held.set()
    for name, generation in generations.items():
        assert generation.result(60).token_ids == expected[name][:40]
    assert comparison.result(60)["identical"]
    assert host.payers[0] == host.payers[-1] == "cy" and len(host.payers) >= 3


def test_only_the_payers_own_decoding_is_probed(leased):
    engine, host = leased()
    host.core.measuring.probe_share = 1.0
    host.held.clear()
    ann, bob = ask(engine, "ann", 60, probe=True), ask(engine, "bob", 60, probe=True)
    host.held.set()
    assert ann.result(60) and bob.result(60) and host.payers == ["ann"]
    assert ann.probes and not bob.probes


def test_after_a_start_that_took_too_long_more_is_asked_for_until_one_is_quick(leased):
    engine, host = leased(steps=1, keep=False)
    host.slow_start_s = 60
    with pytest.raises(GenerationError, match="Two GPU leases ended before"):
        ask(engine, "cy").result(60)
    first, second = host.asked
    assert second >= 1.5 * first
    host.steps, host.slow_start_s = None, 0
    for _ in range(2):
        ask(engine, "cy").result(60)
        eventually(lambda: engine.snapshot()["worker"] == "none")
    assert host.asked[2] > second and host.asked[3] <= first


def test_a_worker_that_dies_on_its_way_is_a_death_and_a_lease_nobody_needs_is_none(leased, expected):
    engine, host = leased()
    host.lost = [EOFError("died"), CancelledError()]
    ann, bob = ask(engine, "ann"), ask(engine, "bob")
    assert ann.result(60).token_ids == expected["ann"][:40] and ann.resumed
    assert bob.result(60).token_ids == expected["bob"][:40] and not bob.resumed
    assert engine.snapshot()["totals"]["restarts"] == 1


def test_what_comes_after_the_end_changes_nothing(leased):
    engine, host = leased(keep=False)
    host.held.clear()
    generation = ask(engine, "ann")
    closing = threading.Thread(target=engine.close)
    closing.start()
    eventually(lambda: engine.snapshot()["worker"] == "stopped")
    host.held.set()
    closing.join()
    with pytest.raises(GenerationError, match="closed"):
        generation.result(5)
    assert engine.snapshot()["worker"] == "stopped" and not engine.ready


def test_whoever_leaves_while_the_gpu_is_asked_for_costs_nothing_further(leased):
    engine, host = leased()
    host.held.clear()
    generation = ask(engine, "ann")
    eventually(lambda: host.payers == ["ann"])
    generation.cancel()
    host.held.set()
    eventually(lambda: engine.snapshot()["worker"] == "none")
    assert engine.snapshot()["totals"]["tokens"] == 0


@pytest.mark.parametrize("client, whose", [(None, "its own"), (1, "its client's"), (2, "nobody's")])
def test_parked_text_serves_only_whose_it_is(leased, client, whose):
    _, host = leased()
    core, prompt = host.core, list(range(100))

    def begun(request_id: int, client: int | None) -> Sequence:
        sequence = Sequence(request_id, prompt, SamplingParams(max_new_tokens=40), seed=1, client=client)
        core.submit(sequence)
        core.step()
        return sequence

    parked = begun(1, None if client is None else 1)
    core.park()
    assert not core.has_work
    stranger, owner = begun(2, client), begun(1, client)
    assert stranger.reused_tokens == (99 if whose == "its client's" else 0)
    assert owner.reused_tokens == (0 if whose == "its client's" else 99)
    assert len(parked.output_ids) == 1


# ---- facts


def test_cache_shapes_are_known_without_computing(talkative):
    config = EngineConfig(model=str(talkative), device="cpu")
    model = load_model(resolve(config), config)
    assert cache_shapes(model) == ModelRunner(model).layer_shapes
