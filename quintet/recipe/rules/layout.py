"""Rules of the layout: what the sizes of the mesh axes must divide."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models import ModelShape
from quintet.models.stages import balanced_stages
from quintet.packing.plan import cell_sizes
from quintet.recipe.problem import Problem
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules.facts import Facts, multiples, rule


@rule
def ranks_divide(facts: Facts) -> Iterator[Problem]:
    """The ranks of the run are a whole number of copies of the training layout and of the rollout layout."""
    ranks, layout, rollout = facts.recipe.cluster.ranks, facts.recipe.layout, facts.recipe.rollout.layout
    size = layout.tp * layout.pp * layout.cp
    if ranks % size:
        yield Problem(
            f"cluster.ranks={ranks} is not divisible by layout.tp × pp × cp = {layout.tp} × {layout.pp} × {layout.cp} = {size}; "
            f"use {multiples(ranks, size)} ranks, or a smaller layout",
            "layout.pp",
            "layout.cp",
        )
    if facts.recipe.rollout.placement == "separate":
        return  # its devices are counted apart
    if rollout is not None and ranks % (size := rollout.tp * rollout.pp):
        yield Problem(
            f"cluster.ranks={ranks} is not divisible by rollout.layout.tp × pp = {rollout.tp} × {rollout.pp} = {size}; "
            f"use {multiples(ranks, size)} ranks, or a smaller rollout layout",
            "rollout.layout.pp",
        )


@rule
def nodes_divide(facts: Facts) -> Iterator[Problem]:
    """Every node takes the same number of ranks."""
    cluster = facts.recipe.cluster
    if cluster.ranks_per_node and cluster.ranks % cluster.ranks_per_node:
        yield Problem(
            f"cluster.ranks={cluster.ranks} is not divisible by cluster.ranks_per_node={cluster.ranks_per_node}; "
            "every node takes the same number of ranks"
        )


@rule
def sp_needs_tp(facts: Facts) -> Iterator[Problem]:
    """Sequence parallelism splits over the tensor-parallel ranks, so there must be more than one."""
    if facts.recipe.layout.sp and facts.recipe.layout.tp == 1:
        yield Problem(
            "layout.sp=true needs layout.tp > 1: it splits activations over the tensor-parallel ranks; set layout.sp=false"
        )


@rule
def vpp_needs_pp(facts: Facts) -> Iterator[Problem]:
    """An interleaved pipeline needs a pipeline."""
    if facts.recipe.layout.vpp > 1 and facts.recipe.layout.pp == 1:
        yield Problem(
            f"layout.vpp={facts.recipe.layout.vpp} needs layout.pp > 1: it interleaves pipeline stages; set layout.vpp=1"
        )


@rule
def model_divides(facts: Facts) -> Iterator[Problem]:
    """tp divides heads, KV heads and the width of MLPs, in both layouts."""
    if facts.shape is None:
        return
    layout, rollout = facts.recipe.layout, facts.recipe.rollout.layout
    yield from _divides(facts.shape, "layout", layout.tp)
    if rollout is not None:
        repeats = facts.recipe.rollout.backend != "native"
        yield from _divides(facts.shape, "rollout.layout", rollout.tp, repeats)


def _divides(shape: ModelShape, section: str, tp: int, repeats: bool = False) -> Iterator[Problem]:
    """repeats: whether several ranks may hold the same KV head, where there are fewer of them than ranks (vllm, sglang)."""
    parts = [("attention heads", shape.heads)]
    if shape.mla is None and not (repeats and tp % shape.kv_heads == 0):
        parts.append(("KV heads", shape.kv_heads))
    if len(shape.moe_layers) < shape.layers:
        parts.append(("units of its MLP (ffn_hidden_size)", shape.ffn_hidden_size))
    if shape.moe is not None:
        parts.append(("units of its shared experts", shape.moe.shared_ffn_hidden_size))
    for name, size in parts:
        if size % tp:
            yield Problem(
                f"{section}.tp={tp} does not divide the model's {size} {name}; use a tp that divides {size}"
            )


@rule
def stages_hold_the_layers(facts: Facts) -> Iterator[Problem]:
    """Stages of the training layout have the model's layers together, none of them empty but for what else is on the first and the
    last; stages of a rollout equally many."""
    if facts.shape is None:
        return
    layout, rollout, layers = facts.recipe.layout, facts.recipe.rollout.layout, facts.shape.layers
    counts, parts = layout.stage_layers, layout.pp * layout.vpp
    what = f"pp={layout.pp}" if layout.vpp == 1 else f"pp × vpp = {layout.pp} × {layout.vpp}"
    better = _balanced(facts.shape, parts)
    if counts is None and not layout.holds(layers):
        yield Problem(
            f"layout.{what} does not divide the model's {layers} layers, and layout.stage_layers does not say how many each stage "
            f"holds; {better or f'{layers} divides by {_divisors(layers)}'}",
            "layout.pp",
            "layout.vpp",
        )
    elif counts is not None and not layout.holds(layers):
        stages = "pipeline stages" if layout.vpp == 1 else "chunks of pipeline stages"
        found = f"{len(counts)} {stages} of {sum(counts)} layers together"
        yield Problem(
            f"layout.stage_layers={counts} is {found}, and layout.{what} with the model's {layers} layers makes {parts} of {layers}"
            + (f"; {better}" if better else "; use a smaller pp"),
            "layout.pp",
            "layout.vpp",
        )
    elif counts is not None and 0 in counts[1:-1]:
        yield Problem(
            f"layout.stage_layers={counts} leaves a stage in the middle without layers, which would do nothing; only the first, which "
            "embeds, and the last, which has the head, may have 0" + (f"; {better}" if better else "")
        )
    if rollout is not None and not placement_of(facts.recipe).shares_weights and layers % rollout.pp:
        yield Problem(
            f"rollout.layout.pp={rollout.pp} does not divide the model's {layers} layers, of which every stage of a rollout holds "
            f"the same number; {layers} divides by {_divisors(layers)}",
            "rollout.layout.pp",
        )


def _balanced(shape: ModelShape, parts: int) -> str | None:
    """What to write instead. A model that is built has a vocabulary, and so a head, whose size is not known here."""
    return (
        f"balanced is layout.stage_layers={balanced_stages(shape, parts)}" if parts <= shape.layers else None
    )


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


@rule
def blocks_halve(facts: Facts) -> Iterator[Problem]:
    """Dynamic context parallelism cuts blocks of cp ranks into halves, and these again: cp is a power of two above 1."""
    layout, ranks = facts.recipe.layout, facts.recipe.cluster.ranks
    cp, block = layout.cp, layout.tp * layout.pp
    if not layout.dynamic_cp or (cp > 1 and not cp & (cp - 1)):
        return
    wrong = "needs layout.cp > 1, the most ranks that share a micro-batch"
    if cp > 1:
        wrong = f"cuts blocks of layout.cp ranks into groups of 1, 2, 4 and so on: layout.cp={cp} is no power of two"
    fit = [str(size) for size in cell_sizes(ranks)[1:] if ranks % (size * block) == 0]
    use = f"which {ranks} ranks allow, or" if fit else f"with a multiple of {2 * block} as cluster.ranks, or"
    yield Problem(
        f"layout.dynamic_cp=true {wrong}; use layout.cp={' or '.join(fit or ['2'])}, {use} layout.dynamic_cp=false",
        "layout.cp",
    )


@rule
def exchanged_heads_divide(facts: Facts) -> Iterator[Problem]:
    """Context-parallel ranks that exchange heads get a whole number of KV heads each."""
    layout, shape = facts.recipe.layout, facts.shape
    if shape is None or layout.cp == 1 or facts.recipe.engine.cp_comm != "all_to_all":
        return
    size, name = (shape.heads, "attention heads") if shape.mla else (shape.kv_heads, "KV heads")
    if size % (layout.tp * layout.cp):
        yield Problem(
            f"engine.cp_comm=all_to_all gives each rank a whole number of {name}: layout.tp × cp = {layout.tp} × {layout.cp} = "
            f"{layout.tp * layout.cp} does not divide the model's {size}; use engine.cp_comm=all_gather, or a smaller cp",
            "layout.cp",
        )
