"""The reference policy of a model with adapters: the same weights under the adapters of an earlier moment.

There is no second copy of the model. Where that moment's adapters did nothing (B is zero), they are switched off; otherwise
they are kept, which is small, and take the present ones' place while the reference policy is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quintet.data.batch import Batch
from quintet.engine import build, lora
from quintet.engine.engine import Engine
from quintet.engine.routes import Routes
from quintet.engine.weights import peft
from quintet.engine.weights.shards import Shard
from quintet.packing.plan import RankCell


class AdapterReference:
    """The reference policy of a model with adapters: what a frozen Engine is to one without, as far as it
    is needed."""

    def __init__(self, engine: Engine) -> None:
        assert engine.lora is not None
        self.engine, self.lora = engine, engine.lora
        self._kept: list[Shard] | None = None

    def copy_weights_from(self, engine: Engine) -> None:
        """Become what the policy is now. Collective."""
        present = self._present()
        learned = torch.zeros((), device=build.device())  # a stage may hold no layer with adapters
        for shard in present:
            if ".lora_B." in shard.name and shard.view.numel():
                learned = torch.maximum(learned, shard.view.abs().max().float())
        dist.all_reduce(learned, op=dist.ReduceOp.MAX)  # all ranks compute with adapters, or none
        self._kept = [replace(one, view=one.view.clone()) for one in present] if learned > 0 else None

    def forward(
        self,
        batch: Batch,
        cells: Sequence[RankCell],
        temperature: float = 1.0,
        routes: Routes | None = None,
    ) -> Any:
        """Return the outputs of the reference policy, as `Engine.forward`."""
        in_place = self.engine.without_adapters() if self._kept is None else self._swapped(self._kept)
        with in_place:
            return self.engine.forward(batch, cells, temperature, routes)

    def save(self, path: Path, *, wait: bool = True, aside: bool = True) -> None:
        """Write the adapters, as a directory of peft's; done on return. Collective."""
        nothing = [replace(one, view=torch.zeros_like(one.view)) for one in self._present()]
        with self._swapped(self._kept or nothing):
            self.engine.save_adapters(path, base=None)

    def save_finished(self, wait: bool) -> bool:
        """Return True: nothing is written in the background."""
        return True

    def load(self, path: Path) -> None:
        """Take up what `save` wrote. Collective."""
        kept = [replace(one, view=torch.empty_like(one.view)) for one in self._present()]
        peft.load_adapters(kept, self.engine.shape, self.lora, path)
        self._kept = kept

    def offload(self, *, params: float = 0.0) -> None:
        """Do nothing: a reference of adapters has no memory of its own worth moving."""

    def reload(self) -> None:
        """Do nothing: a reference of adapters has no memory of its own worth moving."""

    def _present(self) -> list[Shard]:
        return lora.split_adapters(self.engine.shard_map())[1]

    @contextmanager
    def _swapped(self, kept: list[Shard]) -> Iterator[None]:
        """Other adapters in the engine's, which come back bit by bit."""
        present = self._present()
        away = [one.view.clone() for one in present]
        try:
            for one, other in zip(present, kept, strict=True):
                one.write(other.view)
            yield
        finally:
            for one, value in zip(present, away, strict=True):
                one.write(value)
