"""From shape, layout and recipe to megatron-core's objects: model chunks, gradient buffers, optimizer."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from quintet.engine.mesh import Mesh, Sizes, build_mesh
from quintet.engine.model import PolicyModel, transformer_config
from quintet.models import ModelShape
from quintet.recipe.schema import Engine as EngineRecipe
from quintet.recipe.schema import Layout
from quintet.recipe.schema import Optimizer as OptimizerRecipe


def device() -> torch.device:
    """This rank's device."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def mesh_of(layout: Layout, world_size: int) -> Mesh:
    """The mesh of a layout over all ranks; dp is what is left."""
    dp = world_size // (layout.tp * layout.pp * layout.cp)
    etp = layout.tp if layout.etp is None else layout.etp
    return build_mesh(Sizes(tp=layout.tp, cp=layout.cp, dp=dp, pp=layout.pp, ep=layout.ep, etp=etp))


def build_model(
    shape: ModelShape, layout: Layout, mesh: Mesh, dtype: torch.dtype, recipe: EngineRecipe
) -> PolicyModel:
    """This rank's pipeline stage, weights not yet meaningful."""
    config = transformer_config(shape, mesh, sp=layout.sp, dtype=dtype, extra=dict(recipe.megatron))
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(
            0, tp_rank=mesh.at("tp"), ep_rank=0, etp_rank=mesh.at("tp"), force_reset_rng=True
        )
    model = PolicyModel(shape, config, mesh)
    return model.to(device())


def wrap_for_training(model: PolicyModel, mesh: Mesh, recipe: EngineRecipe) -> DistributedDataParallel:
    """Gradient buffers (fp32) and their reduction over dp."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=recipe.distributed_optimizer, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(model.config, settings, model, pg_collection=mesh.groups)


def build_optimizer(
    chunk: DistributedDataParallel,
    mesh: Mesh,
    dtype: torch.dtype,
    recipe: OptimizerRecipe,
    distributed: bool,
) -> MegatronOptimizer:
    """Adam with decoupled weight decay; fp32 master weights when the parameters are bf16."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        clip_grad=recipe.clip_grad_norm or 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False, pg_collection=mesh.groups)
