"""A model's folder: where it came from, and reading what lies in it without a word too many."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files lie, and where they came from."""

    folder: Path
    id: str
    source: str  # "local folder", "model hub" or `embedded.SOURCE`


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def brings_code(folder: Path, file: str) -> bool:
    """Whether a JSON file of the model names Python code that comes with it."""
    return "auto_map" in read_json(folder / file)


def one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def damaged(files: ModelFiles, detail: str) -> str:
    detail = " ".join(detail.split())[:200]
    return f"The files of {files.id} in {files.folder} are damaged or do not fit together ({detail}): fetch them again."


class quiet:
    """Within it transformers logs errors only and draws no bars; afterwards it is as talkative as before."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._before = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc_info: object) -> None:
        from transformers.utils import logging

        verbosity, bars = self._before
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
