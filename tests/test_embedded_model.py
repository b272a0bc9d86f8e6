"""The embedded 135M model: real text, where near-ties between logits are real, too."""

import re

import pytest
import torch
from reference import TIE, assert_greedy, run_until_done
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar import Grammars
from engine.loading import load_model
from engine.model_folder import ModelFiles
from engine.packing import pack_linears
from engine.params import SamplingParams
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.tokenizer import eos_token_ids, load_tokenizer

PROMPTS = [
    "Once upon a time",
    "The three largest rivers of Europe are",
    "def fibonacci(n):\n    ",
    "In the kitchen there was a table, and on the table there stood a bowl of oranges. " * 4,
    "1, 2, 3, 4,",
]


@pytest.fixture(scope="module")
def runner(embedded_folder):
    files = ModelFiles(embedded_folder, "embedded", "test")
    model = load_model(files, EngineConfig(device="cpu"))
    pack_linears(model)
    return ModelRunner(model)


@pytest.fixture(scope="module")
def tokenizer(embedded_folder):
    return load_tokenizer(embedded_folder)


def test_a_mixed_batch_gives_the_naive_loops_tokens(runner, tokenizer, embedded_folder, capsys):
    """Joins, leaves and chunks: more prompts than rows, different lengths, prompts longer than a chunk."""
    config = EngineConfig(max_batch_size=3, prefill_chunk=32)
    core = EngineCore(runner, config, eos_token_ids(embedded_folder))
    sequences = [
        Sequence(index, tokenizer(prompt)["input_ids"], SamplingParams(max_new_tokens=12 + 2 * index), seed=0)
        for index, prompt in enumerate(PROMPTS)
    ]
    outputs = run_until_done(core, sequences, join_every=3)
    ties = sum(assert_greedy(runner, s.prompt_ids, outputs[s.request_id]) for s in sequences)
    with capsys.disabled():
        print(f"\n{sum(map(len, outputs.values()))} tokens as the naive loop's, {ties} of them within a tie of {TIE}")
    text = tokenizer.decode(outputs[4])
    assert text.startswith(" 5, 6, 7"), text


def test_cached_logits_are_the_naive_ones(runner, tokenizer):
    """How far batching and caching move a logit at all: what `TIE` is measured against."""
    core = EngineCore(runner, EngineConfig(max_batch_size=4, prefill_chunk=16), frozenset())
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:4]]
    for index, prompt_ids in enumerate(ids):
        core.submit(Sequence(index, prompt_ids, SamplingParams(max_new_tokens=30), seed=0))
    while len(core.scheduler.running) < 4:
        core.step()
    running = list(core.scheduler.running)
    cached = runner.decode(core.cache, [s.last_token_id for s in running], [s.cached_tokens for s in running])
    naive = torch.stack([runner.naive(s.token_ids) for s in running])
    assert (cached - naive).abs().max() < TIE / 2


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"typical_p": 0.9, "frequency_penalty": 0.4, "watermark": True, "top_n_tokens": 3, "prompt_logprobs": True},
        {"typical_p": 0.9, "grammar": {"type": "regex", "value": "([A-Z][a-z]+ ?)+[.]"}},
    ],
)
def test_sampled_text_is_the_same_alone_and_among_strangers(runner, tokenizer, embedded_folder, more):
    """A draw that falls within rounding of the edge between two tokens would be the only excuse."""
    params = SamplingParams(
        max_new_tokens=24, temperature=0.7, top_k=50, top_p=0.95, repetition_penalty=1.1, ignore_eos=True, **more
    )
    grammars = Grammars(embedded_folder, runner.vocabulary, eos_token_ids(embedded_folder))
    ids = tokenizer(PROMPTS[0])["input_ids"]

    def tokens(others: int) -> list[int]:
        core = EngineCore(runner, EngineConfig(max_batch_size=8), frozenset(), grammars)
        strangers = [
            Sequence(1 + i, tokenizer(PROMPTS[i + 1])["input_ids"], SamplingParams(max_new_tokens=24, temperature=1), i)
            for i in range(others)
        ]
        return run_until_done(core, [*strangers, Sequence(0, ids, params, seed=11)], join_every=2)[0]

    alone = tokens(0)
    assert len(alone) == 24 and alone == tokens(3)
    if params.grammar:
        assert re.fullmatch("([A-Z][a-z]+ ?)*[A-Z]?[a-z]*[.]?", tokenizer.decode(alone, skip_special_tokens=True))


def test_the_chat_template_ends_turns_with_the_models_end_token(tokenizer, embedded_folder):
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in eos_token_ids(embedded_folder)


def test_packed_weights_give_the_stock_models_logits(runner, tokenizer, embedded_folder):
    """The reference is untouched `transformers`, loaded the plain way."""
    stock = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            expected = stock(torch.tensor([ids])).logits[0, -1]
        assert (runner.naive(ids) - expected).abs().max() < TIE / 2
