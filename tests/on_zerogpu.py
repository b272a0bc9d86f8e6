"""Runs the app as a ZeroGPU Space does, with the real `spaces` package, on a CPU build of torch.

    SPACES_ZERO_GPU=true SPACES_ZERO_DEVICE_API_URL=http://127.0.0.1:PORT python tests/on_zerogpu.py

`spaces` wants a torch that was built for CUDA, and replaces CUDA by an emulation until a lease begins. The lines below
let it believe in the former. With `KVSCOPE_DEVICE=cuda` the weights take their whole way, onto the emulated device,
into the file that `spaces` packs, and from there into each forked process, where they end on the CPU.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

torch.version.cuda = "12.8"
torch._C._cuda_init = lambda: None
torch.cuda._is_in_bad_fork = bool

import spaces  # noqa: E402  (after the lines above, before anything of the app)
import spaces.zero  # noqa: E402
from spaces.zero.torch import patching  # noqa: E402


def unpack(callback=None) -> None:
    """`spaces.zero.torch.move` without a GPU: the packed weights, read into ordinary memory."""
    for pack in patching.tensor_packs:
        every = [entry for batch in pack.batches for entry in batch] + pack.big_tensors
        with open(pack.path(), "rb") as file:
            for tensor, size, aligned_size in every:
                stored = torch.frombuffer(bytearray(file.read(aligned_size)), dtype=torch.uint8)[:size]
                on_cpu = torch.empty(0, dtype=tensor.dtype)
                on_cpu.set_(stored.untyped_storage(), 0, tensor.shape, tensor.stride())
                for fake in pack.fakes[tensor]:
                    fake.data = on_cpu


spaces.zero.torch.init = lambda *args, **kwargs: None
spaces.zero.torch.move = unpack

# So that runs beside each other do not pack into one folder.
assert "ZEROGPU_OFFLOAD_DIR" in os.environ or os.environ.get("KVSCOPE_DEVICE") != "cuda"

sys.path.insert(0, str(ROOT))
runpy.run_path(str(ROOT / "app.py"), run_name="__main__")
