"""A model of the hub, found and fetched: bounded where nobody answers, and from its local cache where nobody can."""

from pathlib import Path
from typing import Any

from engine.errors import LoadingError
from engine.model_folder import read_json
from engine.progress import Progress, in_background, watch_growth

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# Subfolders hold other formats of the same weights; "consolidated" is Mistral's own second copy.
UNWANTED = ["*/*", "consolidated*"]


class HubUnreachable(LoadingError):
    """The hub did not answer, or answered nonsense; the model may still be usable from elsewhere."""


def fetch(
    model_id: str, timeout_s: float, progress: Progress, *, revision: str | None = None, with_code: bool = False
) -> Path:
    """The folder of `model_id` in the hub's local cache, downloaded as far as it is missing.

    `revision` is a branch, tag or commit (None: the main branch); with `with_code`, the model's Python files come, too.
    The first look-up takes at most `timeout_s`. Without the hub, a model downloaded earlier is used as it is.
    Raises `HubUnreachable` when there is neither, `LoadingError` for an unknown, private, gated or weightless model.
    """
    wanted = [*WANTED, "*.py"] if with_code else WANTED
    try:
        info = _look_up(model_id, revision, timeout_s)
    except HubUnreachable:
        downloaded = _downloaded_earlier(model_id, revision, wanted)
        if downloaded is None:
            raise
        return downloaded
    return _download(model_id, revision, wanted, info, progress)


def _look_up(model_id: str, revision: str | None, timeout_s: float) -> Any:
    """The hub's `ModelInfo`, with file sizes."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    # The client's timeout counts for each address and each read, and not at all for resolving the name.
    # The thread bounds all of it together.
    future = in_background(
        lambda: HfApi().model_info(model_id, revision=revision, files_metadata=True, timeout=timeout_s)
    )
    try:
        return future.result(timeout=timeout_s)
    except hub.GatedRepoError:
        raise LoadingError(
            f"{model_id} is gated: accept its conditions on the model hub and set HF_TOKEN, or choose another "
            "KVSCOPE_MODEL."
        ) from None
    except hub.RevisionNotFoundError:
        raise LoadingError(
            f"{model_id} has no revision {revision!r} on the model hub: set KVSCOPE_REVISION to one of its branches, "
            "tags or commits."
        ) from None
    except hub.HFValidationError:
        raise LoadingError(
            f"{model_id!r} is neither a folder nor a hub id (owner/name): check KVSCOPE_MODEL."
        ) from None
    except Exception as error:
        # The hub answers 401 for what it does not want to show or does not have; only some clients recognise that.
        if isinstance(error, hub.HfHubHTTPError) and error.response.status_code in (401, 404):
            raise LoadingError(
                f"The model hub knows no model {model_id}, or it is private: check the spelling of KVSCOPE_MODEL, "
                "or set HF_TOKEN."
            ) from None
        reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else _one_line(error)
        raise HubUnreachable(
            f"The model hub is out of reach ({reason}), so {model_id} cannot be fetched: connect to a network, "
            "or set KVSCOPE_MODEL to a local model folder."
        ) from error


def _download(model_id: str, revision: str | None, wanted: list[str], info: Any, progress: Progress) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    patterns = wanted if any(_is_top(name, ".safetensors") for name in sizes) else [*wanted, "*.bin"]
    names = list(filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=UNWANTED))
    if not any(_is_top(name, ".safetensors") or _is_top(name, ".bin") for name in names):
        raise LoadingError(
            f"{model_id} has no weights that can be loaded (*.safetensors or *.bin): choose another KVSCOPE_MODEL."
        )
    blobs = Path(constants.HF_HUB_CACHE, f"models--{model_id.replace('/', '--')}", "blobs")
    future = in_background(
        lambda: snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=UNWANTED,
            tqdm_class=_silent_bar(),
        )
    )
    try:
        return Path(watch_growth(future, blobs, "fetching", sum(sizes[name] for name in names), progress))
    except Exception as error:
        raise HubUnreachable(
            f"The download of {model_id} failed ({_one_line(error)}): start again to continue it; if the disk is full "
            "or cannot be written, set HF_HOME to a folder with more space."
        ) from error


def _downloaded_earlier(model_id: str, revision: str | None, wanted: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED, local_files_only=True
        )
    except Exception:
        return None
    return Path(folder) if _is_whole(Path(folder)) else None


def _is_whole(folder: Path) -> bool:
    """Whether nothing that the weights need is missing. Each file is whole, but a download may end between two."""
    for kind in ("safetensors", "bin"):
        shards = next(folder.glob(f"*.{kind}.index.json"), None)
        names = set(read_json(shards).get("weight_map", {}).values()) if shards else set()
        if next(folder.glob(f"*.{kind}"), None):
            return (folder / "config.json").is_file() and all((folder / name).is_file() for name in names)
    return False


def _is_top(name: str, ending: str) -> bool:
    return "/" not in name and name.endswith(ending)


def _silent_bar() -> type:
    """The hub client draws its bars unless given another class; switching them off globally would be rude."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args, **kwargs):
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]
