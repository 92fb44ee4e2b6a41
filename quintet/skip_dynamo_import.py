"""Imports of packages that mark functions for torch's compiler, or ask it about shapes, on a machine where nothing is compiled."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARKS = ("allow_in_graph", "assume_constant_result", "disable")
LATER = ("torch.fx.experimental.symbolic_shapes", "torch.utils.cpp_extension")
"""Modules of torch that are imported once one of their functions is called: the one brings sympy, the other setuptools."""
_one_at_a_time = threading.RLock()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Skip torch's compiler without a GPU: what is imported within the block may use `torch.compile` and `torch.compiler`'s marks
    as decorators, and they do nothing; functions of `LATER` import their module when they are called. TORCHDYNAMO_DISABLE=0 in the
    environment asks for the compiler, and gets it.

    torch (2.10 to 2.13) imports its compiler with the first such mark: 1,700 modules, a third of what a process of a run
    takes to start on a CPU, where quintet compiles nothing (`quintet.engine.megatron_compat`). And its distributed tensors, which
    megatron-core and tensordict name and quintet does not use, import sympy for three functions: 500 modules, a quarter of the rest.
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
        absent = {name: _Later(name) for name in LATER if name not in sys.modules}
        sys.modules.update(absent)
        try:
            yield
        finally:
            for name, stand_in in absent.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]
            for (module, name), original in zip(marks, originals, strict=True):
                setattr(module, name, original)


class _Later(types.ModuleType):
    """Stands in for a module while others take functions from it. What is named like a class can only be an exception to them, and
    none that the module would raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (Exception,), {})

        def function(*args: Any, **options: Any) -> Any:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            return getattr(importlib.import_module(self.__name__), name)(*args, **options)

        return function


def _unmarked(*function: Any, **options: Any) -> Any:
    """A decorator, with options or without, that gives back what it decorates."""
    found = [*function[:1], *(options[name] for name in ("fn", "model") if name in options)]
    return found[0] if found and found[0] is not None else lambda decorated: decorated
