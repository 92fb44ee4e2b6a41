"""What a recipe may ask of vLLM: the options that quintet decides itself, and what vLLM cannot do."""

from __future__ import annotations

import os
from collections.abc import Iterator

from quintet.recipe.problem import Problem
from quintet.recipe.reserved_options import decided_options
from quintet.recipe.rollout import placement_of
from quintet.recipe.schema import Recipe, Rollout

DECIDED = {
    "model": "it is model.path",
    "tokenizer": "it is the model's own",
    "trust_remote_code": "it is model.trust_remote_code",
    "skip_tokenizer_init": "prompts travel as tokens",
    "dtype": "it is model.dtype",
    "seed": "each request has its own, from run.seed",
    "tensor_parallel_size": "it is rollout.layout.tp",
    "pipeline_parallel_size": "it is rollout.layout.pp",
    "data_parallel_size": "each data-parallel rank is a rollout of its own",
    "data_parallel_size_local": "each data-parallel rank is a rollout of its own",
    "data_parallel_rank": "each data-parallel rank is a rollout of its own",
    "prefill_context_parallel_size": "a rollout has rollout.layout.tp × pp devices",
    "nnodes": "a rollout is within one node",
    "node_rank": "a rollout is within one node",
    "enable_expert_parallel": "it is rollout.layout.ep",
    "enable_eplb": "experts stay where new weights are brought",
    "eplb_config": "experts stay where new weights are brought",
    "distributed_executor_backend": "it follows from rollout.layout",
    "max_model_len": "it is data.max_prompt_tokens + rollout.max_response_tokens",
    "max_num_seqs": "it is rollout.sequences_per_rank",
    "gpu_memory_utilization": "it is rollout.memory_fraction",
    "enable_prefix_caching": "it is on, and emptied when weights change",
    "enable_sleep_mode": "it is on where vLLM has it",
    "enable_return_routed_experts": "it is rollout.return_routes",
    "generation_config": "what ends a response is in rollout.stop and rollout.stop_token_ids",
    "override_generation_config": "the sampling is in rollout",
    "runner": "a rollout generates",
    "convert": "a rollout generates",
    "hf_config_path": "it is model.path",
    "logprobs_mode": "it follows from rollout.temperature",
    "quantization": "it is rollout.quantization",
    "disable_log_stats": "counters of speculation come from them",
    "scheduler_cls": "it is quintet's own, which loses no token of a request that is held",
    "additional_config": "it tells quintet's worker what to write down",
    "worker_cls": "weights are taken by quintet's extension of vLLM's worker",
    "worker_extension_cls": "weights are taken by quintet's own",
    "weight_transfer_config": "weights are taken by quintet's extension of vLLM's worker",
    "enable_lora": "it is on with rollout.adapter_sync=separate",
    "max_lora_rank": "it follows from lora.rank",
    "max_loras": "there is one policy",
    "max_cpu_loras": "there is one policy",
    "lora_dtype": "adapters have the model's type",
    "lora_target_modules": "they are lora.targets",
    "fully_sharded_loras": "adapters are cut like the layers that they are beside",
}
"""Options of vLLM's engine that quintet decides, and by what."""

CPU_LAYOUT = "vLLM for CPU (0.32.0) spreads no experts over ranks, and dies in the first step of a second stage; use tp, with ep=1 and pp=1"

PLAIN_HEADS = ("mimo", "qwen2")
"""Families in which vLLM (0.20.2, 0.32.0) does not read head_dim: it takes a part of larger matrices without a word."""

ADAPTED = ("llama", "qwen2", "qwen3")
"""Families that vLLM computes adapters of, beside all of their linear layers."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for: an adapter has the room of the next larger one."""

MOST_DRAFTED = 8
_DRAFT_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation for which no model drafts."""


_TRIED_WITH_SECOND = {
    *("enforce_eager", "hf_overrides", "load_format", "max_num_batched_tokens", "block_size"),
    *("num_gpu_blocks_override", "cudagraph_capture_sizes"),
}
"""Options of rollout.vllm that change nothing of what the second model runner has to do, or that quintet sets itself."""


def second_runner_lacks(recipe: Recipe) -> str | None:
    """Return what of a recipe vLLM's second model runner cannot do (0.20.2), None where it can do all."""
    if placement_of(recipe).adapters_separate:
        return "rollout.adapter_sync=separate"
    if "speculative_config" in recipe.rollout.vllm:
        return "rollout.vllm.speculative_config"
    for key, value in recipe.rollout.vllm.items():
        if key not in _TRIED_WITH_SECOND and (key, value) != ("async_scheduling", True):
            return f"rollout.vllm.{key} (not tried)"
    if placement_of(recipe).layout.pp > 1:
        return "rollout.layout.pp > 1 (not tried)"
    return None


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable of the environment by which vLLM chooses its model runner: it reads a number, and any but 0 as the second."""
_RUNNERS = {"0": "the first model runner, the slower", "1": "the second model runner, the faster"}


def runner_asked(recipe: Recipe) -> str | None:
    """Return what `RUNNER` is in this environment, None where it is unset, empty, or not that of the ranks."""
    return (os.environ.get(RUNNER) or None) if recipe.cluster.address is None else None


def runner_taken(recipe: Recipe, asked: str | None) -> tuple[str, str]:
    """Return what `RUNNER` has to be on GPUs, and a line that says which model runner that is, and why. asked: what it is, if anything."""
    lacks = second_runner_lacks(recipe)
    taken = asked or ("0" if lacks else "1")
    why = [asked and f"{RUNNER}={asked} in the environment", lacks and f"the second lacks {lacks}"]
    said = "; ".join(filter(None, why)) or "it can do all that the recipe asks"
    return taken, f"vLLM on GPUs: {_RUNNERS[taken]}: {said}"


def runner_refusals(recipe: Recipe, asked: str | None) -> Iterator[Problem]:
    """Yield what is wrong with the model runner that is asked for, or that the recipe takes: a sentence each."""
    if asked is not None and asked not in _RUNNERS:
        yield Problem(
            f"rollout.backend=vllm: {RUNNER}={asked} in the environment is no model runner of vLLM's (0, 1); correct or unset it"
        )
    lacks = second_runner_lacks(recipe) or (f"{RUNNER}=0 in the environment" if asked == "0" else None)
    if recipe.cluster.device != "cpu" and recipe.rollout.return_routes and lacks is not None:
        yield Problem(
            f"rollout.return_routes=true with {lacks}: on GPUs vLLM tells routes in its second model runner, which does not go with that; "
            "remove one of the two, or set cluster.device=cpu where there are none"
        )


def starts_empty(recipe: Recipe) -> bool:
    """Return whether vLLM may start without reading weights. It makes up buffers then as well, which no sync brings: a user's family may
    have some, and some caches of keys and values do."""
    return recipe.model.family is None and "kv_cache_dtype" not in recipe.rollout.vllm


def drafts_refused(recipe: Recipe) -> Iterator[str]:
    """Yield what of a recipe keeps vLLM from drafting with the model's own layers: a sentence each, which `rollout.draft_tokens=n: ` goes
    before."""
    rollout, t = recipe.rollout, recipe.rollout.temperature
    if rollout.layout is not None and rollout.layout.pp > 1:
        yield (
            f"with rollout.layout.pp={rollout.layout.pp} vLLM's drafter has no embedding on the last stage, and crashes or drafts wrongly; "
            "use pp=1 and a larger rollout.layout.tp"
        )
    if rollout.quantization is not None:
        yield (
            f"rollout.quantization={rollout.quantization} does not reach vLLM's drafter, whose weights stay in 16 bits; this pair is not "
            "available in this version; use rollout.quantization=null"
        )
    if "hf_overrides" in rollout.vllm:
        yield "rollout.vllm.hf_overrides do not reach vLLM's drafter, which would be another model; write them into the model's config.json"
    if "speculative_config" in rollout.vllm:
        yield "vLLM drafts in one way, and rollout.vllm.speculative_config names another; remove one of them"
    if rollout.adapter_sync == "separate":
        yield (
            "rollout.adapter_sync=separate sends adapters alone, and layers for multi-token prediction have none: the drafter would get no "
            "weights; use rollout.adapter_sync=merged"
        )
    if rollout.return_routes:
        yield (
            "rollout.return_routes=true: that vLLM tells the routes of tokens that it drafted was never seen; use one of them"
        )
    if not rollout.sync_proof:
        yield (
            "rollout.sync_proof=false: nothing would tell of layers that draft with the weights before the last sync's; use "
            "rollout.sync_proof=true"
        )
    if rollout.min_p > 0:
        yield f"rollout.min_p={rollout.min_p}: vLLM drafts without min_p; use top_p or top_k"
    if t not in (0, 1):
        yield (
            f"rollout.temperature={t}: log-probs that vLLM tells of drafted tokens are not tried at another temperature than 1; use "
            "rollout.temperature=1"
        )


def draft_lengths(layers: int) -> list[int]:
    """Return how many tokens vLLM drafts with so many layers for multi-token prediction: at most as many as there are layers, or a multiple."""
    return [k for k in range(1, MOST_DRAFTED + 1) if k <= layers or k % layers == 0] if layers else []


def refusals(rollout: Rollout) -> Iterator[Problem]:
    """Yield what vLLM cannot do of a recipe's rollout: a sentence each."""
    uncut = {"top_p": 1, "top_k": 0, "min_p": 0}
    cuts = {key: value for key, none in uncut.items() if (value := getattr(rollout, key)) != none}
    said = " and ".join(f"rollout.{key}={value}" for key, value in cuts.items())
    t = rollout.temperature
    if cuts and t not in (0, 1):
        yield Problem(
            f"{said} with rollout.temperature={t}: vLLM then tells log-probs of the cut distribution alone, and training needs "
            "those with nothing cut; use rollout.temperature=1, or cut nothing, or rollout.backend=native"
        )
    if rollout.min_p > 0 and rollout.top_p < 1:
        yield Problem(
            f"rollout.min_p={rollout.min_p} with rollout.top_p={rollout.top_p}: vLLM cuts by min_p first, quintet last; use one of "
            "them, or rollout.backend=native"
        )
    if "speculative_config" in rollout.vllm and rollout.min_p > 0:
        yield Problem(
            f"rollout.vllm.speculative_config with rollout.min_p={rollout.min_p}: vLLM drafts without min_p; use top_p or top_k, or "
            "no speculation"
        )
    if "speculative_config" in rollout.vllm and t not in (0, 1):
        yield Problem(
            f"rollout.vllm.speculative_config with rollout.temperature={t}: vLLM does not tell log-probs of drafted tokens at "
            "another temperature than 1; use rollout.temperature=1, or no speculation"
        )
    if "speculative_config" in rollout.vllm and rollout.return_routes:
        yield Problem(
            "rollout.vllm.speculative_config with rollout.return_routes=true: routes of a token that was drafted and not taken may "
            "stand in the place of the one that was; use one of them"
        )
    yield from _weights(rollout)
    layout = rollout.layout
    if layout is not None and layout.pp > 2 and rollout.vllm.get("async_scheduling", False) is not False:
        yield Problem(
            f"rollout.vllm.async_scheduling with rollout.layout.pp={layout.pp}: with more stages than two, vLLM takes wrong tokens into "
            "requests that it preempts with steps of theirs under way; remove it, or use rollout.layout.pp=2"
        )
    if layout is not None and layout.ep not in (1, layout.tp):
        yield Problem(
            f"rollout.layout.ep={layout.ep}: vLLM spreads experts over the tensor-parallel ranks; use "
            f"{'ep=1' if layout.tp == 1 else f'ep=1 or ep={layout.tp}'}, or another rollout.layout.tp"
        )
    yield from decided_options("rollout.vllm", rollout.vllm, DECIDED)


def _weights(rollout: Rollout) -> Iterator[Problem]:
    """What needs weights that the trainer does not have, or that come from elsewhere than it."""
    drafts = rollout.vllm.get("speculative_config")
    if drafts is not None:
        method = drafts.get("method") if isinstance(drafts, dict) else None
        if method not in _DRAFT_WITHOUT_WEIGHTS:
            yield Problem(
                f"rollout.vllm.speculative_config with method={'null' if method is None else method}: a model that drafts has "
                "weights of its own, which the trainer does not have, so no sync brings them; use rollout.draft_tokens where the model "
                f"has layers for multi-token prediction (mtp), one of {', '.join(_DRAFT_WITHOUT_WEIGHTS)}, or no speculation"
            )
    if rollout.quantization == "fp8" and "load_format" in rollout.vllm:
        yield Problem(
            "rollout.vllm.load_format: rollout.quantization=fp8 loads nothing, the first sync brings all weights; remove it"
        )
    overrides = rollout.vllm.get("hf_overrides")
    if isinstance(overrides, dict) and "quantization_config" in overrides:
        yield Problem(
            "rollout.vllm.hf_overrides.quantization_config: it is rollout.quantization; remove it",
            "rollout.vllm.hf_overrides",
        )
