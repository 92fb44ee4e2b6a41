"""Rules of where rollouts run, and which of their keys are read there."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models.family import families_with_mtp, read_config
from quintet.recipe.problem import Problem
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.vllm import ADAPTED, RANKS, draft_lengths, drafts_refused

LEAST_TEMPERATURE = 0.01


@rule
def separate_rollouts_have_devices(facts: Facts) -> Iterator[Problem]:
    """Devices of a separate rollout are counted by rollout.ranks, in whole copies."""
    rollout = facts.recipe.rollout
    if rollout.placement == "colocated":
        return
    if rollout.ranks is None:
        yield Problem(
            "rollout.placement=separate needs rollout.ranks: how many devices generate, beside the cluster.ranks that train"
        )
    elif rollout.ranks % (size := placement_of(facts.recipe).devices_per_copy):
        yield Problem(
            f"rollout.ranks={rollout.ranks} is not divisible by rollout.layout.tp × pp = {size}; every copy has as many devices"
        )


@rule
def own_processes_are_chosen_once(facts: Facts) -> Iterator[Problem]:
    """Rollouts are put into processes of their own only where they could be in the trainer's."""
    rollout = facts.recipe.rollout
    if not rollout.own_processes:
        return
    if rollout.backend != "native":
        yield Problem(
            f"rollout.own_processes=true is of the native rollout: {rollout.backend} always has processes of its own; remove it"
        )
    elif rollout.placement == "separate":
        yield Problem(
            "rollout.own_processes=true says nothing of a separate rollout, which always has processes of its own; remove it"
        )


@rule
def awake_rollouts_are_vllms(facts: Facts) -> Iterator[Problem]:
    """A rollout that never sleeps takes weights over its own, beside its KV cache."""
    rollout = facts.recipe.rollout
    if rollout.sleep_level == 0 and rollout.backend != "vllm":
        yield Problem(
            f"rollout.sleep_level=0 is of vllm: {rollout.backend} takes new weights with its KV cache asleep; remove it, or take 1 or 2"
        )


@rule
def restart_needs_own_processes(facts: Facts) -> Iterator[Problem]:
    """What shares the trainer's process dies with it."""
    if facts.recipe.rollout.restart and not placement_of(facts.recipe).own_processes:
        yield Problem(
            "rollout.restart=true needs a rollout in processes of its own: one in the trainer's dies with it, and "
            "`resume=auto` goes on from the last checkpoint; set rollout.own_processes=true, or rollout.restart=false"
        )


@rule
def adapters_travel_as_asked(facts: Facts) -> Iterator[Problem]:
    """How adapters travel is said only where there are some, and to whom it may be either way."""
    recipe, rollout = facts.recipe, facts.recipe.rollout
    said = facts.said("rollout.adapter_sync")
    if said is None:
        return
    if recipe.lora is None:
        yield Problem(f"{said} is not read without adapters; remove it, or set lora.rank")
    elif rollout.backend != "vllm":
        what = "native gets adapters alone" if rollout.backend == "native" else "sglang gets merged weights"
        yield Problem(f"{said} is of vllm: {what} in any case; remove it", "rollout.adapter_sync")
    elif rollout.adapter_sync == "separate":
        for why in _what_vllm_cannot_adapt(facts):
            yield Problem(f"rollout.adapter_sync=separate: {why}; use rollout.adapter_sync=merged")


def _what_vllm_cannot_adapt(facts: Facts) -> Iterator[str]:
    """What keeps vLLM from computing adapters beside frozen weights."""
    rollout, shape = facts.recipe.rollout, facts.shape
    if rollout.quantization is not None:
        yield f"rollout.quantization={rollout.quantization} quantises what is sent, and frozen weights are not"
    if "load_format" in rollout.vllm:
        yield "vLLM reads the frozen weights from the model's directory, in its format (rollout.vllm.load_format)"
    if shape is None:
        return
    if shape.family not in ADAPTED:
        yield f"vLLM's adapters are tried with the families {', '.join(ADAPTED)}, and this model is of {shape.family}"
        return
    if (lora := facts.lora) is not None and lora.rank > RANKS[-1]:
        yield f"vLLM has adapters of rank {RANKS[-1]} at most, and these have {lora.rank}"


@rule
def drafts_can_be_made(facts: Facts) -> Iterator[Problem]:
    """The model drafts for itself where the back end can, and with layers that the run keeps."""
    recipe, said = facts.recipe, facts.said("rollout.draft_tokens")
    if said is None:
        return
    if recipe.rollout.backend == "native":
        yield Problem(
            f"{said}: native rollouts do not draft in this version; use rollout.backend=vllm, or draft_tokens=0"
        )
    elif recipe.rollout.backend == "sglang":
        yield Problem(
            f"{said}: SGLang makes its drafter of a directory and has not been tried with weights that a sync brings; use "
            "rollout.backend=vllm, or draft_tokens=0"
        )
    else:
        for why in drafts_refused(recipe):
            yield Problem(f"{said}: {why}, or draft_tokens=0", "rollout.draft_tokens")
    families = families_with_mtp()
    if facts.shape is not None and facts.shape.family not in families:
        yield Problem(
            f"{said}: it is a model's layers for multi-token prediction that draft, and none are known of the family "
            f"{facts.shape.family}; take a model of {', '.join(families)}, or draft_tokens=0"
        )
    elif recipe.mtp is None:
        yield Problem(
            f"{said}: it is the layers for multi-token prediction that draft, and without the section mtp a run keeps none; set "
            "mtp.train=true (or false, which leaves them as they are), where the model has none mtp.init_layers, or draft_tokens=0"
        )
    elif facts.shape is not None and facts.shape.mtp_layers:
        allowed, asked = draft_lengths(facts.shape.mtp_layers), recipe.rollout.draft_tokens
        if asked != "auto" and asked not in allowed:
            yield Problem(
                f"{said}: with {facts.shape.mtp_layers} layers for multi-token prediction vLLM drafts "
                f"{', '.join(map(str, allowed))} tokens, and no other number"
            )


@rule
def temperatures_are_told_apart(facts: Facts) -> Iterator[Problem]:
    """Greedy is temperature 0; any other is large enough to divide logits by."""
    rollout = facts.recipe.rollout
    if 0 < rollout.temperature < LEAST_TEMPERATURE:
        yield Problem(
            f"rollout.temperature={rollout.temperature}: log-probs mean little at less than {LEAST_TEMPERATURE}, and vLLM would "
            "sample at that; use 0 for greedy, or at least that"
        )


@rule
def routes_need_experts(facts: Facts) -> Iterator[Problem]:
    """Only a model with experts has routes."""
    if facts.recipe.rollout.return_routes and facts.shape is not None and facts.shape.moe is None:
        yield Problem("rollout.return_routes=true: the model has no experts to send tokens to; remove it")


@rule
def routes_are_kept(facts: Facts) -> Iterator[Problem]:
    """Routes of a run are replayed in updates, or written with the samples that are kept; nothing else reads them."""
    recipe = facts.recipe
    kept = recipe.mismatch.replay_samples_per_step > 0 or recipe.engine.replay_routes == "rollout"
    if facts.command == "train" and recipe.rollout.return_routes and not kept:
        yield Problem(
            "rollout.return_routes=true is not read with mismatch.replay_samples_per_step=0: routes are kept with those samples "
            "alone; remove one of them, or set engine.replay_routes=rollout"
        )


@rule
def rollouts_read_no_eight_bits(facts: Facts) -> Iterator[Problem]:
    """Of a directory in 8 bits other engines make a model in 8 bits, which the trained weights are not, but where vLLM is told not to."""
    rollout, path = facts.recipe.rollout, facts.recipe.model.directory if facts.read is not None else None
    quantized = path is not None and read_config(path).get("quantization_config")
    if not quantized or rollout.backend == "native" or facts.command == "sft":
        return
    of_vllm = {
        "vLLM loads none of them; remove rollout.vllm.load_format": "load_format" in rollout.vllm,
        "vLLM's drafter would be started for 8 bits; use rollout.draft_tokens=0": rollout.draft_tokens != 0,
    }
    reasons = [one for one, met in of_vllm.items() if met]
    if rollout.backend == "sglang":
        reasons = ["SGLang would be started for 8 bits; use rollout.backend=vllm or native"]
    for why in reasons:
        yield Problem(
            f"rollout.backend={rollout.backend} with model.path={path}: its weights are in 8 bits, are trained in model.dtype, and {why}, "
            "or convert them once (quintet convert hf-to-mcore, then mcore-to-hf)",
            "model.path",
        )
