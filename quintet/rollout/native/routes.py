"""Which experts the tokens of each sample were sent to, put together from all ranks that share its requests.

A stage knows the routes of its own layers, a rank under sequence parallelism those of its own tokens. Each rank writes what
it alone knows into zeros, so that the sum over ranks is the whole; it is taken once, when all samples of a group are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.routes import RowRoutes
from quintet.rollout.base import Sample
from quintet.rollout.native.scheduler import SequenceState

REDUCED_BYTES = 1 << 26
"""Summed over ranks at a time."""


class Routes:
    """The routes of one `generate`. Layers are those with experts, in their order: DeepSeek's first ones, which are dense,
    are not counted."""

    def __init__(self, model: PolicyModel, mesh: Mesh) -> None:
        moe = model.shape.moe
        assert moe is not None
        self._mesh, self._device = mesh, model.device
        self._layers = model.shape.moe_layers
        self._row = RowRoutes(self._layers)
        self._top_k = moe.top_k
        self._sliced = model.config.sequence_parallel and mesh.sizes.tp > 1
        self._of: dict[int, list[np.ndarray]] = {}  # by sequence: pieces [tokens, layers, top-k]

    def of_row(self) -> RowRoutes:
        """Return what hears the routers of this rank in the next row."""
        self._row = RowRoutes(self._layers, keep=True)
        return self._row

    def keep(self, rows: Sequence[tuple[SequenceState, int, int]], total: int) -> None:
        """Keep what was heard for the sequences that it belongs to: to each the row tokens start:stop. total: of the row, padding
        included."""
        mesh, heard = self._mesh, self._row.heard
        pieces = np.zeros((total, len(self._layers), self._top_k), dtype=np.int16)
        if heard and (self._sliced or mesh.at("tp") == 0):  # without slices tp ranks hear the same
            layers = [self._layers.index(layer) for layer in heard]
            mine = torch.stack(list(heard.values()), dim=1).cpu().numpy()
            first = mesh.at("tp") * len(mine) if self._sliced else 0
            pieces[first : first + len(mine), layers] = mine
        for sequence, start, stop in rows:
            self._of.setdefault(id(sequence), []).append(pieces[start:stop])

    def tell(self, sequences: Sequence[SequenceState], samples: Sequence[Sample]) -> None:
        """Give each sample its sequence's: int16 [tokens that were read, layers, top-k]. Collective over the ranks that share
        the requests."""
        nothing = np.zeros((0, len(self._layers), self._top_k), dtype=np.int16)
        group = self._mesh.groups.mp
        for sequence, sample in zip(sequences, samples, strict=True):
            sample.routes = np.concatenate([nothing, *self._of.pop(id(sequence), ())])
            if group.size() > 1:
                self._sum(sample.routes, group)

    def _sum(self, routes: np.ndarray, group: dist.ProcessGroup) -> None:
        """In place, as bytes: of each all ranks but one have 0."""
        flat = routes.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), REDUCED_BYTES):
            piece = torch.from_numpy(flat[start : start + REDUCED_BYTES])
            there = piece.to(self._device)
            dist.all_reduce(there, group=group)
            piece.copy_(there)
