"""Rules of engine.fp8: which layers, layouts and rollouts go with matrices that the trainer multiplies in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models import ModelShape, table_of
from quintet.recipe.fp8 import MULTIPLE, matrices
from quintet.recipe.problem import Problem
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.schema import Layout, RolloutLayout


@rule
def eight_bits_need_transformer_engine(facts: Facts) -> Iterator[Problem]:
    """Only TransformerEngine's layers multiply in 8 bits; portable ones would stay in bf16 without a word."""
    recipe, said = facts.recipe, facts.said("engine.fp8")
    on_gpus = said is not None and recipe.cluster.device != "cpu"  # refused by name already
    if on_gpus and recipe.engine.backend == "portable":
        yield Problem(
            f"{said} with engine.backend=portable: the portable layers have no products in 8 bits; use "
            "engine.backend=transformer_engine, or engine.fp8=null",
            "engine.backend",
        )


@rule
def eight_bits_are_installed(facts: Facts) -> Iterator[Problem]:
    """TransformerEngine is there, where this machine runs the ranks."""
    recipe, said = facts.recipe, facts.said("engine.fp8")
    on_gpus = said is not None and recipe.cluster.device != "cpu" and recipe.engine.backend != "portable"
    if on_gpus and facts.lacks("transformer_engine"):
        yield Problem(
            f"{said}: TransformerEngine is not installed here, whose layers alone multiply in 8 bits; install "
            "transformer-engine[pytorch], or set engine.fp8=null"
        )


@rule
def eight_bits_fit_the_matrices(facts: Facts) -> Iterator[Problem]:
    """On each rank the dims of a matrix in 8 bits are whole numbers of what its scales and kernels take."""
    layout, shape, fp8 = facts.recipe.layout, facts.shape, facts.recipe.engine.fp8
    if fp8 is None or shape is None:
        return
    multiple = MULTIPLE[fp8]
    for one in matrices(shape, layout):
        if one.outputs % multiple or one.inputs % multiple:
            ways = ["use a smaller layout.tp (of experts etp)"] * (max(layout.tp, layout.etp or 1) > 1)
            ways += ["set engine.fp8=tensorwise"] * (multiple > 16) + ["set engine.fp8=null"]
            yield Problem(
                f"engine.fp8={fp8}: {one.name} would be {one.outputs} × {one.inputs} on a rank of layout.tp={layout.tp}, and both have to be "
                f"multiples of {multiple}; {', or '.join(ways)}",
                "layout.tp",
            )
            break


@rule
def eight_bits_are_the_same_on_both_sides(facts: Facts) -> Iterator[Problem]:
    """A rollout in 8 bits computes with the bytes that the trainer computes with: the same blocks of the same matrices."""
    recipe, shape = facts.recipe, facts.shape
    said = facts.said("engine.fp8")
    if said is None or recipe.rollout.quantization is None or facts.command == "sft":
        return
    both = f"{said} with rollout.quantization=fp8"
    if recipe.engine.fp8 != "blockwise":
        yield Problem(
            f"{both}: the rollout has a scale for each 128 × 128 weights, and the trainer one a matrix, so that they would compute with "
            "other weights; set engine.fp8=blockwise, or rollout.quantization=null",
            "rollout.quantization",
        )
        return
    if shape is None:
        return
    if shape.mla is not None:
        yield Problem(
            f"{both}: latent attention's down projections stay in bf16 in the trainer, and the rollout would have them in 8 bits; set "
            "engine.fp8=null or rollout.quantization=null",
            "rollout.quantization",
        )
    alone = {one.name: one.unit for one in matrices(shape, Layout())}
    for one in matrices(shape, recipe.layout):
        if one.unit % MULTIPLE["blockwise"]:
            cut = alone[one.name] % MULTIPLE["blockwise"] == 0
            way = "use a smaller layout.tp (of experts etp)" if cut else "set engine.fp8=null"
            yield Problem(
                f"{both}: {one.name} have parts of {one.unit} rows on a rank, so that a block of 128 × 128 would lie across two of them "
                f"in the trainer, and in the rollout not; {way}, or rollout.quantization=null",
                "rollout.quantization",
            )
            break


@rule
def rollouts_hold_whole_blocks(facts: Facts) -> Iterator[Problem]:
    """A rank of vLLM holds whole blocks of each matrix that it cuts or lays over another, and of what goes into them: with nothing else it
    starts (0.20.2, 0.32.0)."""
    rollout, shape = facts.recipe.rollout, facts.shape
    if (rollout.backend, rollout.quantization) != ("vllm", "fp8") or shape is None or facts.command == "sft":
        return
    if any(one.stack is not None for one in table_of(shape)):
        yield Problem(
            f"rollout.quantization=fp8: {shape.family} has all experts of a layer in one tensor, of which no format with scales of 128 × 128 "
            "blocks is known; set rollout.quantization=null",
            "rollout.quantization",
        )
        return
    layout, block = placement_of(facts.recipe).layout, MULTIPLE["blockwise"]
    alone = dict(_widths(shape, RolloutLayout()))
    for name, width in _widths(shape, layout):
        if width % block:
            ways = ["a smaller rollout.layout.tp"] * (alone.get(name, 0) % block == 0)
            ways += [f"rollout.layout.ep={layout.tp}"] * (name == "experts" and bool(ways))
            yield Problem(
                f"rollout.quantization=fp8: {name} are {width} wide on a rank of vLLM, and its scales are of blocks of {block}; use "
                f"{', or '.join([*ways, 'rollout.quantization=null'])}",
                "rollout.quantization",
            )
            break


def _widths(shape: ModelShape, layout: RolloutLayout) -> Iterator[tuple[str, int]]:
    """Of the matrices that a rank of vLLM has a part of, or several over one another, and of their inputs, what each comes to."""
    heads, mla, moe = shape.heads // layout.tp, shape.mla, shape.moe
    yield "hidden states", shape.hidden_size
    if mla is None:
        yield "attention's queries", heads * shape.head_dim
        yield "attention's keys and values", max(1, shape.kv_heads // layout.tp) * shape.head_dim
    else:
        yield "attention's latent queries", mla.q_lora_rank or shape.hidden_size
        yield "attention's latent keys and values", mla.kv_lora_rank
        yield "attention's heads", heads * shape.v_head_dim
    if mla is not None and layout.tp > 1:
        yield "attention's queries", heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        yield "attention's keys and values", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if len(shape.moe_layers) < shape.layers:
        yield "feed-forward parts", shape.ffn_hidden_size // layout.tp
    if moe is not None:
        yield "experts", moe.ffn_hidden_size // (1 if layout.ep > 1 else layout.tp)
        if moe.shared_ffn_hidden_size:
            yield "shared experts", moe.shared_ffn_hidden_size // layout.tp


@rule
def inputs_in_8_bits_are_kept(facts: Facts) -> Iterator[Problem]:
    """A product in 8 bits keeps its input in 8 bits, and forgets nothing where what made the input is computed again."""
    engine = facts.recipe.engine
    if engine.fp8 is None or engine.recompute != "selective":
        return
    for name in (one for one in ("layernorm", "mlp_act") if one in (engine.recompute_modules or ())):
        yield Problem(
            f"engine.recompute_modules: {name} with engine.fp8={engine.fp8} is untried: the products after it keep their inputs in 8 bits; "
            "remove it, or set engine.fp8=null"
        )
