"""What a recipe may ask of SGLang: the options that quintet decides itself, and what SGLang cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.problem import Problem
from quintet.recipe.reserved_options import decided_options
from quintet.recipe.schema import Rollout

DECIDED = {
    "model_path": "it is model.path",
    "tokenizer_path": "it is the model's own",
    "trust_remote_code": "it is model.trust_remote_code",
    "skip_tokenizer_init": "prompts travel as tokens",
    "dtype": "it is model.dtype",
    "device": "SGLang runs on NVIDIA GPUs here",
    "random_seed": "each request has its own seed, from run.seed",
    "tp_size": "it is rollout.layout.tp",
    "pp_size": "it is rollout.layout.pp",
    "dp_size": "each data-parallel rank is a rollout of its own",
    "ep_size": "it is rollout.layout.ep",
    "host": "a rollout is within one node, and listens there alone",
    "dist_init_addr": "a rollout is within one node, and listens there alone",
    "nnodes": "a rollout is within one node",
    "node_rank": "a rollout is within one node",
    "context_length": "it is data.max_prompt_tokens + rollout.max_response_tokens",
    "max_running_requests": "it is rollout.sequences_per_rank",
    "mem_fraction_static": "it is rollout.memory_fraction",
    "enable_memory_saver": "it is on: the rollout's memory is given up between phases",
    "enable_weights_cpu_backup": "it is rollout.sleep_level",
    "enable_draft_weights_cpu_backup": "it is rollout.sleep_level",
    "enable_return_routed_experts": "it is rollout.return_routes",
    "sampling_defaults": "the sampling is in rollout",
    "preferred_sampling_params": "the sampling is in rollout",
    "allow_auto_truncate": "a prompt that is too long is an error, never cut",
    "quantization": "it is rollout.quantization",
    "weight_cache_mode": "its weights cannot be updated in place",
    "enable_lora": "adapters arrive merged into the weights",
    "lora_paths": "adapters arrive merged into the weights",
    "enable_eplb": "experts stay where new weights are brought",
    "disaggregation_mode": "a rollout reads prompts and writes responses on the same devices",
    "custom_sigquit_handler": "quintet reports processes that die",
}
"""Arguments of SGLang's engine that quintet decides, and by what."""


def deterministic(rollout: Rollout) -> bool:
    """Return whether requests' seeds count: SGLang reads them in its deterministic mode alone, which is on unless switched off."""
    return bool(rollout.sglang.get("enable_deterministic_inference", True))


def refusals(rollout: Rollout) -> Iterator[Problem]:
    """Yield what SGLang cannot do of a recipe's rollout: a sentence each."""
    if rollout.mode == "server":
        yield Problem(
            "rollout.mode=server is of vllm: SGLang's engine takes a step's requests together; use rollout.mode=offline"
        )
    yield from _sampling(rollout)
    if rollout.quantization is not None:
        yield Problem(
            f"rollout.quantization={rollout.quantization} with SGLang is not available in this version; use "
            "rollout.backend=vllm, or no quantization"
        )
    layout = rollout.layout
    if layout is not None and layout.pp > 1:
        yield Problem(
            f"rollout.layout.pp={layout.pp} with SGLang: its stages do not take weights in place; use pp=1 and a larger "
            "rollout.layout.tp"
        )
    if layout is not None and layout.tp % layout.ep:
        yield Problem(
            f"rollout.layout.ep={layout.ep}: SGLang spreads experts over the tensor-parallel ranks; use an ep that divides "
            f"tp={layout.tp}"
        )
    drafts = rollout.sglang.get("speculative_algorithm")
    if drafts is not None and drafts != "NGRAM":
        yield Problem(
            f"rollout.sglang.speculative_algorithm={drafts}: a model that drafts has weights of its own, which the trainer does not "
            "have, so no sync brings them; use NGRAM, or no speculation, or rollout.draft_tokens with rollout.backend=vllm where the "
            "model has layers for multi-token prediction (mtp)"
        )
    if drafts is not None and rollout.return_routes:
        yield Problem(
            f"rollout.sglang.speculative_algorithm={drafts} with rollout.return_routes=true: routes of a token that was drafted and not "
            "taken may stand in the place of the one that was, which has not been tried; use one of them"
        )
    yield from decided_options("rollout.sglang", rollout.sglang, DECIDED)


def _sampling(rollout: Rollout) -> Iterator[Problem]:
    if rollout.top_k > 0 and rollout.top_p < 1:
        yield Problem(
            f"rollout.top_k={rollout.top_k} with rollout.top_p={rollout.top_p}: SGLang takes top_p of the whole distribution, "
            "quintet of what top_k left; use one of them, or rollout.backend=native"
        )
    if rollout.min_p > 0 and (deterministic(rollout) or "speculative_algorithm" in rollout.sglang):
        yield Problem(
            f"rollout.min_p={rollout.min_p}: SGLang has no min_p for requests with a seed, nor where drafts are judged; use top_p, or "
            "rollout.sglang.enable_deterministic_inference=false, which ignores seeds, and no speculation, or rollout.backend=native"
        )
