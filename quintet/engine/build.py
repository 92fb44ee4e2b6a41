"""From shape, layout and recipe to megatron-core's objects: model chunks and gradient buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from quintet.engine import megatron_compat

megatron_compat.install()
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from quintet.engine import fp8
from quintet.engine.config import transformer_config
from quintet.engine.layers.layer import in_halves
from quintet.engine.layers.specs import choose_backend, provider_of
from quintet.engine.lora import attach
from quintet.engine.mesh import Mesh, Sizes, build_mesh, with_own_gathers
from quintet.engine.model import PolicyModel
from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.lora import LoraShape
from quintet.plan import parameters
from quintet.recipe.recompute import recompute_modules
from quintet.recipe.schema import Engine as EngineRecipe
from quintet.recipe.schema import Layout


def device() -> torch.device:
    """Return this rank's device: torch's meta device where it is the default, which is how a model is built for its shapes alone."""
    if torch.get_default_device().type == "meta":
        return torch.get_default_device()
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def mesh_of(layout: Layout, world_size: int) -> Mesh:
    """Return the mesh of a layout over all ranks; dp is what is left."""
    dp = world_size // (layout.tp * layout.pp * layout.cp)
    return build_mesh(
        Sizes(
            tp=layout.tp,
            cp=layout.cp,
            dp=dp,
            pp=layout.pp,
            ep=layout.ep,
            etp=layout.expert_tp,
            dynamic_cp=layout.dynamic_cp,
        )
    )


def warm_groups(mesh: Mesh) -> int:
    """Communicate once in every group of ranks that may share a row, and return the bytes of this rank's device that took.

    NCCL makes a communicator, with buffers of its own, at a group's first use: here all ranks come to that in one order, and
    not in the middle of a backward pass. Collective.
    """
    before = _free_bytes()
    _warm(group for group in mesh.cp_groups.values() if group is not None)
    return max(before - _free_bytes(), 0)


def _warm(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device()), group=group)


def _free_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def build_chunks(
    shape: ModelShape,
    layout: Layout,
    mesh: Mesh,
    dtype: torch.dtype,
    recipe: EngineRecipe,
    lora: LoraShape | None = None,
) -> list[PolicyModel]:
    """Return this rank's chunks of the model: its pipeline stage, or layout.vpp parts of it; weights not yet meaningful.

    lora: adapters to be attached; everything else is frozen then.
    """
    backend = choose_backend(recipe.backend)
    if recipe.fp8 is not None:
        fp8.require(recipe.fp8, backend)
    config = transformer_config(shape, layout, mesh, recipe, dtype=dtype)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(
            0, tp_rank=mesh.at("tp"), ep_rank=0, etp_rank=mesh.at("tp"), force_reset_rng=True
        )
    again = shape.mla is None and "layernorm" in recompute_modules(recipe, shape)
    provider = provider_of(backend, recipe.experts, norms_apart=again)
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = [PolicyModel(shape, config, mesh, provider, stage).to(device()) for stage in stages]
    if recipe.overlap_dispatch and layout.ep > 1:  # native rollouts have it without
        in_halves(chunks)
    if lora is not None:
        for chunk in chunks:
            attach(chunk, lora)
    return chunks


def wrap_for_training(
    chunks: list[PolicyModel], mesh: Mesh, recipe: EngineRecipe
) -> list[DistributedDataParallel]:
    """Return the chunks with gradient buffers (fp32) and their reduction over dp and cp."""
    if choose_backend(recipe.backend) == "transformer_engine":
        from quintet.engine.layers.te import add_gradients_in_place

        add_gradients_in_place(chunks)
    groups = mesh.groups
    if recipe.overlap_param_gather:
        if not recipe.distributed_optimizer:
            raise UserError("engine.overlap_param_gather=true needs engine.distributed_optimizer=true")
        groups = with_own_gathers(mesh)
        _warm((groups.dp_cp, groups.expt_dp))
    made = []
    for chunk in chunks:
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=recipe.distributed_optimizer,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=recipe.overlap_grad_reduce,
            overlap_param_gather=recipe.overlap_param_gather,
            bucket_size=parameters.bucket_elements(mesh.sizes.dp),
        )
        made.append(DistributedDataParallel(chunk.config, settings, chunk, pg_collection=groups))
        megatron_compat.no_first_microbatch(made[-1])
    if recipe.overlap_grad_reduce:  # the schedule holds the reduction back until the last micro-batch
        holds = [one.no_sync for one in made]
        chunks[0].config.no_sync_func = holds if len(holds) > 1 else holds[0]
    return made
