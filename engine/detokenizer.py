"""Text out of token ids, one id at a time: never half a character, never part of a stop string.

Decoding each id by itself is wrong (a character may take several ids, a leading space depends on
what stands before), and decoding everything again costs more with every token. The technique here is that of
text-generation-inference: decode a short window, the ids whose text was completed last followed by
the ids since, and show what has been added to the text of the former.

Not every addition is final. A byte-level vocabulary decodes an unfinished character to U+FFFD. One with byte
fallback (`<0xE4>`) decodes a whole run of bytes at once, and a wrong byte spoils the run up to its beginning: nothing
of a run is final before it ends. Only text that no later id can change is shown, so that all pieces
together are exactly what decoding all ids at once gives.
"""

import codecs
import re
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes, and so ids, of one character in UTF-8

_vocabularies: "WeakKeyDictionary[PreTrainedTokenizerBase, _Vocabulary]" = WeakKeyDictionary()


class Detokenizer:
    """The text of one growing sequence of ids, cut before the first stop string.

    `matched` is the stop string that ended the text, once there is one. Where several do, the one that
    ends first counts, and of those the longest. There is no other state than what the ids make: pushing
    the same ids into a new `Detokenizer` resumes where an old one was.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: tuple[str, ...] = ()):
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary(tokenizer)
        self._stop = stop
        self._finished = False
        self._context: list[int] = []  # ids whose text was completed last
        self._context_text = ""
        self._pending: list[int] = []  # ids since
        self._settled = 0  # characters of the window's text that were taken from it
        self._run = _ByteRun()
        self._held = ""  # settled text that may be the beginning of a stop string

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which has no text."""
        return token_id in self._vocabulary.special

    def label(self, token_id: int) -> str:
        """How one id reads by itself, special tokens by their names: to look at, not to put a text together."""
        text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        # SentencePiece drops the space before the first word of a text.
        name = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text

    def push(self, token_id: int) -> str:
        """The text that this id makes final; often empty, sometimes that of earlier ids too."""
        if self._finished or self.matched is not None:
            raise RuntimeError("the text has ended: nothing can be pushed after a stop string or finish()")
        if self.is_special(token_id) or self._tokenizer.convert_ids_to_tokens(token_id) is None:
            return ""
        settled, tentative = self._advance(token_id)
        return self._release(settled, tentative)

    def finish(self) -> str:
        """What is left when no id follows, incomplete characters included. It may still contain a stop string."""
        if self._finished or self.matched is not None:
            return ""
        self._finished = True
        rest = self._decode(self._context + self._pending)[self._settled :]
        return self._release(rest, "", last=True)

    # --- ids to text ---

    def _advance(self, token_id: int) -> tuple[str, str]:
        """Text that became final, and text after it that would be if no more ids came."""
        self._pending.append(token_id)
        byte = self._vocabulary.fallback_bytes.get(token_id)
        if byte is not None:
            return self._advance_in_run(byte)
        self._run = _ByteRun()
        text = self._decode(self._context + self._pending)
        unfinished = text.endswith(REPLACEMENT) and not self._vocabulary.fallback_bytes
        end = len(text) - 1 if unfinished else len(text)
        settled = text[self._settled : end]
        if unfinished:
            self._settled = max(self._settled, end)
            if len(self._pending) > _LONGEST_CHARACTER:
                self._shorten_window(text)
        elif len(text) > len(self._context_text):
            # An id without any text makes no context: behind it the next leading space would be stripped.
            self._move_window(len(self._pending))
        return settled, ""

    def _advance_in_run(self, byte: int) -> tuple[str, str]:
        was_spoilt = self._run.spoilt
        self._run.push(byte)
        if not self._run.spoilt and (self._run.unfinished or not self._stop):
            return "", ""
        added = self._decode(self._context + self._pending)[self._settled :]
        if not self._run.spoilt:
            return "", added
        # The run is lost, and every further byte of it too. The context has to remember that: it stays
        # at the last bytes up to the wrong one, which can be no text by themselves either.
        if was_spoilt:
            self._pending.clear()
        else:
            self._pending = self._pending[-_LONGEST_CHARACTER:]
            self._move_window(len(self._pending))
        return added, ""

    def _move_window(self, count: int) -> None:
        """Make the first `count` pending ids the context."""
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._context_text = self._decode(self._context)
        self._settled = len(self._context_text)

    def _shorten_window(self, text: str) -> None:
        """Drop what a stream of invalid bytes has piled up.

        The window may be cut where the text of both sides makes the text of the whole:
        there no character spans the cut, whatever follows.
        """
        for count in range(len(self._pending) - 1, 0, -1):
            head = self._decode(self._context + self._pending[:count])
            tail = self._decode(self._context + self._pending[count:])[len(self._context_text) :]
            if tail and head + tail == text:
                shown_of_tail = self._settled - len(head)
                self._move_window(count)
                self._settled += shown_of_tail
                return

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # --- stop strings ---

    def _release(self, settled: str, tentative: str, last: bool = False) -> str:
        """Add settled text, and let go of what cannot belong to a stop string any more.

        A stop string that ends in tentative text counts: if it ends the sequence, nothing follows to change it.
        """
        self._held += settled
        found = self._first_stop(self._held + tentative)
        if found is not None:
            start, self.matched = found
            text, self._held = (self._held + tentative)[:start], ""
            return text
        keep = 0 if last else self._possible_beginning()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that ends first begins, and which it is."""
        places = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


class _ByteRun:
    """Fallback bytes in a row: complete characters, an unfinished one at the end, or spoilt for good."""

    def __init__(self):
        self.spoilt = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: int) -> None:
        if not self.spoilt:
            try:
                self._decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                self.spoilt = True

    @property
    def unfinished(self) -> bool:
        return bool(self._decoder.getstate()[0])


class _Vocabulary:
    """What has to be known of a tokenizer's ids: which are special, and which stand for a single byte."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        self.fallback_bytes: dict[int, int] = {}
        vocabulary = tokenizer.get_vocab()
        # A vocabulary may hold such strings without meaning bytes by them: the decoder shows what it does.
        letter = vocabulary.get("<0x41>")
        if letter is not None and tokenizer.decode([letter]) == "A":
            self.fallback_bytes = {
                id: int(token[3:5], 16)
                for token, id in vocabulary.items()
                if re.fullmatch("<0x[0-9A-F]{2}>", token) and id not in self.special
            }


def _vocabulary(tokenizer: "PreTrainedTokenizerBase") -> _Vocabulary:
    # Gathering it takes milliseconds, and there is a detokenizer for every request.
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]
