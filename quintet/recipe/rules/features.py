"""Rules of features: what is available, installed and read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from quintet.recipe.features import NOT_AVAILABLE
from quintet.recipe.rules.facts import Facts, Problem, rule


@rule
def only_available_features(facts: Facts) -> Iterator[Problem]:
    """A feature this version does not have is refused by name."""
    for missing in NOT_AVAILABLE:
        if missing.feature.is_on(facts.recipe):
            yield Problem(
                (missing.feature.key,),
                f"{missing.feature.key}: {missing.feature.name} is not available in this version; {missing.instead}",
            )


@rule
def megatron_options_are_free(facts: Facts) -> Iterator[Problem]:
    """What quintet decides from other keys cannot be set a second time in engine.megatron."""
    for name in facts.recipe.engine.megatron:
        if name in _DECIDED_ELSEWHERE:
            key = f"engine.megatron.{name}"
            yield Problem((key,), f"{key}: decided by {_DECIDED_ELSEWHERE[name]}; set that and remove this")


_DECIDED_ELSEWHERE = {
    "tensor_model_parallel_size": "layout.tp",
    "sequence_parallel": "layout.sp",
    "pipeline_model_parallel_size": "layout.pp",
    "virtual_pipeline_model_parallel_size": "layout.vpp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.etp",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "num_layers": "the model",
    "hidden_size": "the model",
    "ffn_hidden_size": "the model",
    "num_attention_heads": "the model",
    "num_query_groups": "the model",
    "kv_channels": "the model",
    "calculate_per_token_loss": "algorithm.aggregation",
    "batch_p2p_comm": "layout.pp",
    "variable_seq_lengths": "layout.pp",
}


@rule
def backend_options_are_read(facts: Facts) -> Iterator[Problem]:
    """Options of a rollout back end are given only with that back end."""
    rollout = facts.recipe.rollout
    for name, options in (("vllm", rollout.vllm), ("sglang", rollout.sglang)):
        if options and rollout.backend != name:
            yield Problem(
                (f"rollout.{name}",),
                f"rollout.{name} has options, but rollout.backend is {rollout.backend}, which does not read them; remove them",
            )


@rule
def trackers_are_installed(facts: Facts) -> Iterator[Problem]:
    """A tracker's package is there before the run starts."""
    for tracker in facts.recipe.run.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield Problem(
                ("run.trackers",),
                f"run.trackers: {tracker} is not installed; pip install 'quintet[{tracker}]', or remove it from run.trackers",
            )
