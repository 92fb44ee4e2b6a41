"""A native rollout in processes of its own: a model without an engine around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from quintet.engine import build
from quintet.engine.engine import DTYPES
from quintet.engine.lora import split_adapters
from quintet.engine.weights import hf
from quintet.engine.weights.shards import shard_map
from quintet.models import trained_shape
from quintet.recipe import schema
from quintet.recipe.lora import lora_shape
from quintet.recipe.rollout import placement_of
from quintet.rollout.native.rollout import NativeRollout


def native_rollout(
    recipe: schema.Recipe,
    model_dir: Path,
    *,
    device: str,
    decode: Callable[[list[int]], str],
    progress: Callable[[int], None],
) -> NativeRollout:
    """Return one rank of the rollout, whose ranks are those of the default process group. Collective.

    Its weights come with the first sync. With adapters the frozen rest is read from `model_dir`, and adapters alone come.
    """
    shape = trained_shape(model_dir, mtp=recipe.mtp is not None)
    lora, wanted = lora_shape(recipe, shape), placement_of(recipe).layout
    layout = schema.Layout(tp=wanted.tp, pp=wanted.pp)
    mesh = build.mesh_of(layout, dist.get_world_size())
    dtype = DTYPES[recipe.model.dtype_on(device)]
    (model,) = build.build_chunks(shape, layout, mesh, dtype, recipe.engine.without_fp8, lora)
    model.requires_grad_(False)
    if lora is not None:
        base, _ = split_adapters(shard_map([model], shape, mesh))
        hf.fill_hf(base, hf.check_hf(shape, model_dir))
    return NativeRollout(
        model,
        mesh,
        slots=recipe.rollout.sequences_per_rank,
        decode=decode,
        progress=progress,
        return_routes=recipe.rollout.return_routes,
    )
