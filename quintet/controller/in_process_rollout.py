"""A native rollout in the process that trains: on the engine's own parameters, or with a copy of them in another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from quintet.engine import build
from quintet.engine.engine import Engine
from quintet.engine.lora import split_adapters
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.offload import Offloader
from quintet.engine.weights.reshard import Resharder
from quintet.engine.weights.shards import shard_map
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.rollout.base import Part, WeightSource
from quintet.rollout.native.rollout import NativeRollout


class InProcessRollout(NativeRollout):
    """One rank of it. Collective to make, over the trainer's ranks, and so is `update_weights`, which needs no source."""

    def __init__(
        self,
        engine: Engine,
        recipe: schema.Recipe,
        decode: Callable[[list[int]], str],
        progress: Callable[[int], None],
    ) -> None:
        self._engine, self._recipe = engine, recipe
        self._copy: Offloader | None = None
        model, mesh, update = engine.model, engine.mesh, lambda: 0
        placement = placement_of(recipe)
        if not placement.shares_weights:
            layout = schema.Layout(tp=placement.layout.tp, pp=placement.layout.pp)
            mesh = build.mesh_of(layout, dist.get_world_size())
            (model,) = build.build_chunks(
                engine.shape, layout, mesh, engine.dtype, recipe.engine.without_fp8, engine.lora
            )
            model.requires_grad_(False)
            self._copy = Offloader([model])
            update = self._transfer(model, mesh)
        super().__init__(
            model,
            mesh,
            slots=recipe.rollout.sequences_per_rank,
            decode=decode,
            update=update,
            progress=progress,
            return_routes=recipe.rollout.return_routes,
        )

    def _transfer(self, model: PolicyModel, mesh: Mesh) -> Callable[[], int]:
        """What brings the engine's weights to the copy's; with adapters, the frozen rest comes once, now."""
        engine, targets = self._engine, shard_map([model], self._engine.shape, mesh)
        sources, dtype, device = engine.shard_map(), engine.dtype, build.device()
        if engine.lora is not None:
            base, sources = split_adapters(sources)
            of_rollout, targets = split_adapters(targets)
            Resharder(base, of_rollout, dtype=dtype, device=device).run()
        bucket_mib = self._recipe.rollout.bucket_mib
        return Resharder(sources, targets, dtype=dtype, device=device, bucket_mib=bucket_mib).run

    def update_weights(self, source: WeightSource | None = None) -> int:
        self._engine.wait_for_parameters()
        return super().update_weights(source)

    @contextmanager
    def _computing(self, *parts: Part) -> Iterator[None]:
        """On the engine's own parameters nobody tells of new ones, and weights are packed before a layer could wait for them."""
        self._engine.wait_for_parameters()
        with super()._computing(*parts):
            yield

    def sleep(self, level: int) -> int:
        """Give up the KV cache, and at levels 1 and 2 the copy; the engine's own parameters stay where they are."""
        left = super().sleep(level)
        if level and self._copy is not None:
            left += self._copy.offload(params=1.0, forget=level == 2)
        return left

    def wake(self, part: Part) -> int:
        """Take memory again. A copy that was forgotten is undefined until the next `update_weights`."""
        came = self._copy.reload() if part == "weights" and self._copy is not None else 0
        return came + super().wake(part)
