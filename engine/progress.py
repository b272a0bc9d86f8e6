"""Long work whose progress is told while it runs: what a download has really written, in bytes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`, in bytes; `total` 0 means that nobody knows how long it will take."""

Result = TypeVar("Result")


def no_progress(stage: str, done: int, total: int) -> None:
    """For callers who do not want to know."""


def in_background(work: Callable[[], Result]) -> "Future[Result]":
    """Run `work` in a daemon thread: unlike an executor's, it cannot keep the process from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="kvscope-loading").start()
    return future


def watch_growth(future: "Future[Result]", folder: Path, stage: str, total: int, progress: Progress) -> Result:
    """The future's result, reporting meanwhile how many bytes `folder` has gained.

    Neither pip nor every version of the hub client tells its progress, but both write to disk.
    The callback runs in the calling thread.
    """
    before = folder_bytes(folder)
    progress(stage, 0, total)
    while not future.done():
        try:
            future.exception(timeout=0.25)
        except TimeoutError:
            gained = folder_bytes(folder) - before
            progress(stage, min(max(gained, 0), total), total)
    result = future.result()
    progress(stage, total, total)
    return result


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`; 0 where it does not exist."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except OSError:
            # Temporary files come and go while we look.
            continue
    return total
