"""How weights are trained: optimizer, engine, the objective, steps of RL and of SFT."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from quintet.recipe.sections.fields import (
    Beta,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Pattern,
    PositiveFloat,
    PositiveInt,
    Section,
    UserPath,
)
from quintet.recipe.sections.model import Layout

Recomputed = Literal[
    "core_attn", "mlp", "mlp_act", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"
]
"""A module that selective recompute computes again."""


class Optimizer(Section):
    key: ClassVar[str] = "optimizer"
    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """adamw decouples weight decay from the gradient, adam adds it to the gradient (L2)."""
    lr: PositiveFloat = 1e-6
    lr_multipliers: Annotated[dict[Pattern, PositiveFloat], Field(max_length=100)] = {}
    """Factor on lr by parameter: a pattern of Hugging Face names such as "*.gate.weight" → factor; the first match counts."""
    frozen: Annotated[list[Pattern], Field(max_length=100)] = []
    """Weights that are not trained: patterns of Hugging Face names such as "*.mlp.gate.weight" (docs/balance.md)."""
    beta1: Beta = 0.9
    beta2: Beta = 0.98
    eps: PositiveFloat = 1e-8
    momentum: Beta = 0.9
    """Of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; norms and biases have none."""
    cpu_fraction: Fraction = 0.0
    """Share of the optimizer's state that lives on the CPU and is updated there (adamw in bf16, on GPUs), by the rank's share of its node's
    cores, or OMP_NUM_THREADS."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null leaves them."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    """cosine: steps from the end of warmup to the minimum (null: to the end of the run). wsd: length of the final decay."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of lr."""


class AuxLoss(Section):
    """A loss of routers that send many tokens to few experts, added to the policy's and the critic's; 1 a layer where load is even."""

    per: Literal["sequence", "batch"] = "sequence"
    """What is to be even: each sample in itself (DeepSeek-V3), or the whole mini-batch, whose tokens go through the model once more
    to be counted."""
    weight: PositiveFloat = 0.0001


_NO_FP8 = {
    "delayed": "its scales follow the largest numbers of earlier steps, which are kept outside of checkpoints and agreed on over a group "
    "of ranks that quintet does not make; use tensorwise or blockwise",
    "mxfp8": "it needs Blackwell GPUs and is untried here; use tensorwise or blockwise",
}


def _tried_fp8(value: object) -> object:
    if isinstance(value, str) and value in _NO_FP8:
        raise ValueError(_NO_FP8[value])
    return value


class Engine(Section):
    tokens_per_microbatch_per_rank: PositiveInt = 8192
    """Hard token budget of a packed micro-batch on one rank, padding included. The longest sample fits into cp times it."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over dp and cp."""
    backend: Literal["auto", "portable", "transformer_engine"] = "auto"
    """Layers: portable needs torch and megatron-core alone; auto takes TransformerEngine on GPUs where it is installed."""
    experts: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Whose products compute a layer's experts beside TransformerEngine's layers: its own, one an expert, or torch's, one for all of a rank's
    experts, which the host launches sooner. auto takes torch's where they were measured faster (docs/layouts.md)."""
    fp8: Annotated[Literal["tensorwise", "blockwise"] | None, BeforeValidator(_tried_fp8)] = None
    """Multiply the layers' matrices in 8 bits, by TransformerEngine on Hopper GPUs: tensorwise has a scale a tensor, blockwise one for
    128 × 128 weights and for 128 numbers of a token. Weights, head, routers and norms stay in model.dtype (docs/fp8.md)."""
    cp_comm: Literal["all_gather", "all_to_all"] = "all_gather"
    """How context-parallel ranks share attention: keys and values gathered, or heads exchanged (cp * tp then divides the
    KV heads, with latent attention the heads)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: of no, of some (`recompute_modules`), or of every layer."""
    recompute_modules: list[Recomputed] | None = None
    """What recompute=selective computes again, in megatron-core's names, and mlp_act, the activation function of layers without experts;
    null takes what the model has of mlp, moe_act, shared_experts and mla_up_proj."""
    replay_routes: Literal["old", "rollout"] | None = None
    """The experts that tokens are sent to in every update: as recorded when the old log-probs are computed, or as the rollout chose
    them, then for the old log-probs too; null is as the router chooses each time (docs/routes.md)."""
    aux_loss: AuxLoss | None = None
    """Even out the load of experts by a loss when present (docs/balance.md)."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of a loss that keeps routers' logits small: the squared log-sum-exp of each token's, a mean over tokens, summed over
    layers; ST-MoE took 0.001."""
    expert_bias_rate: Annotated[Fraction, "more outweighs a router's scores; DeepSeek-V3 took 0.001"] = 0.0
    """What each update adds to the stored bias of experts that got fewer tokens than the mean, and takes off the others'; 0 leaves it
    (docs/balance.md)."""
    row_buckets: bool = False
    """Pad each row to the next of about 19 sizes, from an eighth of the token budget to all of it, so that kernels and the allocator see few
    shapes (docs/layouts.md)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over dp and cp in buckets during the backward pass of a mini-batch's last micro-batch, instead of all after it."""
    overlap_param_gather: bool = False
    """Gather what the distributed optimizer's ranks updated while the first micro-batch of the next mini-batch computes, layer by layer
    (on later pipeline stages, all layers at once), instead of before it; needs engine.overlap_grad_reduce, whose buckets it takes. Weight sync
    and log-probs wait for all: it can gain with several mini-batches a step."""
    overlap_dispatch: bool = False
    """Send the tokens of a row to their experts in two halves, so that one travels while the other is computed, in backward too; needs
    layout.ep above 1."""
    offload_params: Fraction | Literal["auto"] = "auto"
    """Share of the parameters on the CPU while generating; above 0 needs a rollout.layout, whose weights are its own. auto is the least
    that has to make room for the rollout, by the memory formula; the run's first lines say how much (docs/hybrid.md)."""
    offload_grads: Fraction | Literal["auto"] = "auto"
    """Share of the gradient buffers given back while generating."""
    offload_optimizer: Fraction | Literal["auto"] = "auto"
    """Share of the optimizer's state on the CPU while generating."""
    megatron: dict[str, Any] = {}
    """Further TransformerConfig fields of megatron-core, as they are named there: those that no other key decides and that
    quintet's layers read (docs/layouts.md lists them). TransformerEngine's kernels for experts, moe_permute_fusion and
    moe_router_fusion, are taken where they were measured faster, the first also where it was not measured, unless they are set here."""

    @property
    def without_fp8(self) -> Self:
        """Return the section as native rollouts are built by it, whose rows of a token each fit no block."""
        return self.model_copy(update={"fp8": None})


NAME_SETS: dict[str, dict[str, Any]] = {"dr_grpo": {"aggregation": "fixed_length", "normalize_by_std": False}}
"""Keys of the section whose defaults are others under an algorithm's name."""


class Algorithm(Section):
    name: Literal["grpo", "dr_grpo", "dapo", "ppo"] = "grpo"
    """grpo compares the samples of a group; dr_grpo does so without what favours short right and long wrong responses (it sets
    aggregation=fixed_length and normalize_by_std=false where the recipe does not); dapo takes groups that carry a signal alone, and
    generates more in place of the others (dynamic sampling); ppo compares each token with what a critic expected. See
    docs/algorithms.md."""
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Clip-higher (DAPO): the ratio stays within [1 - clip_low, 1 + clip_high]."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How per-token losses become one number: over all tokens of the mini-batch, within each sample first, or (fixed_length) as their
    sum over samples × rollout.max_response_tokens, so that a token weighs the same in every sample and step."""
    normalize_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference policy (the weights RL starts from); 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k2 or k3 in the loss, k1 in the reward, where it is the default: of each the gradient holds the policy to the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: as a term of the policy's loss, or (ppo) taken off each token's reward."""
    max_refills: PositiveInt = 3
    """Of dapo: how often a step generates as many prompts again as it lacks groups with a signal, at most."""
    gamma: Fraction = 1.0
    """Of ppo: discount of a token's reward, per token after it."""
    gae_lambda: Fraction = 0.95
    """Of ppo: discount of longer estimates of an advantage (generalized advantage estimation)."""

    @model_validator(mode="after")
    def _what_the_name_sets(self) -> Self:
        # Written into the fields, so that the resolved recipe says it and reads back to the same.
        for key, value in NAME_SETS.get(self.name, {}).items():
            if key not in self.model_fields_set:
                setattr(self, key, value)
        if self.kl_coef and self.kl_in == "reward" and "kl_estimator" not in self.model_fields_set:
            self.kl_estimator = "k1"
        return self


class Reference(Section):
    """The reference policy: the weights RL starts from."""

    layout: Layout | None = None
    """null is the policy's. Over the same ranks."""


class CriticOptimizer(Optimizer):
    """The critic's own optimizer."""

    key: ClassVar[str] = "critic.optimizer"


class Critic(Section):
    """The value model of ppo."""

    path: UserPath | None = None
    """Hugging Face directory to start from; null starts from the policy as RL begins. A head that it lacks starts at zero."""
    layout: Layout | None = None
    """null is the policy's. Over the same ranks."""
    optimizer: CriticOptimizer | None = None
    """null is the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the beginning in which the critic learns alone."""
    value_clip: PositiveFloat | None = 0.2
    """Farthest that a value may move from what it was before the step and still be followed; null clips nothing."""


class Train(Section):
    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 64
    mini_batches_per_step: PositiveInt = 1
    """Optimizer steps on the samples of one step."""
    eval_every_steps: NonNegativeInt = 0
    """0 evaluates before the first and after the last step only."""
    eval_prompts: NonNegativeInt = 256
    """Held-out prompts of one evaluation; 0 evaluates none."""
    eval_samples_per_prompt: PositiveInt = 8


class SftOptimizer(Optimizer):
    """The optimizer of SFT: a class of its own, so that naming one key leaves the default of `lr` alone."""

    key: ClassVar[str] = "sft.optimizer"
    lr: PositiveFloat = 1e-5


class Sft(Section):
    """Supervised fine-tuning: the whole of `quintet sft`, or the warm-up before `quintet train`."""

    steps: PositiveInt = 100
    samples_per_step: PositiveInt = 64
    stop_at_loss: PositiveFloat | None = None
    """End early once the loss, averaged over about ten steps, is below this; null takes all steps."""
    optimizer: SftOptimizer = SftOptimizer()
