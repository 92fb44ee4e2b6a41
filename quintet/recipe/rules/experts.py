"""Rules of experts: their axes, and what megatron-core does wrong with them unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule


@rule
def expert_axes_need_experts(facts: Facts) -> Iterator[Problem]:
    """Axes of experts are set only for a model that has experts."""
    layout, rollout = facts.recipe.layout, facts.recipe.rollout.layout
    if facts.shape is None or facts.shape.moe is not None:
        return
    if rollout is not None and rollout.ep > 1:
        yield Problem(
            f"rollout.layout.ep={rollout.ep}: the model has no experts to spread over ranks; set rollout.layout.ep=1"
        )
    for name, value, unset in (("ep", layout.ep, "1"), ("etp", layout.etp, "null")):
        if value not in (1, None) or (name == "etp" and value is not None):
            yield Problem(
                f"layout.{name}={value}: the model has no experts to spread over ranks; set layout.{name}={unset}"
            )


@rule
def products_of_experts_can_be_had(facts: Facts) -> Iterator[Problem]:
    """Whose products compute experts is a question where TransformerEngine's can."""
    engine, shape = facts.recipe.engine, facts.shape
    said = f"engine.experts={engine.experts}"
    if engine.experts == "auto":
        return
    if shape is not None and shape.moe is None:
        yield Problem(f"{said} is of experts, and the model has none; remove it")
    elif engine.backend == "portable" or facts.recipe.cluster.device == "cpu":
        yield Problem(
            f"{said} chooses beside TransformerEngine's layers, and portable ones have torch's products alone; remove it, or set "
            "engine.backend=transformer_engine on GPUs"
        )
    elif engine.experts == "torch" and engine.fp8 is not None:
        yield Problem(
            f"{said} with engine.fp8={engine.fp8}: TransformerEngine's products alone are in 8 bits; remove one of the two",
            "engine.fp8",
        )
    elif engine.experts == "torch" and facts.recipe.model.dtype == "fp32":
        yield Problem(
            f"{said} with model.dtype=fp32: on GPUs torch multiplies all experts at once in bf16 alone; use bf16, or engine.experts=auto",
            "model.dtype",
        )
    elif engine.experts == "transformer_engine" and shape is not None and shape.moe and not shape.moe.plain:
        yield Problem(
            f"{said}: TransformerEngine computes SwiGLU without biases, and this model's experts are other ones; use engine.experts=auto"
        )


@rule
def experts_divide(facts: Facts) -> Iterator[Problem]:
    """The ranks of a stage hold whole copies of all experts: etp × ep divides them, ep the experts, etp their width."""
    if facts.shape is None or facts.shape.moe is None:
        return
    layout, moe, etp = facts.recipe.layout, facts.shape.moe, facts.recipe.layout.expert_tp
    stage, odd = divmod(facts.recipe.cluster.ranks, layout.pp)
    if not odd and stage % (etp * layout.ep):  # another rule tells of ranks that pp does not divide
        said = f"layout.etp × ep = {etp}{' (null: tp)' if layout.etp is None else ''} × {layout.ep} = {etp * layout.ep}"
        yield Problem(
            f"{said} does not divide the {stage} ranks of a pipeline stage (cluster.ranks / layout.pp); "
            f"{'use layout.etp=1, or' if etp > 1 else 'use'} a smaller ep, or more ranks",
            "layout.ep",
            "layout.tp",
        )
    if moe.experts % layout.ep:
        yield Problem(
            f"layout.ep={layout.ep} does not divide the model's {moe.experts} experts; use an ep that divides {moe.experts}"
        )
    if moe.ffn_hidden_size % etp:
        yield Problem(
            f"layout.etp={etp}{' (null: tp)' if layout.etp is None else ''} does not divide the {moe.ffn_hidden_size} units "
            "of an expert; use layout.etp=1, or one that divides it",
            "layout.tp",
        )
    rollout = facts.recipe.rollout.layout
    if rollout is not None and moe.ffn_hidden_size % rollout.tp:
        yield Problem(
            f"rollout.layout.tp={rollout.tp} does not divide the {moe.ffn_hidden_size} units of an expert; use a tp that divides it"
        )


@rule
def experts_need_sp(facts: Facts) -> Iterator[Problem]:
    """With tensor parallelism, a model with experts trains under sequence parallelism."""
    layout = facts.recipe.layout
    if facts.shape is not None and facts.shape.moe is not None and layout.tp > 1 and not layout.sp:
        yield Problem(
            f"layout.tp={layout.tp} with layout.sp=false: megatron-core trains experts under tensor parallelism only if each "
            "rank has tokens of its own; set layout.sp=true"
        )


@rule
def experts_are_cut_as_the_rest(facts: Facts) -> Iterator[Problem]:
    """Without expert parallelism, experts are cut by tensor parallelism as the rest of the model is."""
    layout, shape = facts.recipe.layout, facts.shape
    if shape is not None and shape.moe is not None and layout.ep == 1 and layout.expert_tp != layout.tp:
        yield Problem(
            f"layout.etp={layout.etp} with layout.tp={layout.tp} and layout.ep=1: megatron-core then computes wrong gradients of "
            "the experts, without a word; leave layout.etp=null, or raise layout.ep"
        )


@rule
def load_can_be_balanced(facts: Facts) -> Iterator[Problem]:
    """What evens out the load of experts is asked of a model that has them, and a stored bias is moved where there is one."""
    shape = facts.shape
    if shape is None:
        return
    asked = [
        key for key in ("engine.aux_loss", "engine.z_loss", "engine.expert_bias_rate") if facts.said(key)
    ]
    if shape.moe is None:
        for key in asked:
            yield Problem(f"{key}: the model has no experts whose load could be evened out; remove it")
    elif not shape.moe.bias and "engine.expert_bias_rate" in asked:
        yield Problem(
            f"engine.expert_bias_rate: a {shape.family} model's routers have no bias that its files and its rollouts would know of "
            "(DeepSeek-V3's and GLM-4.5's have, as e_score_correction_bias); remove it, or set engine.aux_loss"
        )


@rule
def routes_can_be_replayed(facts: Facts) -> Iterator[Problem]:
    """Routes are replayed of experts that the model has, where another pass than the update has chosen them."""
    recipe, said = facts.recipe, facts.said("engine.replay_routes")
    if said is None:
        return
    if facts.shape is not None and facts.shape.moe is None:
        yield Problem(f"{said}: the model has no experts, and so no routes; remove it")
    elif recipe.engine.replay_routes == "rollout":
        if facts.command != "sft" and not recipe.rollout.return_routes:
            yield Problem(
                f"{said}: a rollout tells its routes with rollout.return_routes=true alone; set it, or engine.replay_routes=null",
                "rollout.return_routes",
            )
        if facts.command != "sft" and recipe.rollout.backend == "sglang":
            yield Problem(
                f"{said} with rollout.backend=sglang: no test has seen that the routes SGLang tells of a request that lost its place, or "
                "of a prefix from its cache, are of the forward that its log-probs are of; use rollout.backend=vllm or native, or "
                "engine.replay_routes=old",
                "rollout.backend",
            )
    elif facts.command == "train" and recipe.train.mini_batches_per_step == 1:
        yield Problem(
            f"{said} with train.mini_batches_per_step=1: the one update of a step has the weights of the old log-probs, and chooses "
            "as they did; raise mini_batches_per_step, set engine.replay_routes=rollout, or remove it",
            "train.mini_batches_per_step",
        )
