"""After an optimizer step each rank gets the parameters that others updated, while the first layers compute already.

With the distributed optimizer a rank updates a slice of each bucket, and all ranks over dp and cp gather the rest. Here the
gathers begin at the end of a step, in the order in which a forward pass comes to the buckets, and a layer waits for its own.
megatron-core's way of it begins a bucket when the one before has come, and waits in each module for the parameters that the
module owns: what another module reads of it, as quintet's heads do of the embedding, would be read too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn


class ParameterGather:
    """What of a rank's parameters is still to come. chunks: in the order of a forward pass; with engine.overlap_param_gather, else none."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._buckets: list[Any] = []
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            buckets = _buckets(chunk, chunk.module.parameters())
            self._buckets += buckets
            for module in _units(chunk.module, set(chunk.module.decoder.layers)):
                _wait_before(module, _buckets(chunk, module.parameters()))
            # The head is no module that is called.
            chunk.module.register_forward_hook(lambda *_, of=buckets: _wait(of))

    def start(self) -> None:
        """Begin to gather; on a CPU, gather: there a process was at times aborted with gathers of gloo's under way. Collective."""
        for one in self._buckets:
            one.start_param_sync(force_sync=not torch.cuda.is_available())

    def finish(self) -> None:
        """Wait until all is there. No collective."""
        _wait(self._buckets)


def _units(module: nn.Module, layers: set[nn.Module]) -> list[nn.Module]:
    """What waits as a whole: each of these layers, and the largest modules that hold none."""
    if module in layers or layers.isdisjoint(module.modules()):
        return [module]
    return [unit for child in module.children() for unit in _units(child, layers)]


def _buckets(chunk: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> list[Any]:
    """The buckets of parameters, in the order of these; what is not trained has none."""
    of = chunk.param_to_bucket_group
    return list(dict.fromkeys(of[p] for p in parameters if p in of))


def _wait_before(module: nn.Module, buckets: list[Any]) -> None:
    if buckets:
        module.register_forward_pre_hook(lambda *_: _wait(buckets))


def _wait(buckets: Iterable[Any]) -> None:
    for one in buckets:
        if one.param_gather_handle is not None:
            one.param_gather_handle.wait()
            one.param_gather_handle = None
