"""What a recipe can switch on: each is on or off by the recipe and the model's shape alone.

Which of them cannot be combined is told in `quintet.recipe.refused`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quintet.models import ModelShape
from quintet.recipe.derived import data_parallel, optimizers
from quintet.recipe.rollout import placement_of
from quintet.recipe.schema import Optimizer, Recipe

IsOn = Callable[[Recipe, ModelShape | None], bool]


@dataclass(frozen=True)
class Feature:
    """One thing a recipe can switch on: its name in messages, the keys that do it, and how to tell.

    choice: features of the same choice are values of one key and never on together.
    needs: what must be on with it. engine: of the training engine, rather than of the rollout or the loop.
    """

    id: str
    name: str
    keys: tuple[str, ...]
    is_on: IsOn
    choice: str = ""
    needs: tuple[str, ...] = ()
    engine: bool = True

    @property
    def key(self) -> str:
        return self.keys[0]


def _has_experts(shape: ModelShape | None) -> bool:
    return shape is not None and shape.moe is not None


def of_optimizers(
    id: str, name: str, key: str, is_on: Callable[[Optimizer], bool], choice: str = ""
) -> Feature:
    """Return a feature that is on where `is_on` is true of any of the recipe's optimizers. key: within their sections."""
    keys = (f"optimizer.{key}", f"sft.optimizer.{key}", f"critic.optimizer.{key}")
    return Feature(id, name, keys, lambda r, s: any(is_on(one) for one in optimizers(r).values()), choice)


def _of_experts(
    id: str,
    name: str,
    keys: tuple[str, ...],
    is_on: Callable[[Recipe], bool],
    choice: str = "",
    needs: tuple[str, ...] = (),
) -> Feature:
    """On where the recipe has it so, of a model with experts. needs: what else must be on with it."""
    return Feature(
        id, name, keys, lambda r, s: _has_experts(s) and is_on(r), choice, needs=("experts", *needs)
    )


def _aux_loss(per: str) -> Feature:
    def is_on(recipe: Recipe) -> bool:
        return recipe.engine.aux_loss is not None and recipe.engine.aux_loss.per == per

    key = "engine.aux_loss"
    return _of_experts(f"aux_{per}", f"a loss of experts' load per {per}", (key,), is_on, choice=key)


def _context_parallel(comm: str) -> Feature:
    def is_on(recipe: Recipe, shape: ModelShape | None) -> bool:
        return recipe.layout.cp > 1 and recipe.engine.cp_comm == comm

    name, key = f"context parallelism by {comm.replace('_', '-')}", "engine.cp_comm"
    return Feature(f"cp_{comm}", name, ("layout.cp", key), is_on, choice=key)


def _set_to(value: Any, id: str, name: str, key: str, choice: str = "") -> Feature:
    """On where the recipe's key has this value."""
    value_of = operator.attrgetter(key)
    return Feature(id, name, (key,), lambda recipe, shape: value_of(recipe) == value, choice)


def _above_zero(id: str, name: str, key: str) -> Feature:
    """On where the recipe's key is; auto comes to what goes with the rest."""
    value_of = operator.attrgetter(key)
    return Feature(id, name, (key,), lambda recipe, shape: value_of(recipe) not in (0, "auto"))


def _one_of(key: str, **features: tuple[str, Any]) -> list[Feature]:
    """The values of one key, each by its id: its name, and the value."""
    return [_set_to(value, id, name, key, choice=key) for id, (name, value) in features.items()]


_ENGINE = [
    Feature("dp", "data parallelism", ("cluster.ranks",), lambda r, s: data_parallel(r) > 1),
    Feature("tp", "tensor parallelism", ("layout.tp",), lambda r, s: r.layout.tp > 1),
    Feature("sp", "sequence parallelism", ("layout.sp",), lambda r, s: r.layout.sp, needs=("tp",)),
    Feature("pp", "pipeline parallelism", ("layout.pp",), lambda r, s: r.layout.pp > 1),
    Feature(
        "vpp",
        "the interleaved pipeline",
        ("layout.vpp",),
        lambda r, s: r.layout.vpp > 1 and r.layout.pp > 1,
        needs=("pp",),
    ),
    Feature(
        "stage_layers",
        "uneven pipeline stages",
        ("layout.stage_layers",),
        lambda r, s: len(set(r.layout.stage_layers or ())) > 1,
        needs=("pp",),
    ),
    _context_parallel("all_gather"),
    _context_parallel("all_to_all"),
    Feature(
        "dynamic_cp",
        "dynamic context parallelism",
        ("layout.dynamic_cp", "layout.cp"),
        lambda r, s: r.layout.dynamic_cp and r.layout.cp > 1,
    ),
    _of_experts("ep", "expert parallelism", ("layout.ep",), lambda r: r.layout.ep > 1),
    _of_experts(
        "etp", "tensor parallelism of experts", ("layout.etp", "layout.tp"), lambda r: r.layout.expert_tp > 1
    ),
    _of_experts(
        "etp_apart",
        "experts cut otherwise than the rest of the model",
        ("layout.etp",),
        lambda r: r.layout.expert_tp != r.layout.tp,
        needs=("ep",),
    ),
    Feature("experts", "experts", ("model.path",), lambda r, s: _has_experts(s)),
    Feature("mla", "latent attention", ("model.path",), lambda r, s: s is not None and s.mla is not None),
    Feature(
        "tied",
        "tied embeddings",
        ("model.path", "model.build.tied_embeddings"),
        lambda r, s: s is not None and s.tied_embeddings,
    ),
    *_one_of(
        "engine.recompute",
        recompute_selective=("selective recompute", "selective"),
        recompute_full=("full recompute", "full"),
    ),
    *_one_of(
        "engine.replay_routes",
        replay_old=("replay of the old policy's routes", "old"),
        replay_rollout=("replay of the rollout's routes", "rollout"),
    ),
    _aux_loss("sequence"),
    _aux_loss("batch"),
    _of_experts("z_loss", "a loss of routers' logits", ("engine.z_loss",), lambda r: r.engine.z_loss > 0),
    _of_experts(
        "expert_bias",
        "updates of the expert bias",
        ("engine.expert_bias_rate",),
        lambda r: r.engine.expert_bias_rate > 0,
    ),
    *_one_of(
        "engine.distributed_optimizer",
        distributed_optimizer=("the distributed optimizer", True),
        whole_optimizer=("optimizer state whole on each data-parallel rank", False),
    ),
    _set_to(
        True, "overlap_grad_reduce", "reduction of gradients during backward", "engine.overlap_grad_reduce"
    ),
    _set_to(
        True, "overlap_param_gather", "gathering of parameters during forward", "engine.overlap_param_gather"
    ),
    _of_experts(
        "overlap_dispatch",
        "experts that compute while tokens travel",
        ("engine.overlap_dispatch",),
        lambda r: r.engine.overlap_dispatch,
        needs=("ep",),
    ),
    _set_to(True, "row_buckets", "rows of few sizes", "engine.row_buckets"),
    _set_to("transformer_engine", "transformer_engine", "TransformerEngine's layers", "engine.backend"),
    *_one_of("model.dtype", bf16=("bf16", "bf16"), fp32=("fp32", "fp32")),
    of_optimizers("adam", "Adam with L2 weight decay", "name", lambda o: o.name == "adam", "optimizer.name"),
    of_optimizers("sgd", "SGD", "name", lambda o: o.name == "sgd", "optimizer.name"),
    Feature("lora", "low-rank adapters", ("lora",), lambda r, s: r.lora is not None),
    Feature(
        "mtp",
        "training of layers for multi-token prediction",
        ("mtp.train",),
        lambda r, s: r.mtp is not None and r.mtp.train,
    ),
    of_optimizers(
        "lr_multipliers", "learning rates by parameter", "lr_multipliers", lambda o: bool(o.lr_multipliers)
    ),
    of_optimizers("frozen", "frozen weights", "frozen", lambda o: bool(o.frozen)),
    of_optimizers(
        "cpu_optimizer", "optimizer state on the CPU", "cpu_fraction", lambda o: o.cpu_fraction > 0
    ),
    _above_zero("offload_params", "offload of parameters", "engine.offload_params"),
    _above_zero("offload_grads", "offload of gradients", "engine.offload_grads"),
    _above_zero("offload_optimizer", "offload of optimizer state", "engine.offload_optimizer"),
    *_one_of(
        "engine.fp8",
        fp8_tensorwise=("products in 8 bits with a scale a tensor", "tensorwise"),
        fp8_blockwise=("products in 8 bits with scales of blocks", "blockwise"),
    ),
]
_LOOP = [
    Feature(
        "shared_rollout",
        "a rollout on the engine's weights",
        ("rollout.layout",),
        lambda r, s: placement_of(r).shares_weights,
        choice="rollout.layout",
    ),
    Feature(
        "own_rollout",
        "a rollout with a layout of its own",
        ("rollout.layout",),
        lambda r, s: not placement_of(r).shares_weights,
        choice="rollout.layout",
    ),
    Feature(
        "own_process_rollout",
        "rollouts in processes of their own",
        ("rollout.own_processes", "rollout.backend", "rollout.placement"),
        lambda r, s: placement_of(r).own_processes,
        needs=("own_rollout",),
    ),
    Feature(
        "separate_rollout",
        "rollouts on devices of their own",
        ("rollout.placement",),
        lambda r, s: placement_of(r).separate,
        needs=("own_process_rollout",),
    ),
    _set_to("fp8", "fp8_rollout", "an 8-bit rollout", "rollout.quantization"),
    _above_zero("reference", "a reference policy", "algorithm.kl_coef"),
    _set_to("ppo", "critic", "a critic", "algorithm.name"),
]
FEATURES: dict[str, Feature] = {
    one.id: one for one in (*_ENGINE, *(replace(one, engine=False) for one in _LOOP))
}
"""Every feature, by id. Those with `engine` are what the training engine can be asked for."""
