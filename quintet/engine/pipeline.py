"""Micro-batches through one rank's part of the model: its chunks of the pipeline, by megatron-core's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from quintet.data.batch import Batch, offsets
from quintet.engine import build, fp8
from quintet.engine.ahead import AheadLoss, AheadOutputs, heads_keeping_logits, scores_ahead
from quintet.engine.balance import Load
from quintet.engine.device import upload
from quintet.engine.gradients import finalize
from quintet.engine.layers.context_parallel import gather_places
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel, States
from quintet.engine.outputs import Outputs, ValueOutputs
from quintet.engine.routes import Routers, Routes
from quintet.engine.row import MicroBatch, PackedRow, pack
from quintet.models import ModelShape
from quintet.packing.align import FP8_TOKENS, alignment_of
from quintet.packing.plan import RankCell
from quintet.recipe import schema
from quintet.recipe.derived import moe_layers_of

Use = Callable[[list[Any], MicroBatch], tuple[Tensor, dict[str, Any]]]
"""(outputs of each target set, the micro-batch they are of) → (what backward starts from, what the schedule keeps of it)."""


class Pipeline:
    """The computation of one rank of each micro-batch. chunks: its parts of the model; wrapped: the same, as they are trained."""

    def __init__(
        self,
        shape: ModelShape,
        chunks: list[PolicyModel],
        wrapped: list[Any],
        mesh: Mesh,
        layout: schema.Layout,
        recipe: schema.Engine,
    ) -> None:
        self._chunks, self._wrapped = chunks, wrapped
        self._mesh, self._layout, self._recipe = mesh, layout, recipe
        config = chunks[0].config
        self._p2p = P2PCommunicator(mesh.groups.pp, config) if mesh.sizes.pp > 1 else None
        config.finalize_model_grads_func = finalize
        sizes, sliced = mesh.sizes, config.sequence_parallel
        layers = moe_layers_of(layout, shape, mesh.at("pp"))
        where = (sizes.tp, mesh.at("tp")) if sliced else (1, 0)
        self._routers = Routers(layers, *where, build.device(), mesh.groups.tp if sliced else None)
        self.turn: Callable[[str], None] = lambda text: None
        """Told which micro-batch this rank comes to, and with whom it shares it; "" at the end."""
        self.output_type = ValueOutputs if shape.head == "value" else Outputs
        """What `use` is handed of the model's own head."""

    def run(
        self,
        batch: Batch,
        cells: Sequence[RankCell],
        use: Use | None,
        temperature: float,
        *,
        forward_only: bool,
        ahead: Sequence[AheadLoss] = (),
        routes: Routes | None = None,
        load: Load | None = None,
    ) -> None:
        """Run all micro-batches, forward and, unless `forward_only`, backward; the last stage's ranks use what comes out, or
        nothing does.
        cells: this rank's, samples as positions in `batch`; every rank has as many. ahead: what layers for multi-token
        prediction are trained by, which are left out without it. routes: what the decoder's routers are told, or who listens to
        them. load: counts what they choose. Collective."""
        for chunk in self._chunks:
            chunk.train(not forward_only)
        pp, chunks = self._mesh.sizes.pp, len(self._chunks)
        if chunks > 1:  # interleaving wants a multiple of pp; what is missing is padding alone
            cells = [*cells, *([RankCell([])] * (-len(cells) % pp))]
        schedule = get_forward_backward_func(pp_size=pp, vp_size=chunks if chunks > 1 else None)
        rows = self.rows(batch, cells, len(ahead), routes, load)
        try:
            schedule(
                forward_step_func=partial(self._forward_step, use=use, temperature=temperature, ahead=ahead),
                # Each chunk goes through all micro-batches; what one is ahead of another is kept for it.
                data_iterator=list(tee(rows, chunks)) if chunks > 1 else rows,
                model=self._wrapped,
                num_microbatches=len(cells),
                seq_length=self._recipe.tokens_per_microbatch_per_rank,
                micro_batch_size=1,
                forward_only=forward_only,
                pg_collection=self._mesh.groups,
                **({"p2p_communicator": self._p2p} if self._p2p else {}),
            )
        finally:
            fp8.drop_copies(self._chunks)
        self.turn("")
        if routes is not None:
            routes.finish(self._routers)

    def rows(
        self,
        batch: Batch,
        cells: Sequence[RankCell],
        depths: int = 0,
        routes: Routes | None = None,
        load: Load | None = None,
    ) -> Iterator[tuple[MicroBatch, PackedRow]]:
        """Yield this rank's part of each micro-batch, packed when its turn comes. depths: of multi-token prediction, each with a
        target set after the model's own."""
        values = batch["input_ids"].values()
        trained = batch["loss_mask"].values() > 0
        ends = offsets(batch)
        for number, (samples, cp, place) in enumerate(cells, 1):
            self.turn(f"micro-batch {number} of {len(cells)}{self._beside(cp)}")
            align, distances = alignment_of(self._layout, cp, self._recipe), range(1, 2 + depths)
            micro = pack(values, ends, trained, samples, align, cp, place, distances)
            self._check(micro, samples)
            row = self._chunks[0].row(micro, self._recipe.cp_comm)
            row.routes = None if routes is None else routes.next(micro, self._routers)
            row.load = None if load is None else load.next(micro, self._routers, row.cp_group)
            yield micro, row

    def _check(self, micro: MicroBatch, samples: Sequence[int]) -> None:
        """Raise RuntimeError for a row that was planned by another alignment than it is packed by, or that FP8's kernels would not
        take as it is. A sample that is longer than the budget has a row of its own."""
        recipe, budget = self._recipe.fp8, self._recipe.tokens_per_microbatch_per_rank
        if len(samples) > 1 and micro.tokens > budget:
            raise RuntimeError(
                f"a row of {len(samples)} samples has {micro.tokens} tokens on a rank, more than "
                f"engine.tokens_per_microbatch_per_rank={budget}: it was planned for another budget, or by another alignment "
                f"than that of engine.fp8={recipe or 'null'}"
            )
        tokens = micro.tokens // (self._layout.tp if self._layout.sp else 1)
        if recipe is not None and tokens % FP8_TOKENS[recipe]:
            raise RuntimeError(
                f"a rank's {tokens} tokens of a row are no multiple of {FP8_TOKENS[recipe]}, which engine.fp8={recipe} needs: it was packed by "
                "another alignment"
            )

    def _beside(self, cp: int) -> str:
        group = self._mesh.cp_groups[cp]
        return "" if group is None else f", shared by the ranks {dist.get_process_group_ranks(group)}"

    def _forward_step(
        self,
        rows: Iterator[tuple[MicroBatch, PackedRow]],
        chunk: Any,
        *,
        use: Use | None,
        temperature: float,
        ahead: Sequence[AheadLoss],
    ) -> tuple[Tensor | States, Callable[[Any], Any]]:
        micro, row = next(rows)
        out = chunk(upload(micro.input_ids, build.device()), row, bool(ahead))

        def loss(out: Tensor | States) -> tuple[Tensor, Tensor, dict[str, Any]]:
            value, extra = torch.zeros((), device=build.device()), dict[str, Any]()
            if use is not None:
                value, extra = use(self._outputs(out, micro, row, temperature, ahead), micro)
            return value, torch.zeros((), dtype=torch.int, device=value.device), extra

        return out, loss

    def _outputs(
        self,
        out: Tensor | States,
        micro: MicroBatch,
        row: PackedRow,
        temperature: float,
        ahead: Sequence[AheadLoss],
    ) -> list[Any]:
        """What each head says of its target set: `output_type`, and `AheadOutputs` of each depth. All heads' meet over cp at once."""
        model = self._chunks[-1]
        hidden = out.normed if isinstance(out, States) else out
        found = [torch.stack(model.score(hidden, micro.targets[0], temperature, heads_keeping_logits(ahead)))]
        if isinstance(out, States):
            found += [torch.stack(one) for one in scores_ahead(model, out, micro, row, ahead)]
        if micro.cp > 1:
            counts = [len(one.token_index) for one in micro.targets]
            place = torch.cat([one.place + sum(counts[:k]) for k, one in enumerate(micro.targets)])
            place = upload(place, hidden.device)
            found = [*gather_places(torch.cat(found, -1), place, sum(counts), row.cp_group).split(counts, -1)]
        kinds = [self.output_type, *(AheadOutputs for _ in ahead)]
        return [kind(*one) for kind, one in zip(kinds, found, strict=True)]
