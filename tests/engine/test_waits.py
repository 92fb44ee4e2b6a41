"""How often the host waits for the device while it trains: never within a micro-batch of a dense model, so that it can run ahead.

On a CPU nothing is waited for, and what would be is found all the same: values are followed from the parameters and from what is uploaded,
and whoever makes a number or a shape of one waits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from benchmarks.engine_work import MODELS
from quintet.data.batch import make_batch
from quintet.packing.plan import RankCell
from quintet.recipe import schema

SHAPED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "bincount", "repeat_interleave"}
READ = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
LENGTHS = [20, 17, 25, 9]


class _Values(TorchDispatchMode):
    """Follows values that are on the device, and counts what takes one to the host or makes a shape of it."""

    def __init__(self) -> None:
        super().__init__()
        self.on_device = WeakTensorKeyDictionary()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        out = func(*args, **(kwargs or {}))
        if any(one in self.on_device for one in given):
            for one in tree_leaves(out):
                if isinstance(one, Tensor):
                    self.on_device[one] = True
            name = func.name().removeprefix("aten::").partition(".")[0]
            masks = [one for one in given[1:] if one.dtype == torch.bool and one in self.on_device]
            if name in SHAPED_BY_VALUES or (name in ("index", "index_put", "index_put_") and masks):
                self.waits[name] += 1
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, values: _Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READ and isinstance(args[0], Tensor) and args[0] in self.values.on_device:
            self.values.waits[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def waits_of(engine: Any) -> Iterator[Counter[str]]:
    """What the host waits for within the context, by what it is."""
    from quintet.engine import device

    values, real = _Values(), device.upload

    def upload(tensor: Tensor, to: Any) -> Tensor:
        made = real(tensor, to).clone()
        values.on_device[made] = True
        return made

    for chunk in engine._wrapped:
        for one in chunk.module.parameters():
            values.on_device[one] = values.on_device[one.main_grad] = True
    users = [
        m for n, m in sys.modules.items() if n.startswith("quintet.") and getattr(m, "upload", None) is real
    ]
    patches = [mock.patch.object(module, "upload", upload) for module in users]
    for one in patches:
        one.start()
    try:
        with _Reads(values), values:
            yield values.waits
    finally:
        for one in patches:
            one.stop()


def waits(microbatches: int, shape: str, looks: str = "") -> Counter[str]:
    """Of one mini-batch of so many micro-batches. looks: "forward" or "backward", where the loss looks at a value, planted."""
    from quintet.engine.engine import Engine

    engine = Engine(
        MODELS[shape].shape,
        schema.Layout(),
        engine=schema.Engine(tokens_per_microbatch_per_rank=128),
        optimizer=schema.Optimizer(lr=1e-3),
        dtype="fp32",
    )
    engine.start_optimizer(schema.Optimizer(lr=1e-3), 1)

    def loss(outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mean = -outputs.logprobs.mean() - 0.01 * outputs.entropy.mean()
        if looks == "forward" and mean > 1e9:
            raise AssertionError
        if looks == "backward":
            outputs.logprobs.register_hook(lambda gradient: gradient * float(gradient.sum() < 1e9))
        return mean, {"loss/entropy": outputs.entropy}

    ids = [torch.arange(n) % 11 for n in LENGTHS]
    batch = make_batch(ids, [1] * len(ids))
    order = list(range(len(ids)))
    per = len(ids) // microbatches
    cells = [RankCell(order[at : at + per], 1, 0) for at in order[::per]]
    with waits_of(engine) as found:
        engine.forward_backward(batch, cells, loss)
        engine.optimizer_step()
    return found


def test_a_micro_batch_waits_for_nothing(pool) -> None:
    one, four = (pool.run(waits, 1, n, "tiny")[0] for n in (1, 4))
    assert one == four
    assert one.total() > 0  # the metrics of a mini-batch, at its end


@pytest.mark.parametrize(("shape", "looks"), [("tiny", "forward"), ("tiny", "backward"), ("tiny-moe", "")])
def test_what_waits_in_each_micro_batch_is_seen(pool, shape: str, looks: str) -> None:
    """A planted look at the loss; and experts, whose tokens have to be counted."""
    one, four = (pool.run(waits, 1, n, shape, looks)[0] for n in (1, 4))
    assert four.total() >= one.total() + 3
