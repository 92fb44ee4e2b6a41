"""Imports of packages that mark functions for torch's compiler, on a machine where nothing is compiled."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARKS = ("allow_in_graph", "assume_constant_result", "disable")
_one_at_a_time = threading.RLock()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Skip torch's compiler without a GPU: what is imported within the block may use `torch.compile` and `torch.compiler`'s marks
    as decorators, and they do nothing. TORCHDYNAMO_DISABLE=0 in the environment asks for the compiler, and gets it.

    torch (2.10 to 2.13) imports its compiler with the first such mark: 1,700 modules, a third of what a process of a run
    takes to start on a CPU, where quintet compiles nothing (`quintet.engine.megatron_compat`).
    (tests/test_imports.py: a process of a run starts without what it does not use)
    """
    import torch

    # device_count() asks NVML, where is_available() would leave a CUDA behind that survives no fork.
    if os.environ.get("TORCHDYNAMO_DISABLE") == "0" or torch.cuda.device_count():
        yield
        return
    marks = [(torch, "compile"), *((torch.compiler, name) for name in MARKS)]
    with _one_at_a_time:
        originals = [getattr(module, name) for module, name in marks]
        for module, name in marks:
            setattr(module, name, _unmarked)
        try:
            yield
        finally:
            for (module, name), original in zip(marks, originals, strict=True):
                setattr(module, name, original)


def _unmarked(*function: Any, **options: Any) -> Any:
    """A decorator, with options or without, that gives back what it decorates."""
    found = [*function[:1], *(options[name] for name in ("fn", "model") if name in options)]
    return found[0] if found and found[0] is not None else lambda decorated: decorated
