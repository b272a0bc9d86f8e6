"""The question that this project answers, asked again: why is a loop by hand so much slower than `generate()`?

It was asked in a forum with two times for ten tokens. Two causes lie in them that one run cannot tell apart: the loop
keeps no cache, and whoever goes first pays for the first calls of a process. So both orders are run, each in a fresh
process with a stock model, and in each process twice: cold, then warm. `python -m engine.forum ORDER` is one of them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.config import EngineConfig

PROMPT = "The lighthouse stood at the edge of the world, and each evening the keeper"
NEW_TOKENS = 10
IN_THE_FORUM_S = {"by_hand": 6.08, "generate": 1.37}
ORDERS = (("by_hand", "generate"), ("generate", "by_hand"))
LONGEST_S = 600.0


class ExperimentFailed(Exception):
    """A sentence on why there is no result."""


def repeat(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """One row a process and pass, as it comes: its `order`, whether it was `warm`, and the seconds of both loops."""
    for order in ORDERS:
        yield from _in_fresh_process(config, order)


def _in_fresh_process(config: EngineConfig, order: tuple[str, ...]) -> list[dict[str, Any]]:
    package_parent = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "engine.forum", *order],
            input=config.model_dump_json(),
            env={**os.environ, "PYTHONPATH": search_path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=LONGEST_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise ExperimentFailed("The experiment's process failed; the server's log says why.") from error
    return [{"order": list(order), **json.loads(line)} for line in done.stdout.splitlines()]


def main(order: list[str]) -> None:
    """Load the model as the settings on stdin say, and run the loops; one line of JSON for each pass."""
    import torch
    from transformers import AutoTokenizer

    from engine.loading import load_model, resolve

    config = EngineConfig.model_validate_json(sys.stdin.read())
    if config.threads:
        torch.set_num_threads(config.threads)
    files = resolve(config)
    model: Any = load_model(files, config)
    ids = AutoTokenizer.from_pretrained(files.folder)(PROMPT, return_tensors="pt")["input_ids"].to(model.device)

    def by_hand() -> None:
        text = ids
        for _ in range(NEW_TOKENS):
            best = model(text, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
            text = torch.cat([text, best], dim=1)

    def generate() -> None:
        lengths = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    def seconds(loop: Callable[[], None]) -> float:
        _synchronize(torch, ids.device)
        began = time.perf_counter()
        loop()
        _synchronize(torch, ids.device)
        return time.perf_counter() - began

    loops = {"by_hand": by_hand, "generate": generate}
    with torch.no_grad():
        for warm in (False, True):
            print(json.dumps({"warm": warm, "seconds": {name: seconds(loops[name]) for name in order}}), flush=True)


def _synchronize(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
