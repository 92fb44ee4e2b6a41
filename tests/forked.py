"""What the fork server of the tests imports, once for all processes that are forked from it (`preload`).

There is one server, and it is started by whoever needs it first, so all ask for the same.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

# Read by OpenMP when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed

USED = (
    "quintet.engine.engine",
    "quintet.rollout.native.rollout",
    "pytest",
    "tests.oracle.reference",
    "tests.oracle.mistakes",
)
"""What most tests' ranks import, and what is dear: transformers, by the models that the tests compare with."""

if not torch.cuda.is_available():  # the engine asks for GPUs, and CUDA does not survive a fork
    # A failure is told by who imports it next; here it would end the server without a word.
    for module in USED:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would look at all this again in each process, and so copy every page of it
