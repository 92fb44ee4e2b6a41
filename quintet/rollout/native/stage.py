"""One rank's part of the model in generation: rows go through it from stage to stage, and results back to all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.head import VocabSlice, log_probs_and_entropy
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.row import PackedRow, pack
from quintet.packing.align import alignment_of
from quintet.recipe import schema


class Stage:
    """The model of one rank, and those it shares rows with (tp, pp)."""

    def __init__(self, model: PolicyModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        layout = schema.Layout(tp=mesh.sizes.tp, sp=model.config.sequence_parallel)
        self.align = alignment_of(layout, cp=1, engine=None)  # without FP8, whatever the trainer has

    def forward(self, input_ids: Tensor, row: PackedRow) -> Tensor | None:
        """Return the hidden states [T, hidden] on the last stage, passed from stage to stage; None before it."""
        pp, group = self.mesh.at("pp"), self.mesh.groups.pp
        if not self.mesh.first_stage:
            tokens = input_ids.shape[1] // (self.mesh.sizes.tp if self.model.config.sequence_parallel else 1)
            hidden = torch.empty(
                (tokens, 1, self.model.shape.hidden_size),
                dtype=self.model.config.params_dtype,
                device=self.model.device,
            )
            dist.recv(hidden, src=dist.get_global_rank(group, pp - 1), group=group)
            self.model.set_input_tensor(hidden)
        out = self.model(input_ids, row)
        if self.mesh.last_stage:
            return self.model.for_head(out)
        dist.send(out.contiguous(), dst=dist.get_global_rank(group, pp + 1), group=group)
        return None

    def share(self, picked: Tensor) -> Tensor:
        """Return what the owner of the output drew, on every rank of its dp rank."""
        group = self.mesh.groups.mp
        if group.size() > 1:
            owner = dist.get_global_rank(group, group.size() - self.mesh.sizes.tp)
            dist.broadcast(picked, src=owner, group=group)
        return picked

    def agreed(self, state: int) -> int:
        """Return what the owner of the output says, on every rank of its dp rank."""
        return int(self.share(torch.tensor([state], device=self.model.device)).item())

    def score(self, sequences: Sequence[list[int]], tokens_per_row: int) -> list[list[float]]:
        """Return the log-probs of every token but the first of each sequence; all ranks get them.

        tokens_per_row: most tokens that are computed together; a longer sequence has a row of its own.
        """
        values = torch.tensor([token for one in sequences for token in one])
        ends = torch.tensor([0, *(len(one) for one in sequences)]).cumsum(0)
        trained = torch.ones(len(values), dtype=torch.bool)
        flat = torch.zeros(len(values), dtype=torch.float64, device=self.model.device)
        for samples in _rows([len(one) for one in sequences], tokens_per_row):
            micro = pack(values, ends, trained, samples, self.align)
            hidden = self.forward(upload(micro.input_ids, flat.device), self.model.row(micro))
            if hidden is None:
                continue
            weight = self.model.head_weight()
            vocab = VocabSlice(len(weight), self.model.shape.vocab_size, self.mesh.groups.tp)
            (targets,) = micro.targets
            at, ids = upload(targets.predictors, flat.device), upload(targets.ids, flat.device)
            found = log_probs_and_entropy(hidden.index_select(0, at), weight, ids, vocab)
            flat[upload(targets.token_index, flat.device)] = found.logprobs.double()
        told = self.share(flat).tolist()
        return [told[start + 1 : stop] for start, stop in itertools.pairwise(ends.tolist())]


def _rows(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Which sequences are computed together, in order."""
    row: list[int] = []
    room = most
    for i, length in enumerate(lengths):
        if row and length > room:
            yield row
            row, room = [], most
        row.append(i)
        room -= length
    if row:
        yield row
