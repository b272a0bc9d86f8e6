"""Answers that must fit: whatever the model would rather say, and whoever shares its batch."""

import json
import os
import re
import signal
from datetime import date

import pytest
from running_app import eventually

from engine import Engine, GenerationError, SamplingParams
from engine.grammar import GrammarError, Grammars, Matcher, check

WAIT_S = 60
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "founded": {"type": "integer", "minimum": 0, "maximum": 2000},
        "kinds": {"type": "array", "items": {"enum": ["port", "capital"]}, "maxItems": 2},
    },
    "required": ["name", "founded", "kinds"],
    "additionalProperties": False,
}
DATE = {"type": "regex", "value": "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"}


def sampled(grammar: dict, **fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 120, "temperature": 1.0, "grammar": grammar, "seed": 5, **fields})


# ---- what can be asked


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("[0-9]+", '{"type": "json"'),
        ({}, '{"type": "regex"'),
        ({"type": "regex"}, "not {'type': 'regex'}"),
        ({"type": "regex", "value": "a", "flags": "i"}, "flags"),
        ({"type": ["regex"], "value": "a"}, "not {'type'"),
        ({"type": "lark", "value": "start: /a/"}, "lark"),
        ({"type": "regex", "value": 5}, "it must be text"),
        ({"type": "regex", "value": "(a"}, "unclosed group"),
        ({"type": "regex", "value": r"\bword"}, "lookarounds not supported"),
        ({"type": "regex", "value": r"a[^\s\S]"}, "nothing can match it"),
        ({"type": "regex", "value": r"yes(no[^\s\S])+"}, "nothing can match it"),
        ({"type": "regex", "value": "a" * 20_001}, "20,000 are allowed"),
        ({"type": "regex", "value": "a\ud800"}, "surrogates not allowed"),
        ({"type": "json", "value": "{"}, "EOF while parsing"),
        ({"type": "json", "value": [1]}, "Expecting object"),
        ({"type": "json", "value": {"type": "strin"}}, "Invalid type: strin"),
        ({"type": "json", "value": {"type": "integer", "minimum": 5, "maximum": 1}}, "minimum"),
        ({"type": "json", "value": {"not": {}}}, "Unimplemented keys"),
        ({"type": "json", "value": {"$ref": "http://localhost/x"}}, "not present"),
        ({"type": "json", "value": {"enum": [{1, 2}]}}, "not JSON serializable"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_in_one_sentence(grammar, why):
    with pytest.raises(
        ValueError, match=f"^grammar must be .* not .*{re.escape(why)}|^grammar must be .*{re.escape(why)}"
    ):
        check(grammar)
    with pytest.raises(ValueError) as error:
        SamplingParams(grammar=grammar)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_refused_grammars_queue_nothing(tiny_engine):
    engine = tiny_engine()
    before = engine.snapshot()["totals"]["requests"]
    with pytest.raises(ValueError, match="grammar"):
        engine.submit("abc", SamplingParams(grammar={"type": "regex", "value": "("}))
    engine.close()
    assert engine.telemetry.total_requests == before


# ---- what is answered


def test_an_answer_fits_its_schema_and_ends_by_itself(tiny_engine):
    result = tiny_engine().submit("Tell me of a city.", sampled({"type": "json", "value": CITY})).result(WAIT_S)
    city = json.loads(result.text)
    assert result.finish_reason == "eos_token"
    assert set(city) == {"name", "founded", "kinds"}
    assert isinstance(city["name"], str) and 0 <= city["founded"] <= 2000 and set(city["kinds"]) <= {"port", "capital"}


def test_a_schema_may_be_given_as_text(tiny_engine):
    grammar = {"type": "json", "value": json.dumps({"type": "boolean"})}
    assert json.loads(tiny_engine().submit("Is it?", sampled(grammar)).result(WAIT_S).text) in (True, False)


def test_greedy_rows_obey_too_and_their_neighbours_are_left_alone(tiny_engine):
    engine = tiny_engine()
    free = engine.submit("abc", SamplingParams(max_new_tokens=20, ignore_eos=True)).result(WAIT_S)
    held = engine.submit("abc", SamplingParams(max_new_tokens=20, grammar=DATE))
    beside = engine.submit("abc", SamplingParams(max_new_tokens=20, ignore_eos=True))
    date.fromisoformat(held.result(WAIT_S).text)
    assert beside.result(WAIT_S).token_ids == free.token_ids


def test_every_row_follows_its_own_grammar(tiny_engine):
    engine = tiny_engine()
    patterns = ["[a-z]{3}", "[0-9]{5}", "(ab){2,4}", "x", "(yes|no)!"]
    answers = [engine.submit("abc", sampled({"type": "regex", "value": p}, seed=n)) for n, p in enumerate(patterns)]
    for pattern, answer in zip(patterns, answers, strict=True):
        assert re.fullmatch(pattern, answer.result(WAIT_S).text)


def test_an_answer_cut_by_its_limit_is_the_beginning_of_a_match(tiny_engine):
    engine = tiny_engine()
    whole = engine.submit("Tell me.", sampled({"type": "json", "value": CITY})).result(WAIT_S)
    cut = engine.submit("Tell me.", sampled({"type": "json", "value": CITY}, max_new_tokens=10)).result(WAIT_S)
    assert cut.finish_reason == "length" and whole.text.startswith(cut.text) and len(cut.text) == 10


def test_with_ignore_eos_nothing_but_ends_can_follow_a_complete_answer(tiny_engine):
    engine = tiny_engine()
    result = engine.submit("abc", sampled(DATE, ignore_eos=True, max_new_tokens=20)).result(WAIT_S)
    date.fromisoformat(result.text)
    assert result.finish_reason == "length" and len(result.token_ids) == 20
    assert set(result.token_ids[10:]) <= {256, 258}


def test_a_penalty_comes_before_the_grammar_and_sampling_after(tiny_engine):
    """A huge penalty cannot bring back what the grammar rules out; top-k 1 takes the best of what it leaves."""
    engine = tiny_engine()
    params = sampled({"type": "regex", "value": "[ab]{30}"}, top_k=1, repetition_penalty=50.0, frequency_penalty=2.0)
    assert re.fullmatch("[ab]{30}", engine.submit("ababab", params).result(WAIT_S).text)


def test_an_answer_goes_on_in_its_grammar_after_the_worker_was_killed(tiny_engine):
    engine = tiny_engine(host="process")
    params = sampled({"type": "regex", "value": "([0-9]{2}[a-f]{2}){150}"}, max_new_tokens=700)
    expected = engine.submit("abc", params).result(WAIT_S)
    generation = engine.submit("abc", params)
    eventually(lambda: len(generation.events) > 50)
    os.kill(engine._workers.current.pid, signal.SIGKILL)
    result = generation.result(WAIT_S)
    assert generation.resumed and result.token_ids == expected.token_ids
    assert re.fullmatch("([0-9]{2}[a-f]{2}){150}", result.text)


# ---- when it cannot go on


def test_a_grammar_that_fails_midway_ends_that_answer_only(tiny_engine, monkeypatch):
    engine = tiny_engine()
    steps = {"left": 4}

    def allowed(self, original=Matcher.allowed) -> bytes:
        steps["left"] -= 1
        if not steps["left"]:
            self._matcher.consume_token(10**6)  # what no grammar admits
        self._raise_if_failed()
        return original(self)

    monkeypatch.setattr(Matcher, "allowed", allowed)
    failing = engine.submit("abc", sampled(DATE))
    beside = engine.submit("abc", SamplingParams(max_new_tokens=20, ignore_eos=True))
    with pytest.raises(GenerationError, match="cannot follow its grammar any further"):
        failing.result(WAIT_S)
    assert len(failing.events) == 3 and len(beside.result(WAIT_S).token_ids) == 20


def test_a_grammar_that_costs_too_much_fails_instead_of_holding_up_the_batch(embedded_folder):
    costly = Grammars(embedded_folder, 49_152, frozenset({2})).matcher({"type": "regex", "value": ".{0,20}" * 50 + "z"})
    with pytest.raises(GrammarError, match="cannot follow its grammar any further: .*fuel"):
        costly.allowed()


def test_a_tokenizer_that_has_no_trie_costs_only_requests_with_a_grammar(tiny_engine, monkeypatch):
    monkeypatch.setattr("engine.tokenizer.load_tokenizer", lambda *args: object())
    engine = tiny_engine()
    with pytest.raises(GenerationError, match="tokenizer cannot be held to a grammar"):
        engine.submit("abc", sampled(DATE)).result(WAIT_S)
    assert engine.submit("abc", SamplingParams(max_new_tokens=3, ignore_eos=True)).result(WAIT_S).new_tokens == 3


def test_a_model_that_has_no_end_token_takes_no_grammar(tiny_engine):
    engine: Engine = tiny_engine()
    engine._eos_token_ids = frozenset()
    with pytest.raises(ValueError, match="^grammar must be left out here"):
        engine.submit("abc", sampled(DATE))


def test_the_embedded_vocabulary_becomes_a_trie(embedded_folder):
    matcher = Grammars(embedded_folder, 49_152, frozenset({2})).matcher({"type": "regex", "value": "[0-9]+"})
    admitted = [token for token in range(49_152) if matcher.allowed()[token // 8] >> token % 8 & 1]
    assert len(admitted) == 10, "this tokenizer has a token for each digit and none for more"
