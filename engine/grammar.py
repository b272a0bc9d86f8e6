"""Answers that fit a JSON schema or a regular expression, through llguidance.

A grammar crosses the wire as its source. The front only asks whether it can be used at all; the worker holds the
vocabulary as a trie and, before each choice, masks the tokens that cannot continue a match.
"""

import json
import threading
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

NAMES = {"json": "a JSON schema", "regex": "a regular expression"}
MAX_SOURCE = 20_000
# A small model fills flexible white space for ever: one space after a comma and a colon, as json.dumps has it.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A fifth of llguidance's own: building a grammar must not hold up everybody's step by more than some 20 ms.
LEXER_FUEL = 200_000


class GrammarError(Exception):
    """This one request's grammar failed while its answer was made; the sentence is for its visitor."""


def check(grammar: Any) -> None:
    """`ValueError` unless `grammar` is `{"type": "json" | "regex", "value": ...}` and something can match it."""
    from llguidance import LLMatcher, LLTokenizer

    if not isinstance(grammar, dict) or set(grammar) != {"type", "value"} or grammar["type"] not in tuple(NAMES):
        shape = " or ".join(f'{{"type": "{kind}", "value": {name}}}' for kind, name in NAMES.items())
        raise ValueError(f"grammar must be {shape}, not {_shortened(grammar)}")
    # The 256 bytes are vocabulary enough to tell whether anything can be said.
    matcher = LLMatcher(LLTokenizer("byte"), _source(grammar), log_level=0, limits=_limits())
    if matcher.is_error():
        raise _unusable(grammar, _reason(matcher))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _unusable(grammar, "nothing can match it")


class Grammars:
    """The worker's vocabulary as a trie, and matchers over it. Building the trie begins at once, in a thread."""

    def __init__(
        self, folder: Path, vocabulary: int, eos_token_ids: frozenset[int], *, trust_remote_code: bool = False
    ):
        self.vocabulary = vocabulary
        self._error: Exception | None = None
        self._trie: Any = None
        self._builder = threading.Thread(
            target=self._build,
            args=(folder, sorted(eos_token_ids), trust_remote_code),
            name="kvscope-grammar",
            daemon=True,
        )
        self._builder.start()

    def matcher(self, grammar: dict[str, Any]) -> "Matcher":
        """A matcher that stands before the first token."""
        self._builder.join()
        if self._error:
            raise GrammarError(f"This model's tokenizer cannot be held to a grammar ({self._error}).")
        return Matcher(self._trie, _source(grammar))

    def _build(self, folder: Path, eos_token_ids: list[int], trust_remote_code: bool) -> None:
        from llguidance.hf import from_tokenizer

        from engine.tokenizer import load_tokenizer

        try:
            tokenizer: Any = load_tokenizer(folder, trust_remote_code)
            self._trie = from_tokenizer(tokenizer, n_vocab=self.vocabulary, eos_token=eos_token_ids)
        except Exception as error:  # whatever it is, it concerns only requests with a grammar
            self._error = error


class Matcher:
    """How far one answer has come in its grammar. A complete answer can only be followed by end-of-sequence."""

    def __init__(self, trie: Any, source: str):
        from llguidance import LLMatcher

        self._matcher = LLMatcher(trie, source, log_level=0, limits=_limits())
        self._followed = 0

    def follow(self, output_ids: SequenceOf[int]) -> None:
        """Take in what the answer has grown by."""
        for token_id in output_ids[self._followed :]:
            # Behind a complete answer stand only end-of-sequence tokens, of which the matcher takes one.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        self._followed = len(output_ids)
        self._raise_if_failed()

    def allowed(self) -> bytes:
        """What may come next: one bit a token, the lowest first."""
        bits = self._matcher.compute_bitmask()
        self._raise_if_failed()
        return bits

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"The answer cannot follow its grammar any further: {_reason(self._matcher)}")


def _source(grammar: dict[str, Any]) -> str:
    """llguidance's form of a grammar; `ValueError` if it has none."""
    from llguidance import LLMatcher

    value = grammar["value"]
    if grammar["type"] == "regex" and not isinstance(value, str):
        raise _unusable(grammar, "it must be text")
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        text.encode()
        if len(text) > MAX_SOURCE:
            raise ValueError(f"it has {len(text):,} characters, and {MAX_SOURCE:,} are allowed")
        if grammar["type"] == "regex":
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unusable(grammar, str(error)) from None


def _unusable(grammar: dict[str, Any], reason: str) -> ValueError:
    name = NAMES[grammar["type"]]
    return ValueError(f"grammar must be {name} that can be followed, not {_shortened(grammar['value'])}: {reason}")


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=LEXER_FUEL, step_lexer_fuel=LEXER_FUEL, verbose_errors=False)


def _reason(matcher: Any) -> str:
    """The matcher's complaint in one line."""
    return " ".join(matcher.get_error().split())[:160]


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
