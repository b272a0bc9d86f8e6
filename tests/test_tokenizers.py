"""Tokenizers of every kind, made here: from prompt to ids and back to text, alone and through an engine."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from reference import StockLoop
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

from engine import Engine, EngineConfig, SamplingParams
from engine.detokenizer import Detokenizer
from engine.prompts import PromptEncoder
from engine.tokenizer import eos_token_ids, load_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<turn>", "<end>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("o", "r")]
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")
TEXT = "hello world: Größe, 日本 🙂 and  two spaces\nhello"
CHAT = [{"role": "user", "content": "hello world"}]
WAIT_S = 60


def byte_level() -> Tokenizer:
    """Like GPT-2's: each byte is a character of its own alphabet."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello"]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(vocabulary)}, MERGES[:4]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_vocabulary() -> list[str]:
    return [*SPECIAL, *BYTES, "▁", *LETTERS, *("".join(pair) for pair in MERGES)]


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2's: spaces are "▁", one is put before the text, what is not in the vocabulary becomes bytes."""
    vocabulary = {token: id for id, token in enumerate(sentencepiece_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def sentencepiece_unigram() -> Tokenizer:
    """Like T5's and XLNet's pieces with scores, with bytes to fall back to."""
    pieces = [(token, -10.0 if len(token) == 1 else -5.0) for token in sentencepiece_vocabulary()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def wrapped(tokenizer: Tokenizer, bos: bool = False, template: str | None = None, **special: str):
    """The tokenizer as `transformers` has it; with `bos`, its post-processor puts `<s>` before every text."""
    tokenizer.add_special_tokens(SPECIAL)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", **special)
    made.chat_template = template
    return made


def llama_class():
    """A class of `transformers` with its own idea of the beginning of a sequence, loaded by `AutoTokenizer`."""
    vocabulary = {token: id for id, token in enumerate(sentencepiece_vocabulary())}
    made = LlamaTokenizer(vocab=vocabulary, merges=MERGES, add_bos_token=True)
    made.add_tokens(["<turn>", "<end>"], special_tokens=True)
    made.chat_template = WITH_BOS
    return made


@dataclass(frozen=True)
class Kind:
    make: Callable
    text_bos: int  # how many `<s>` the tokenizer means a text to have
    chat_bos: int  # and the template, a chat
    pad: str  # what pads in the end
    template: bool = True


KINDS = {
    "byte-level, BOS in both": Kind(
        lambda: wrapped(byte_level(), True, WITH_BOS, eos_token="</s>", pad_token="<end>"), 1, 1, "<end>"
    ),
    "byte-level, BOS in neither": Kind(
        lambda: wrapped(byte_level(), False, WITHOUT_BOS, eos_token="<end>"), 0, 0, "<end>"
    ),
    "byte-level, BOS in texts only": Kind(
        lambda: wrapped(byte_level(), True, WITHOUT_BOS, eos_token="</s>"), 1, 0, "</s>"
    ),
    "byte-level, BOS in chats only, no end": Kind(lambda: wrapped(byte_level(), False, WITH_BOS), 0, 1, "[PAD]"),
    "byte-level, no template": Kind(lambda: wrapped(byte_level(), False, eos_token="</s>"), 0, 0, "</s>", False),
    "SentencePiece BPE": Kind(
        lambda: wrapped(sentencepiece_bpe(), True, WITH_BOS, eos_token="</s>"), 1, 1, "</s>"
    ),
    "SentencePiece BPE, no template": Kind(
        lambda: wrapped(sentencepiece_bpe(), True, eos_token="</s>"), 1, 1, "</s>", False
    ),
    "SentencePiece Unigram": Kind(
        lambda: wrapped(sentencepiece_unigram(), False, WITH_BOS, eos_token="</s>", pad_token="<unk>"), 0, 1, "<unk>"
    ),
    "Llama's own class": Kind(llama_class, 1, 1, "</s>"),
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def saved(kind: Kind, folder):
    kind.make().save_pretrained(folder)
    return folder


def encoder_of(folder) -> PromptEncoder:
    tokenizer = load_tokenizer(folder)
    return PromptEncoder(tokenizer, len(tokenizer), context=512)


@EVERY_KIND
def test_the_beginning_of_sequence_is_there_as_often_as_meant(kind, tmp_path):
    encoder = encoder_of(saved(kind, tmp_path))
    text, chat = encoder.encode("hello"), encoder.encode(CHAT)
    assert (text.count(1), chat.count(1)) == (kind.text_bos, kind.chat_bos)
    assert (text[0] == 1, chat[0] == 1) == (bool(kind.text_bos), bool(kind.chat_bos))
    assert encoder.encode([5, 6]) == [5, 6], "ids are taken as they are"
    # A caller who writes it out means another one.
    assert encoder.encode("<s>hello").count(1) == kind.text_bos + 1


@EVERY_KIND
def test_a_chat_is_what_the_template_writes_or_a_plain_dialogue(kind, tmp_path):
    encoder = encoder_of(saved(kind, tmp_path))
    ids = encoder.encode([{"role": "system", "content": "be nice"}, *CHAT])
    assert encoder.has_chat_template == kind.template
    assert encoder.turn_end == (() if kind.template else ("\nUser:",))
    written = encoder.tokenizer.decode(ids, skip_special_tokens=True)
    if kind.template:
        assert ids.count(encoder.tokenizer.convert_tokens_to_ids("<turn>")) == 3
        assert [line.strip() for line in written.split("\n")] == [
            "system",
            "be nice",
            "user",
            "hello world",
            "assistant",
            "",
        ]
    else:
        assert written == "be nice\nUser: hello world\nAssistant:"


@EVERY_KIND
def test_there_is_always_a_token_to_pad_with(kind, tmp_path):
    tokenizer = load_tokenizer(saved(kind, tmp_path))
    assert tokenizer.pad_token == kind.pad
    padded = tokenizer(["hello", "hello hello, hello"], padding=True)["input_ids"]
    assert len(padded[0]) == len(padded[1]) and tokenizer.pad_token_id in padded[0]


@EVERY_KIND
def test_text_comes_back_whole_and_piece_by_piece(kind, tmp_path):
    tokenizer = load_tokenizer(saved(kind, tmp_path))
    ids = tokenizer(TEXT)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(id) for id in ids]
    assert "".join(pieces) + detokenizer.finish() == TEXT
    assert not any("\ufffd" in piece or "▁" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > len(TEXT) // 2, "it must have come piece by piece"


@EVERY_KIND
def test_an_engine_stops_at_any_of_several_end_tokens(kind, tmp_path):
    folder = saved(kind, tmp_path)
    encoder = encoder_of(folder)
    prompt = encoder.encode("hello world")
    model = tiny_llama(len(encoder.tokenizer))
    free = greedy(model, prompt, 24)
    ends = [free[9], 2, free[15]]
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.save_pretrained(folder)
    assert eos_token_ids(folder) == set(ends)
    expected = free[: next(index for index, id in enumerate(free) if id in ends) + 1]
    with serving(folder) as engine:
        result = engine.submit("hello world", SamplingParams(max_new_tokens=24, temperature=0)).result(WAIT_S)
        whole = engine.submit(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)).result(WAIT_S)
        answer = engine.submit(CHAT, SamplingParams(max_new_tokens=8)).result(WAIT_S)
        assert engine.snapshot()["model"]["chat_template"] == kind.template
    assert (result.token_ids, result.finish_reason) == (expected, "eos_token")
    assert (whole.token_ids, whole.finish_reason) == (free, "length")
    for shown in (result, whole, answer):
        assert shown.text == encoder.tokenizer.decode(shown.token_ids, skip_special_tokens=True)
    assert answer.prompt_token_ids == encoder.encode(CHAT)


def test_without_a_generation_config_the_tokenizers_end_counts(tmp_path):
    folder = saved(KINDS["SentencePiece BPE"], tmp_path)
    assert eos_token_ids(folder) == {2}
    assert eos_token_ids(saved(KINDS["byte-level, BOS in chats only, no end"], tmp_path / "none")) == frozenset()


def test_a_dialogue_ends_where_the_assistant_is_to_speak(tmp_path):
    encoder = encoder_of(saved(KINDS["byte-level, no template"], tmp_path))
    turns = [*CHAT, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    text = "User: hello world\nAssistant: hello\nUser: bye\nAssistant:"
    assert encoder.encode(turns) == encoder.encode(text)
    kept, dropped = encoder.fit_chat(turns, 512 - len(encoder.encode(turns)) + 1)
    assert (kept, dropped) == (turns[2:], 2)


def test_what_the_system_says_opens_the_first_question_where_the_template_knows_no_such_role(tmp_path):
    tokenizer = KINDS["byte-level, BOS in both"].make()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path)
    system = {"role": "system", "content": "be nice"}
    assert encoder.tokenizer.decode(encoder.encode(CHAT)) == "hello world"
    assert encoder.tokenizer.decode(encoder.encode([system, *CHAT])) == "be nice\n\nhello world"
    with pytest.raises(ValueError, match="chat template does not take these messages: System role not supported"):
        encoder.encode([*CHAT, system])


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(12)
    return model


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    loop, ids = StockLoop(model), list(prompt)
    for _ in range(count):
        ids.append(int(loop.naive(ids).argmax()))
    return ids[len(prompt) :]


def serving(folder) -> Engine:
    config = EngineConfig(model=str(folder), device="cpu", threads=1)
    return Engine.from_pretrained(config=config, host="thread")
