"""From the recipe to megatron-core's optimizer, so that every number of the recipe reaches the update.

megatron-core groups parameters by overrides. Two of its conventions would be lost here, because its own learning-rate
scheduler, which quintet does not use, is what applies them: `wd_mult` (no weight decay for norms and biases) and
`lr_mult`. The first is therefore also written as the group's own `weight_decay`, and the engine multiplies the
second into the learning rate at each step (`set_learning_rate`).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from quintet.engine.agree import gathered
from quintet.engine.clip import SET
from quintet.engine.lora import requires_grad
from quintet.engine.mesh import Mesh
from quintet.engine.weights.shards import held_tensors, table
from quintet.errors import UserError
from quintet.recipe import schema
from quintet.recipe.weight_patterns import check_frozen, check_lr_multipliers, is_frozen, lr_factor
from quintet.typed import Typed

MTP = "mtp"
"""The set of gradients of layers for multi-token prediction."""
_NAMES: Typed[list[list[str]]] = Typed(list[list[str]], "the tensors of each parameter")


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    mesh: Mesh,
    dtype: torch.dtype,
    recipe: schema.Optimizer,
    engine: schema.Engine,
    mtp: schema.Mtp | None = None,
) -> MegatronOptimizer:
    """Build the optimizer of all chunks of a rank, on their present weights. Collective.

    adamw decouples weight decay from the gradient (https://arxiv.org/abs/1711.05101), adam adds it to the gradient,
    sgd too, with momentum. Vectors (norms, biases) have no weight decay. bf16 parameters have fp32 master weights. With
    `cpu_fraction`, that share of masters and moments lives on the CPU and is updated there.

    Raises UserError for `cpu_fraction` where there is no GPU, which a recipe for any device does not show, and for lr_multipliers that
    fit no weight. What recipes are refused for (`quintet.recipe.refused`) is not looked at again.
    """
    if recipe.cpu_fraction and not torch.cuda.is_available():
        raise UserError(
            f"{recipe.key}.cpu_fraction={recipe.cpu_fraction:g} moves state from GPUs to the CPU, and there are none; set it to 0"
        )
    config = OptimizerConfig(
        optimizer={"adamw": "adam", "adam": "adam", "sgd": "sgd"}[recipe.name],
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        decoupled_weight_decay=recipe.name != "adam",
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        sgd_momentum=recipe.momentum,
        clip_grad=0.0,  # `quintet.engine.clip` does it
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=engine.distributed_optimizer,
    )
    if recipe.cpu_fraction:
        _keep_on_cpu(config, recipe.cpu_fraction)
    overrides: dict[ParamKey, Any] = {
        ParamKey(predicate=ParamPredicate("vectors", _holds_vectors)): {
            "wd_mult": 0.0,
            "weight_decay": 0.0,
        }
    }
    if mtp is not None:
        ahead = {p for chunk in chunks if hasattr(chunk.module, "mtp") for p in chunk.module.mtp.parameters()}
        overrides[ParamKey(predicate=ParamPredicate(MTP, ahead.__contains__))] = {SET: MTP}
    if recipe.lr_multipliers:
        overrides |= _multipliers(chunks, mesh, recipe)
    optimizer = get_megatron_optimizer(
        config, list(chunks), overrides, use_gloo_process_groups=False, pg_collection=mesh.groups
    )
    if recipe.cpu_fraction:
        # The hybrid optimizer is built twice, first over whole parameters; the first one is a reference cycle.
        gc.collect()
        torch.cuda.empty_cache()
    elif torch.cuda.is_available():
        _one_kernel(optimizer)
    return optimizer


def freeze(chunks: Sequence[Any], mesh: Mesh, recipe: schema.Optimizer) -> None:
    """Keep what `frozen` names from being trained, before the chunks get gradient buffers. Collective.

    Raises UserError on every rank for a pattern that matches no weight, or part of a parameter, and where a rank would train nothing.
    """
    if not recipe.frozen:
        return
    names = _hugging_face_names(chunks, mesh)
    everywhere = gathered(_NAMES, list(names.values()))
    check_frozen((tensor for rank in everywhere for tensor in rank), recipe.frozen, recipe.key)
    for number, tensors in enumerate(everywhere):
        if all(is_frozen(one[0], recipe.frozen) for one in tensors):
            raise UserError(
                f"{recipe.key}.frozen leaves rank {number} of this layout no weight to be trained; freeze fewer, or use fewer "
                "pipeline stages (layout.pp)"
            )
    for parameter, tensor in names.items():
        if is_frozen(tensor[0], recipe.frozen):
            parameter.requires_grad_(False)
    for chunk in chunks:
        if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(requires_grad)


def gradient_sets(recipe: schema.Optimizer, mtp: schema.Mtp | None) -> dict[str, float | None]:
    """Return the sets of parameters whose gradients are clipped by themselves, and the norm that each is clipped to; "" is the
    policy, or whatever the engine trains."""
    return {"": recipe.clip_grad_norm} | ({MTP: mtp.clip_grad_norm} if mtp is not None and mtp.train else {})


def _holds_vectors(parameter: torch.nn.Parameter) -> bool:
    """Whether it is one vector, or one an expert."""
    return parameter.dim() == 1 or getattr(parameter, "holds_vectors", False)


def _one_kernel(optimizer: MegatronOptimizer) -> None:
    """Where core found no TransformerEngine it takes torch's Adam, as a dozen passes over its state; one is enough."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"], group["foreach"] = True, False


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Give each parameter group the schedule's rate times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]


def _keep_on_cpu(config: OptimizerConfig, fraction: float) -> None:
    """Ask for megatron-core's HybridDeviceOptimizer, with the master weights where the moments are."""
    config.optimizer_cpu_offload = True
    config.optimizer_offload_fraction = fraction
    config.overlap_cpu_optimizer_d2h_h2d = True
    # "Precision aware" leaves master weights to the inner optimizer. Without it the fp32 copy of every parameter
    # stays on the GPU, whatever the fraction. It is set here and not in the constructor, whose check of
    # TransformerEngine's version fails where there is none, although the hybrid optimizer does not need it.
    config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = False


def _multipliers(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, recipe: schema.Optimizer
) -> dict[ParamKey, dict[str, float]]:
    """Overrides for the parameters that have a factor. Collective: a pattern may fit another rank's weights only."""
    names = _hugging_face_names([chunk.module for chunk in chunks], mesh)
    everywhere = gathered(_NAMES, list(names.values()))
    multipliers, key = recipe.lr_multipliers, recipe.key
    check_lr_multipliers((tensor for rank in everywhere for tensor in rank), multipliers, key)
    by_factor: dict[float, set[torch.nn.Parameter]] = {}
    for parameter, tensor in names.items():
        by_factor.setdefault(lr_factor(tensor, multipliers, key), set()).add(parameter)
    return {
        ParamKey(predicate=ParamPredicate(f"factor {factor}", parameters.__contains__)): {"lr_mult": factor}
        for factor, parameters in by_factor.items()
        if factor != 1.0
    }


def _hugging_face_names(modules: Sequence[Any], mesh: Mesh) -> dict[torch.nn.Parameter, list[str]]:
    """The Hugging Face tensors that each parameter in training on this rank is made of."""
    weights = table(modules, modules[0].shape)
    found: dict[Any, list[str]] = {}
    for module in modules:
        for name, parameter, _ in held_tensors(module, mesh):
            if parameter.requires_grad:
                found.setdefault(parameter, []).extend(weights[name].hf)
    return found
