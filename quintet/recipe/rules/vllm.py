"""Rules of the vLLM rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models.family import read_config
from quintet.recipe.problem import Problem
from quintet.recipe.reserved_options import unknown_here
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.vllm import CPU_LAYOUT, DECIDED, PLAIN_HEADS, refusals, runner_asked, runner_refusals


@rule
def vllm_can_do_it(facts: Facts) -> Iterator[Problem]:
    """vLLM is asked only for what it can do, and for nothing that quintet decides itself."""
    recipe, layout = facts.recipe, facts.recipe.rollout.layout
    if recipe.rollout.backend != "vllm":
        return
    yield from refusals(recipe.rollout)
    if recipe.cluster.device == "cpu" and layout is not None and layout.ep * layout.pp > 1:
        yield Problem(f"rollout.layout.pp={layout.pp}, ep={layout.ep}: {CPU_LAYOUT}")
    if recipe.cluster.device == "cpu" and recipe.rollout.vllm.get("enable_chunked_prefill"):
        yield Problem(
            "rollout.vllm.enable_chunked_prefill=true: of a prompt that is cut over two steps vLLM for CPU cannot set a seed's "
            "generator back; remove it"
        )
    yield from runner_refusals(recipe, runner_asked(recipe))
    shape = facts.shape
    if shape and shape.family in PLAIN_HEADS and shape.heads * shape.head_dim != shape.hidden_size:
        yield Problem(
            f"rollout.backend=vllm: vLLM has heads of hidden_size / heads = {shape.hidden_size // shape.heads} in models of {shape.family}, "
            f"and these have {shape.head_dim}; use model.build.head_dim={shape.hidden_size // shape.heads} where the model is built, or "
            "rollout.backend=native"
        )
    if shape and shape.moe and shape.family == "gpt_oss":
        read = (shape.moe.glu.alpha, shape.moe.glu.limit, shape.norm_eps, shape.window_layers)
        if read != (1.702, 7, 1e-5, tuple(range(0, shape.layers, 2))):
            yield Problem(
                "rollout.backend=vllm: whatever config.json says, vLLM (0.20.2, 0.32.0) has swiglu_alpha=1.702, swiglu_limit=7, rms_norm_eps=1e-5 "
                "and a window in every second layer, from the first, in models of gpt_oss; use native"
            )
    if recipe.rollout.quantization == "fp8" and recipe.model.dtype == "fp32":
        yield Problem(
            "rollout.quantization=fp8: vLLM multiplies 8 bits with bf16, not with model.dtype=fp32; set model.dtype=bf16, or "
            "rollout.quantization=null"
        )


@rule
def vllm_reads_a_bias_of_experts(facts: Facts) -> Iterator[Problem]:
    """vLLM (0.20.2, 0.32.0) makes DeepSeek-V3's bias of experts only where config.json names its routing, which transformers leaves out."""
    if facts.recipe.rollout.backend != "vllm" or facts.read is None or facts.read.family != "deepseek_v3":
        return
    path = facts.recipe.model.directory
    if path is not None and "topk_method" not in read_config(path):
        yield Problem(
            f"rollout.backend=vllm with model.path={path}: its config.json names no topk_method, without which vLLM has no place for the "
            'bias of experts and does not start; add "topk_method": "noaux_tc" there',
            "model.path",
        )


@rule
def vllm_knows_its_options(facts: Facts) -> Iterator[Problem]:
    """Options that are handed through are those of the vLLM that is installed here, where ranks run here."""
    return unknown_here(facts.recipe, "vllm", "vLLM", DECIDED)
