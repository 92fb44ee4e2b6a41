"""What generates, and how far it may part from the trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quintet.recipe.sections.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Section,
)


class RolloutLayout(Section):
    tp: Ranks = 1
    """Tensor parallel. Divides heads, KV heads and MLP width; with vllm and sglang it may also be a multiple of the KV heads."""
    pp: Ranks = 1
    """Pipeline parallel."""
    ep: Ranks = 1
    """Expert parallel."""


class Rollout(Section):
    backend: Literal["native", "vllm", "sglang"] = "native"
    mode: Literal["offline", "server"] = "offline"
    """Of vllm: offline answers a step's requests together, server takes them one by one (its asynchronous engine)."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated generates on the devices that train, which change hands between the phases; separate on `ranks` of its own."""
    ranks: Ranks | None = None
    """Devices of a separate rollout."""
    own_processes: bool = False
    """Native colocated rollouts in processes of their own, as vllm and sglang always are; false runs them in the trainer's."""
    restart: bool = False
    """Start a rollout process that died anew, bring it the weights, and generate again what it owed; false ends the run."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """What a colocated rollout gives up while training: 0 nothing (vllm); its KV cache and its weights, of which 1 keeps a copy in host
    memory and 2 none. auto is 0 where vllm and all of training fit the device by the memory formula, else 2, or 1 where adapters alone travel."""
    bucket_mib: PositiveInt = 256
    """Weights travel in buckets of this size; two at most are in memory at once."""
    sync_proof: bool = True
    """Compare fingerprints of the rollout's live weights with the engine's after each sync."""
    adapter_sync: Literal["merged", "separate"] | None = None
    """Of vllm, with lora: merged sends the weights with the adapters in them; separate has vLLM read the frozen weights from
    the model's directory and compute the adapters beside them, which alone are sent. null is merged. Native rollouts always get
    adapters alone, sglang always merged weights."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference of log-probs on fixed tokens where weights cannot be read back, but for those that experts in bf16 send
    elsewhere; null is 0.002 in fp32, 0.25 in bf16, 1 with rollout.quantization."""
    quantization: Literal["fp8"] | None = None
    """fp8: the rollout's matrices in 8 bits with a scale for each block of 128 × 128 (vllm on GPUs)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a device's memory for weights and KV cache of vllm or sglang."""
    return_routes: bool = False
    """Samples tell the experts that each token was sent to (mixture-of-experts models)."""
    layout: RolloutLayout | None = None
    """null is, of a native rollout in the trainer's processes, the training layout: it then reads the engine's own parameters,
    which works without cp, ep, etp and vpp; of any other, one device a copy. Another layout is resharded after each step."""
    samples_per_prompt: PositiveInt = 8
    max_response_tokens: PositiveInt = 512
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps every token."""
    min_p: Fraction = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[NonNegativeInt] = []
    """Besides the tokenizer's end-of-sequence token."""
    draft_tokens: Annotated[int, Field(ge=0, le=8)] | Literal["auto"] = 0
    """Of vllm, with mtp: tokens that the model's layers for multi-token prediction draft ahead, which the policy accepts or replaces: what
    is generated has the same distribution, and log-probs, as with 0. auto takes what was measured to be the fastest."""
    sequences_per_rank: PositiveInt = 256
    """Most sequences decoded at once on one rank; also the KV cache's slots."""
    vllm: dict[str, Any] = {}
    sglang: dict[str, Any] = {}


class Mismatch(Section):
    """How far rollout and trainer may part in the log-probs of the same tokens: see docs/mismatch.md."""

    token_threshold: PositiveFloat = 0.5
    """|Δ log-prob| above which a token counts as over the threshold (metric mismatch/over_threshold)."""
    stop_above_kl: PositiveFloat | None = None
    """Stop the run when the KL (k3) of rollout to trainer over a step's tokens is above this; null never does."""
    replay_samples_per_step: NonNegativeInt = 4
    """Samples kept with tokens and log-probs, below replay/ of the run directory, for `quintet diagnose mismatch`."""
