"""What 8-bit products cost in perplexity, on any texts.

python tests/bench/perplexity.py [FILE ...]        # else the page's story and the licence
"""

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from engine import EngineConfig, embedded
from engine.loading import load_model
from engine.model_folder import ModelFiles
from engine.packing import pack_linears
from engine.tokenizer import load_tokenizer

TEXTS = [ROOT / "demo/static/two_clocks.txt", ROOT / "LICENSE"]
MOST_TOKENS = 1500


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="*", default=TEXTS)
    texts = parser.parse_args().texts
    folder = embedded.ensure(EngineConfig().cache_folder)
    tokenizer = load_tokenizer(folder)
    losses: dict[str, list[float]] = {}
    for quantize in ("none", "int8"):
        model = load_model(ModelFiles(folder, "embedded", "bench"), EngineConfig(device="cpu"))
        pack_linears(model, quantize)
        for text in texts:
            ids = torch.tensor([tokenizer(text.read_text(encoding="utf-8"))["input_ids"][:MOST_TOKENS]])
            losses.setdefault(text.name, []).append(model(ids, labels=ids).loss.item())
    for name, (exact, rounded) in losses.items():
        print(f"{name:20} {math.exp(exact):8.2f} {math.exp(rounded):8.2f} {math.expm1(rounded - exact):+7.2%}")


if __name__ == "__main__":
    main()
