"""What the fork server of the tests imports, once for all processes that are forked from it (`preload`).

There is one server, and it is started by whoever needs it first, so all ask for the same.
"""

from __future__ import annotations

import contextlib
import os

# Read by OpenMP when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed

if not torch.cuda.is_available():  # the engine asks for GPUs, and CUDA does not survive a fork
    # A failure is told by who imports it next; here it would end the server without a word.
    with contextlib.suppress(Exception):
        import quintet.engine.engine  # noqa: F401
