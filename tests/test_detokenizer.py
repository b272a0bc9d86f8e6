"""The detokenizer on friendly, hostile and random ids: all pieces together are what decoding at once gives."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import REPLACEMENT, Detokenizer
from engine.tokenizer import load_tokenizer

TEXTS = [
    "plain words, 1 2 3",
    "  leading spaces\n\n\tand tabs  ",
    "你好，世界！ 日本語 한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪",
    "e\u0301 a\u0308\u0323 zalgo z\u0351\u036b\u0343",
    "Ωμέγα кириллица עברית العربية हिन्दी",
    "nul \x00 bell \x07 and a real \ufffd replacement",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """256 single bytes, a few merges (one that ends in the middle of a character), two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "t"), ("a", "a"), ("Ċ", "ð"), ("ä", "½")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: words with a leading `▁`, everything unknown as bytes, the first space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁the", "the", "a", "b", "c", "▁a", "你", "好", "é", REPLACEMENT, "▁" + REPLACEMENT, ""]
    tokenizer = Tokenizer(models.BPE({w: id for id, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
TINY = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded_folder):
    return load_tokenizer(embedded_folder)


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer, ids, stop=()):
    """Every piece, the last one from `finish`; pushing ends with a match, as in the engine."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.matched is not None:
            break
    return [*pieces, detokenizer.finish()], detokenizer


def cut(text, stop):
    """`text` before the stop string that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


# --- adding up ---


@TINY
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_never_split_a_character(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids) == text
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_tokenizer_round_trip(embedded_tokenizer, text):
    ids = embedded_tokenizer(text)["input_ids"]
    pieces, _ = pieces_of(embedded_tokenizer, ids)
    assert "".join(pieces) == decode(embedded_tokenizer, ids) == text


@TINY
def test_every_id_alone(tokenizer):
    for token_id in range(len(tokenizer)):
        pieces, _ = pieces_of(tokenizer, [token_id])
        assert "".join(pieces) == decode(tokenizer, [token_id]), token_id


def test_every_id_of_the_embedded_vocabulary_alone_and_in_a_row(embedded_tokenizer):
    for token_id in range(0, len(embedded_tokenizer)):
        detokenizer = Detokenizer(embedded_tokenizer)
        assert detokenizer.push(token_id) + detokenizer.finish() == decode(embedded_tokenizer, [token_id]), token_id
    ids = list(range(len(embedded_tokenizer)))
    random.Random(7).shuffle(ids)
    pieces, _ = pieces_of(embedded_tokenizer, ids)
    assert "".join(pieces) == decode(embedded_tokenizer, ids)


@TINY
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_ids_add_up_at_every_length(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    detokenizer, shown = Detokenizer(tokenizer), ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        assert decode(tokenizer, ids[:count]).startswith(shown)
    assert shown + detokenizer.finish() == decode(tokenizer, ids)


CHARACTER_BYTES = st.sampled_from(["é", "你", "😀", "a", "\n", " "]).map(lambda c: list(c.encode()))
BROKEN_BYTES = st.sampled_from([[0xE4], [0xE4, 0xBD], [0xF0, 0x9F, 0x98], [0xFF], [0x80], [0xC0, 0xAF], [0xED, 0xA0]])


@TINY
@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.one_of(CHARACTER_BYTES, BROKEN_BYTES), max_size=20), extra=st.data())
def test_characters_among_broken_bytes(tokenizer, parts, extra):
    """Random ids seldom make whole characters: build them byte by byte, broken ones and special ids between."""
    ids = []
    for byte in (byte for part in parts for byte in part):
        ids.append(byte_id(tokenizer, byte))
        if extra.draw(st.integers(0, 9)) == 0:
            ids.append(extra.draw(st.sampled_from([tokenizer.eos_token_id, some_word(tokenizer)])))
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids)


def byte_id(tokenizer, byte):
    if tokenizer is BYTE_FALLBACK:
        return tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")
    return next(id for id in range(256) if raw_bytes()[id] == byte)


def raw_bytes():
    """id -> byte of the byte-level tokenizer; GPT-2's alphabet keeps printable bytes and shifts the others."""
    if not _raw_bytes:
        keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        shifted = [byte for byte in range(256) if byte not in keep]
        letters = {chr(byte): byte for byte in keep} | {chr(256 + n): byte for n, byte in enumerate(shifted)}
        _raw_bytes.update({id: letters[BYTE_LEVEL.convert_ids_to_tokens(id)] for id in range(256)})
    return _raw_bytes


_raw_bytes: dict[int, int] = {}


def some_word(tokenizer):
    return tokenizer.convert_tokens_to_ids("▁the" if tokenizer is BYTE_FALLBACK else "he")


# --- when text comes out ---


def test_a_character_comes_out_with_its_last_byte_and_not_before():
    ids = [byte_id(BYTE_LEVEL, byte) for byte in "a你😀".encode()]
    pieces, _ = pieces_of(BYTE_LEVEL, ids)
    assert pieces == ["a", "", "", "你", "", "", "", "😀", ""]


def test_text_before_an_unfinished_character_of_the_same_token_comes_out():
    token_id = BYTE_LEVEL.convert_tokens_to_ids("Ċð")
    assert Detokenizer(BYTE_LEVEL).push(token_id) == "\n"


@TINY
def test_invalid_bytes_come_out_while_more_follow(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(byte_id(tokenizer, 0xFF)) for _ in range(100))
    assert len(shown) >= 99 and set(shown) == {REPLACEMENT}
    assert shown + detokenizer.finish() == REPLACEMENT * 100


def test_a_run_of_fallback_bytes_is_held_until_it_cannot_be_spoilt():
    ids = [byte_id(BYTE_FALLBACK, byte) for byte in "é😀".encode()]
    assert "".join(map(Detokenizer(BYTE_FALLBACK).push, ids)) == ""
    assert "".join(map(Detokenizer(BYTE_FALLBACK).push, [*ids, some_word(BYTE_FALLBACK)])) == "é😀 the"
    spoilt = [*ids, byte_id(BYTE_FALLBACK, 0xFF)]
    assert "".join(map(Detokenizer(BYTE_FALLBACK).push, spoilt)) == REPLACEMENT * 7


@pytest.mark.parametrize("byte", [0xFF, 0xE4, 0x41], ids=["invalid", "unfinished", "letter"])
@TINY
def test_the_cost_of_a_token_does_not_grow(tokenizer, byte, monkeypatch):
    detokenizer = Detokenizer(tokenizer)
    longest = 0
    plain = Detokenizer._decode

    def measuring(self, ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return plain(self, ids)

    monkeypatch.setattr(Detokenizer, "_decode", measuring)
    for _ in range(300):
        detokenizer.push(byte_id(tokenizer, byte))
    assert longest < 20


def test_special_ids_have_no_text_and_are_told():
    detokenizer = Detokenizer(BYTE_LEVEL)
    eos = BYTE_LEVEL.eos_token_id
    assert detokenizer.is_special(eos) and not detokenizer.is_special(some_word(BYTE_LEVEL))
    assert [detokenizer.push(id) for id in (eos, some_word(BYTE_LEVEL), eos)] == ["", "he", ""]


def test_a_window_cut_within_the_text_of_a_token():
    ids = [byte_id(BYTE_LEVEL, 0xFF)] * 4 + [BYTE_LEVEL.convert_tokens_to_ids("Ċð")] * 3 + letters("a")
    pieces, _ = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == decode(BYTE_LEVEL, ids)


def test_a_spoilt_run_forgets_its_beginning(monkeypatch):
    detokenizer = Detokenizer(BYTE_FALLBACK)
    ids = [byte_id(BYTE_FALLBACK, byte) for byte in b"a" * 200 + b"\xff"]
    shown = "".join(map(detokenizer.push, ids))
    lengths = []
    plain = Detokenizer._decode
    monkeypatch.setattr(Detokenizer, "_decode", lambda self, ids: (lengths.append(len(ids)), plain(self, ids))[1])
    shown += "".join(map(detokenizer.push, ids[:50])) + detokenizer.finish()
    assert shown == decode(BYTE_FALLBACK, ids + ids[:50]) and max(lengths) < 10


def test_a_real_replacement_character_among_fallback_bytes_comes_out_at_once():
    assert Detokenizer(BYTE_FALLBACK).push(BYTE_FALLBACK.convert_tokens_to_ids(REPLACEMENT)) == REPLACEMENT


def test_ids_without_a_token_do_not_end_a_run_of_bytes():
    run = [byte_id(BYTE_FALLBACK, byte) for byte in "你".encode()]
    ids = [run[0], len(BYTE_FALLBACK) + 5, *run[1:], some_word(BYTE_FALLBACK)]
    pieces, _ = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == decode(BYTE_FALLBACK, ids) == "你 the"


def test_an_empty_token_does_not_swallow_the_space_behind_it():
    ids = BYTE_FALLBACK.convert_tokens_to_ids(["the", "", "▁the"])
    pieces, _ = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == decode(BYTE_FALLBACK, ids) == "the the"


def test_ids_without_a_token_have_no_text():
    word = some_word(BYTE_LEVEL)
    pieces, _ = pieces_of(BYTE_LEVEL, [word, len(BYTE_LEVEL) + 5, word])
    assert "".join(pieces) == "hehe"


@TINY
def test_replaying_ids_resumes(tokenizer):
    ids = tokenizer("the 你好 😀 é the", add_special_tokens=False)["input_ids"]
    for count in range(len(ids)):
        first, second = Detokenizer(tokenizer, ("é",)), Detokenizer(tokenizer, ("é",))
        before = [first.push(id) for id in ids[:count] if first.matched is None]
        again = [second.push(id) for id in ids[:count] if second.matched is None]
        assert before == again and first.matched == second.matched
        if first.matched is None:
            assert first.push(ids[count]) == second.push(ids[count])


# --- stop strings ---


def letters(text):
    return [byte_id(BYTE_LEVEL, byte) for byte in text.encode()]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("hello world", ("lo w",), "hel", "lo w"),
        ("aaab", ("aab",), "a", "aab"),
        ("ababac", ("abac",), "ab", "abac"),
        ("abcd", ("abcd", "bc"), "a", "bc"),
        ("xabc", ("bc", "abc"), "x", "abc"),
        ("stop", ("s",), "", "s"),
        ("nothing here", ("never",), "nothing here", None),
        ("almost neve", ("never",), "almost neve", None),
        ("日本\n\nもっと", ("\n\n",), "日本", "\n\n"),
        ("half 😀 end", ("😀",), "half ", "😀"),
    ],
)
def test_stop_strings(text, stop, shown, matched):
    pieces, detokenizer = pieces_of(BYTE_LEVEL, letters(text), stop)
    assert ("".join(pieces), detokenizer.matched) == (shown, matched)


def test_a_stop_string_is_found_with_the_token_that_completes_it():
    for text, count in (("a\n", 2), ("ab\n\n", 4)):
        detokenizer = Detokenizer(BYTE_LEVEL, (text[1:],))
        for id in letters(text)[:-1]:
            detokenizer.push(id)
            assert detokenizer.matched is None
        detokenizer.push(letters(text)[count - 1])
        assert detokenizer.matched == text[1:]


def test_a_stop_string_before_an_unfinished_character_of_the_same_token():
    detokenizer = Detokenizer(BYTE_LEVEL, ("\n",))
    assert detokenizer.push(BYTE_LEVEL.convert_tokens_to_ids("Ċð")) == ""
    assert detokenizer.matched == "\n"


def test_a_stop_string_of_fallback_bytes_is_found_at_once():
    """Llama 2 writes a newline as a byte: it stops there, though the text of a run is not final yet."""
    detokenizer = Detokenizer(BYTE_FALLBACK, ("\n",))
    assert detokenizer.push(some_word(BYTE_FALLBACK)) == "the"
    assert detokenizer.push(byte_id(BYTE_FALLBACK, 0x0A)) == "" and detokenizer.matched == "\n"


def test_only_what_could_begin_a_stop_string_is_held_back():
    pieces, _ = pieces_of(BYTE_LEVEL, letters("ab##c#d"), ("##!",))
    assert pieces == ["a", "b", "", "", "##c", "", "#d", ""]


def test_nothing_can_be_pushed_after_the_end():
    detokenizer = Detokenizer(BYTE_LEVEL, ("a",))
    detokenizer.push(letters("a")[0])
    with pytest.raises(RuntimeError, match="ended"):
        detokenizer.push(letters("b")[0])
    assert detokenizer.finish() == ""
    finished = Detokenizer(BYTE_LEVEL)
    finished.finish()
    with pytest.raises(RuntimeError, match="ended"):
        finished.push(letters("b")[0])


@TINY
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_stop_strings_cut_where_the_whole_text_is_cut(tokenizer, data):
    words = [some_word(tokenizer), tokenizer.eos_token_id]
    words += [byte_id(tokenizer, byte) for byte in "aab \n你😀".encode()]
    ids = data.draw(st.lists(st.sampled_from(words), max_size=30))
    stop = tuple(data.draw(st.lists(st.text("abhe t\n你😀", min_size=1, max_size=4), max_size=4)))
    detokenizer, pushed, shown = Detokenizer(tokenizer, stop), [], ""
    for token_id in ids:
        pushed.append(token_id)
        shown += detokenizer.push(token_id)
        if detokenizer.matched is not None:
            break
    shown += detokenizer.finish()
    whole = decode(tokenizer, pushed)
    assert shown == cut(whole, stop)
    assert (detokenizer.matched is None) == (not any(s in whole for s in stop))
