"""Runs the app as a ZeroGPU Space does, with the real `spaces` package, on a CPU build of torch.

    SPACES_ZERO_GPU=true SPACES_ZERO_DEVICE_API_URL=http://127.0.0.1:PORT python tests/on_zerogpu.py

`spaces` wants a torch that was built for CUDA, and replaces CUDA by an emulation until a lease begins.
The few lines below let it believe in the former and keep tensors where they are in the latter.
"""

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

spaces.zero.torch.init = lambda *args, **kwargs: None
spaces.zero.torch.move = lambda *args, **kwargs: None

sys.path.insert(0, str(ROOT))
runpy.run_path(str(ROOT / "app.py"), run_name="__main__")
