"""Ranks that train on cells of their own, and mistakes that leave one of them waiting for the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quintet.cluster.progress import turn
from quintet.cluster.worker import Place, Worker
from quintet.packing.plan import RankCell
from tests.oracle.cases import Case
from tests.oracle.data import VOCAB, loss_mask
from tests.oracle.ranks import Objective, engine_of


class Training(Worker):
    """A rank of a case of the oracle."""

    def __init__(self, place: Place, case: Case, path: Path) -> None:
        super().__init__(place)
        self.case, self.path = case, path

    def setup(self) -> None:
        import quintet.engine.engine  # noqa: F401  (takes seconds: before ranks wait for each other)

        super().setup()
        self.engine = engine_of(self.case, self.path)
        self.engine.tell_turns(turn)

    def train(self, cells: list[list[RankCell]], lengths: list[int], skips_dummies: bool = False) -> float:
        """Compute the gradients of the samples of these lengths. cells: of each rank; skips_dummies: its layers with experts let
        rows of padding alone pass by."""
        from quintet.data.batch import make_batch

        generator = torch.Generator().manual_seed(5)
        ids = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
        batch = make_batch(ids, [1] * len(ids), loss_mask=[loss_mask(n) for n in lengths])
        mine = cells[self.rank]
        with experts_for_samples_alone(self.engine, mine) if skips_dummies else nullcontext():
            result = self.engine.forward_backward(batch, mine, Objective("lm", sum(lengths)), 1.0)
        return float(result.loss)


@contextmanager
def experts_for_samples_alone(engine: Any, cells: Sequence[RankCell]) -> Iterator[None]:
    """Where a micro-batch has no samples, its rank takes no part in layers with experts."""
    from quintet.engine.layers.layer import PackedMoELayer

    real, turns = PackedMoELayer.forward, []
    engine.tell_turns(lambda text: (turns.append(text), turn(text)))

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        here = cells[len(turns) - 1]
        return real(self, hidden, *args, **kwargs) if here.samples else (hidden, None)

    with mock.patch.object(PackedMoELayer, "forward", forward):
        yield
