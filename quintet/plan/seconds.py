"""Seconds of a step by phase, and the share of the GPUs' arithmetic (MFU) that they make use of, from the recipe and a config.json alone.

    generate  as many decode steps as the longest response has tokens, or as the slots make necessary. Each reads the weights that its
              sequences meet and their cache, or multiplies by them, whichever takes longer, and takes `decode_step_s` besides. Before, what
              leaves of the trainer goes to the host; after, it comes back
    logprob   a forward pass for each policy whose log-probs are wanted
    train     a forward and a backward pass, of twice its FLOPs, and what is computed again; the optimizer's part on the host
    sync      weights over a link to the rollout

A pipeline of pp stages in vpp chunks stands still for (pp - 1) / (m vpp + pp - 1) of its time with m micro-batches (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2), and waits for the stage with the most to do. Taken to cost nothing: what the
trainer's tp, cp and ep exchange, samples and experts that load ranks unevenly, drafts and the heads of layers for multi-token
prediction, rewards, and whatever is between the phases. Nothing overlaps, and 8 bits are taken to gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.stages import slowest_over_mean
from quintet.plan.cards import Card
from quintet.plan.fullest import setup_of
from quintet.plan.memory import rank_memory
from quintet.plan.offload import leaves
from quintet.plan.phases import ranks_of_node
from quintet.plan.rollout import rollout_bytes, token_bytes
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from quintet.recipe.derived import critic_shape, roles_of
from quintet.recipe.rollout import RolloutPlacement, placement_of

PEAK_SHARE = 0.53
"""Of the card's FLOP/s, that passes of packed rows reach on one rank (engine.json: mfu of qwen2.5-1.5b/te)."""
BANDWIDTH_SHARE = 0.87
"""Of the memory's, that reading and writing reaches (sync.json: copy_rate, both ways)."""
DECODE_LAYER_S = {"vllm": 60e-6, "sglang": 60e-6, "native": 1.14e-3}
"""A layer of a decode step but for what it reads and multiplies: launches and small kernels (rollout.json: qwen2.5-1.5b/1gpu, all at once
and long-tail; mtp.json: 400m/vllm/seqs1). What a step takes besides its layers is in it. SGLang's was not measured."""
DECODE_SEQUENCE_S = {"vllm": 5.5e-6, "sglang": 11.5e-6, "native": 8.7e-6}
"""What a sequence adds to that: sampling, and scheduling where that is Python (the same of rollout.json, which differ in how many are alive; of
SGLang that of vLLM with its own scheduler)."""
ALL_REDUCE_S, ALL_REDUCE_BYTE_S = 9e-6, 19e-12
"""Of a sum over tp ranks of a node, whatever it is of, and for a byte that a rank sends; up to 1 MiB of vLLM's kernel on 2 to 8 H100s,
measured in https://github.com/sgl-project/sglang/pull/2904."""
SYNC_RATE = 44e9
"""Bytes a second that a rollout's rank is sent (sync.json: qwen3-30b-a3b/2gpu); a 400 Gb/s link between nodes gives as much."""
OFFLOAD_RATE = 50e9
"""Bytes a second between a GPU and its host (memory.json: parameters_gib and optimizer_gib over offload_s, reload_s)."""
HOST_RATE = 200e9
"""Bytes a second of a node's host memory while it updates weights. Assumed, not measured."""


@dataclass(frozen=True)
class Samples:
    """A step's samples. Tokens are means; longest: of a response."""

    prompts: int
    per_prompt: int
    prompt_tokens: float
    response_tokens: float
    longest: int

    @property
    def count(self) -> int:
        return self.prompts * self.per_prompt

    @property
    def tokens(self) -> float:
        """Tokens of all samples together."""
        return self.count * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class PhaseTime:
    """seconds of a phase, and what it computes, in FLOPs of which none is counted twice."""

    seconds: float
    flops: float


def samples_of(recipe: schema.Recipe, means: Sequence[float] | None = None) -> Samples:
    """Return the samples of a recipe's step. means: tokens of a prompt and of a response; None is the most that the recipe allows.

    Raises UserError for means beyond that.
    """
    rollout = recipe.rollout
    most = (recipe.data.max_prompt_tokens, rollout.max_response_tokens)
    prompt, response = means or most
    if not (0 < prompt <= most[0] and 0 < response <= most[1]):
        raise UserError(
            f"--mean-tokens {prompt} {response}: a prompt has 1 to {most[0]} tokens (data.max_prompt_tokens), a response 1 to {most[1]} "
            "(rollout.max_response_tokens)"
        )
    return Samples(recipe.train.prompts_per_step, rollout.samples_per_prompt, prompt, response, most[1])


def plan_seconds(
    recipe: schema.Recipe, shape: ModelShape, card: Card, samples: Samples, device_bytes: int | None = None
) -> dict[str, PhaseTime]:
    """Return the time of each phase, in the order in which they follow each other. Training state leaves, and comes back, within that of
    generation, as in a run. device_bytes: as in `plan_stages`."""
    setup = replace(setup_of(recipe, shape), optimizer=recipe.optimizer)
    held = [rank_memory(setup, Place(pp=stage)) for stage in range(recipe.layout.pp)]
    away, _ = leaves(recipe, shape, device_bytes)
    moved = max(one.parameters * away["params"] + one.optimizer * away["optimizer"] for one in held)
    generate = _generate(recipe, setup, card, samples, device_bytes)
    return {
        "generate": replace(generate, seconds=generate.seconds + 2 * moved / OFFLOAD_RATE),
        "logprob": _score(recipe, setup, card, samples),
        "train": _train(recipe, setup, card, samples, max(one.host_optimizer for one in held)),
        "sync": PhaseTime(_sync(recipe, setup), 0.0),
    }


def mfu(times: Sequence[PhaseTime], card: Card, ranks: int) -> float:
    """Return the share of the ranks' FLOP/s that phases make use of together."""
    seconds = sum(one.seconds for one in times)
    return sum(one.flops for one in times) / (seconds * ranks * card.flops) if seconds else 0.0


def _forward(shape: ModelShape, samples: Samples) -> float:
    """FLOPs of one forward pass over all samples: a third of those of training."""
    context = (samples.prompt_tokens + samples.response_tokens) / 2
    return samples.tokens * shape.flops_per_token(context) / 3


def _passes(
    recipe: schema.Recipe, setup: Setup, card: Card, samples: Samples, flops: float, runs: int
) -> float:
    """Seconds of passes with these FLOPs over all samples, in so many runs of the pipeline one after the other."""
    layout, tokens = recipe.layout, recipe.engine.tokens_per_microbatch_per_rank
    # As many micro-batches side by side, of dp and of cp.
    copies = recipe.cluster.ranks // (layout.tp * layout.pp)
    microbatches = max(1, math.ceil(samples.tokens / (runs * copies * tokens)))
    idle = (layout.pp - 1) / (microbatches * layout.vpp + layout.pp - 1)
    stages = [layout.layers_of(setup.shape.layers, stage) for stage in range(layout.pp)]
    even = flops / (recipe.cluster.ranks * card.flops * PEAK_SHARE)
    return even * slowest_over_mean(setup.shape, stages) / (1 - idle)


def _score(recipe: schema.Recipe, setup: Setup, card: Card, samples: Samples) -> PhaseTime:
    algorithm = recipe.algorithm
    old = recipe.train.mini_batches_per_step > 1 or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")
    scored = old + ("reference" in roles_of(recipe))
    flops = _forward(setup.shape.without_mtp(), samples) * scored + _of_critic(recipe, setup, samples)
    return PhaseTime(_passes(recipe, setup, card, samples, flops, 1), flops)


def _train(recipe: schema.Recipe, setup: Setup, card: Card, samples: Samples, on_host: int) -> PhaseTime:
    """Selective recompute is taken to cost nothing; frozen weights have no gradients. on_host: bytes of a rank's optimizer there.
    What is computed again, or beforehand to be counted, takes time and is no use."""
    forward = _forward(setup.shape, samples) + _of_critic(recipe, setup, samples)
    flops = forward * (3 if recipe.lora is None else 2)
    steps = recipe.train.mini_batches_per_step
    counted = recipe.engine.aux_loss is not None and recipe.engine.aux_loss.per == "batch"
    again = forward * ((recipe.engine.recompute == "full") + counted)
    seconds = _passes(recipe, setup, card, samples, flops + again, steps)
    # What is on the host is read and written.
    return PhaseTime(seconds + steps * 2 * on_host * ranks_of_node(recipe) / HOST_RATE, flops)


def _of_critic(recipe: schema.Recipe, setup: Setup, samples: Samples) -> float:
    """FLOPs of a critic's forward pass."""
    return _forward(critic_shape(recipe, setup.shape), samples) if "critic" in roles_of(recipe) else 0.0


def _sync(recipe: schema.Recipe, setup: Setup) -> float:
    """Seconds in which the rollout has its weights: none where it shares them, hardly any where it is sent adapters."""
    if placement_of(recipe).adapters_separate:
        return 0.0
    return rollout_bytes(recipe, setup, None)[0] / SYNC_RATE


def _generate(
    recipe: schema.Recipe, setup: Setup, card: Card, samples: Samples, device_bytes: int | None
) -> PhaseTime:
    placement, shape = placement_of(recipe), setup.shape.without_mtp()
    layout = placement.layout
    cache = rollout_bytes(recipe, setup, device_bytes)[1]
    here = samples.count / placement.copies
    seen = samples.prompt_tokens + samples.response_tokens / 2
    of_token = _cache_of_token(recipe, setup, placement)
    slots = min(here, recipe.rollout.sequences_per_rank, max(1.0, cache / (of_token * seen)))
    steps = max(samples.longest, here * samples.response_tokens / slots)
    live = here * samples.response_tokens / steps
    ranks = layout.tp * layout.pp
    read = _met(shape, live) * setup.width / ranks + live * seen * of_token
    each = shape.flops_per_token(seen) / 3
    reading = read / (card.bandwidth * BANDWIDTH_SHARE)
    multiplying = live * each / (ranks * card.flops * PEAK_SHARE)
    step = max(reading, multiplying) + decode_step_s(
        recipe.rollout.backend, shape, live, layout.tp, setup.width
    )
    # A prompt is read once for all of its samples.
    before = samples.prompts * samples.prompt_tokens * shape.flops_per_token(samples.prompt_tokens / 2) / 3
    prefill = before / (placement.copies * ranks * card.flops * PEAK_SHARE)
    return PhaseTime(prefill + steps * step, before + samples.count * samples.response_tokens * each)


def decode_step_s(backend: str, shape: ModelShape, sequences: float, tp: int, width: int) -> float:
    """Return the seconds of a decode step but for what it reads and multiplies. width: bytes of a number."""
    sums = 2 * shape.layers * all_reduce_s(sequences * shape.hidden_size * width, tp)
    return shape.layers * DECODE_LAYER_S[backend] + sequences * DECODE_SEQUENCE_S[backend] + sums


def all_reduce_s(size: float, tp: int) -> float:
    """Return the seconds of a sum of so many bytes over tp ranks; over one it is none."""
    return ALL_REDUCE_S + ALL_REDUCE_BYTE_S * size * 2 * (tp - 1) / tp if tp > 1 else 0.0


def _cache_of_token(recipe: schema.Recipe, setup: Setup, placement: RolloutPlacement) -> int:
    """Bytes of the KV cache of one token, in all layers of a rank."""
    layers = -(-setup.shape.layers // placement.layout.pp)
    latent = recipe.rollout.backend != "native"
    return layers * token_bytes(setup.shape, placement.layout.tp, setup.width, latent=latent)


def _met(shape: ModelShape, sequences: float) -> float:
    """Weights that at least one of the sequences meets in a step, each with experts of its own choice; of the embedding hardly any."""
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    if (moe := shape.moe) is None or moe.experts == moe.top_k:
        return shape.parameter_count - embedding
    each = (shape.parameter_count - shape.active_parameter_count) / (moe.experts - moe.top_k)
    met = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** sequences)
    return shape.parameter_count - embedding - each * (moe.experts - met)
