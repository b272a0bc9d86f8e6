"""What a lease does on a real GPU: needs torch, transformers, pydantic-settings and pytest only; no network, no gradio.

python -m pytest tests/gpu/test_gpu_lease.py
"""

import time
from multiprocessing.connection import Connection, Pipe
from threading import Thread

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.params import SamplingParams
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.wire import Parked, Shutdown, StepReport, Submit
from engine.worker import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

DEVICE = "cuda"
TOKENS = 60


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(DEVICE, torch.float32).eval().requires_grad_(False)


def make_core(model: LlamaForCausalLM) -> EngineCore:
    config = EngineConfig(max_batch_size=8, max_context=512, cache_tokens=8192, probe_share=0)
    return EngineCore(ModelRunner(model), config, frozenset())


def sequences() -> dict[int, Sequence]:
    """Three of different lengths, two of them sampled."""
    params = [SamplingParams(max_new_tokens=TOKENS, temperature=heat, top_k=50) for heat in (0, 0.8, 1.2)]
    prompts = [list(range(5)), list(range(70, 270)), list(range(1000, 1040))]
    asked = zip(prompts, params, strict=True)
    return {n: Sequence(n, ids, chosen, seed=n) for n, (ids, chosen) in enumerate(asked)}


def serve(core: EngineCore, waiting: dict[int, Sequence], tokens: dict[int, list[int]], seconds: float) -> bool:
    """One lease of `seconds`: what it tells is added to `tokens`; whether it parked."""

    def work(connection: Connection) -> None:
        run(core, connection, time.monotonic() + seconds)
        core.park()
        connection.send(Parked())
        connection.close()

    ours, theirs = Pipe()
    worker = Thread(target=work, args=(theirs,))
    worker.start()
    for number, sequence in waiting.items():
        if len(tokens[number]) < TOKENS:
            ids = list(tokens[number])
            ours.send(Submit(Sequence(number, sequence.prompt_ids, sequence.params, sequence.seed, output_ids=ids)))
    parked = False
    while not parked:
        message = ours.recv()
        parked = isinstance(message, Parked)
        if isinstance(message, StepReport):
            for token in message.tokens:
                tokens[token.request_id].append(token.token_id)
            if all(len(ids) == TOKENS for ids in tokens.values()):
                ours.send(Shutdown())
    worker.join()
    return parked


@pytest.mark.parametrize("keep", [True, False], ids=["in place", "prefilled again"])
def test_sequences_cut_by_leases_have_the_tokens_of_one_long_run(model, keep):
    whole: dict[int, list[int]] = {n: [] for n in sequences()}
    assert serve(make_core(model), sequences(), whole, 600)
    core, cut, leases, seconds = make_core(model), {n: [] for n in sequences()}, 0, 0.1
    while not all(len(ids) == TOKENS for ids in cut.values()):
        before = sum(map(len, cut.values()))
        assert serve(core if keep else make_core(model), sequences(), cut, seconds)
        leases += 1
        if sum(map(len, cut.values())) == before:
            seconds *= 2  # too short to begin with
    assert leases > 1
    assert cut == whole


def test_the_whole_pool_is_reserved_at_once_and_no_step_needs_another(model):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    core = make_core(model)
    reserved = core.cache.allocated_bytes
    assert core.cache.slots * core.cache.positions <= 8192
    assert reserved <= torch.cuda.memory_allocated() - before < 1.1 * reserved + 2**24
    pools = [pool.data_ptr() for pool in (*core.cache.keys, *core.cache.values)]
    tokens: dict[int, list[int]] = {n: [] for n in sequences()}
    serve(core, sequences(), tokens, 600)
    assert [pool.data_ptr() for pool in (*core.cache.keys, *core.cache.values)] == pools


def test_a_pool_that_does_not_fit_is_an_out_of_memory_error_and_leaves_the_model_usable(model):
    free, _ = torch.cuda.mem_get_info()
    runner = ModelRunner(model)
    positions = 2 * free // sum(shape.bytes_per_token for shape in runner.layer_shapes)
    config = EngineConfig(max_batch_size=1, max_context=1_000_000, cache_tokens=positions, probe_share=0)
    with pytest.raises(torch.OutOfMemoryError):
        EngineCore(runner, config, frozenset())
    assert torch.isfinite(runner.naive([1, 2, 3])).all()
