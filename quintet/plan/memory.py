"""Memory of one rank, part by part, from the recipe alone.

Parameters, gradients and optimizer state are exact: they are what the engine allocates. Activations, the head and the
workspaces follow `quintet.plan.activations` and the head's own chunking (`quintet.engine.head`). Not counted are what a
process has before any tensor (CUDA context, communication buffers), fragmentation, and the rollout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quintet.plan.activations import of_chunk, workspace
from quintet.plan.parameters import Parameter, buffers, chunks
from quintet.plan.setup import Place, Setup
from quintet.recipe.fp8 import experts_in_8_bits

KEPT_LOGITS_BYTES = {"cuda": 5 << 30, "cpu": 1 << 30}
CHUNK_LOGITS_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
"""As `quintet.engine.head` has them."""
_DISTILLED_AT_ONCE = 1 << 24
"""As `quintet.engine.distill` has it."""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory that one rank takes, by what they are for.

    activations: all that micro-batches in flight keep. head: logits or values, and their gradients, while they
    exist. workspace: the most that the backward pass of a layer has besides. step_workspace: the same of the
    optimizer's update. copies: of weights in 8 bits (engine.fp8), while micro-batches are computed. host_optimizer: optimizer state in host memory (`optimizer.cpu_fraction`).
    masters: what there is of optimizer before the first step. read, saved: what a load of a checkpoint takes of the host before that step,
    beyond host_optimizer, and what saves copy there; of ranks that hold the same each saves its part, but what tp does not cut, and an
    embedding on two stages, count for each.
    """

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    head: int = 0
    workspace: int = 0
    step_workspace: int = 0
    host_optimizer: int = 0
    copies: int = 0
    masters: int = 0
    read: int = 0
    saved: int = 0

    @property
    def static(self) -> int:
        """The bytes that are there between steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most bytes at once: the head's moment, a layer's backward pass, or the update."""
        computing = self.copies + self.activations + max(self.head, self.workspace)
        return self.static + max(computing, self.step_workspace)


def rank_memory(setup: Setup, place: Place | None = None) -> Memory:
    """Return the memory of the rank at `place` (the first of its stage, unless given) when it trains on full micro-batches.

    Without an optimizer: of its parameters alone.
    """
    place = place or Place()
    parts = chunks(setup, place.pp)
    held = sum(p.numel for part in parts for p in part)
    if setup.optimizer is None:
        return Memory(parameters=held * setup.width)
    flat = buffers(setup, place, parts)
    padded, owned = sum(one.numel for one in flat), sum(one.owned for one in flat)
    # The distributed optimizer moves parameters into a buffer like the gradients', padding and all.
    frozen = sum(p.numel for part in parts for p in part if not p.trained)
    parameters = frozen + padded if setup.engine.distributed_optimizer else held
    per_element, on_host = _state_bytes(setup)
    away = int(owned * setup.optimizer.cpu_fraction)
    stored = [p for part in parts for p in part if p.trained or setup.lora is None]
    sliced, states = setup.engine.distributed_optimizer, owned * per_element
    return Memory(
        parameters=parameters * setup.width,
        gradients=4 * padded,
        optimizer=(owned - away) * per_element,
        host_optimizer=away * on_host,
        activations=_activations(setup, place.pp),
        head=_head(setup) if place.pp == setup.last else 0,
        workspace=workspace(setup),
        step_workspace=_update(setup, owned - away),
        copies=_copies(setup, place.pp),
        masters=(owned - away) * (per_element - on_host + 8),
        # Of host_optimizer the first step makes the copies of gradients, and moments take the place of what was read.
        read=sum(p.numel for p in stored) * setup.width + states - (on_host - 4) * away,
        saved=_in_turns(setup, stored, setup.width)
        + (states if sliced else _in_turns(setup, (p for p in stored if p.trained), per_element)),
    )


def _in_turns(setup: Setup, parameters: Iterable[Parameter], each: int) -> int:
    """Bytes of which each of the ranks that hold the same writes its part, in the mean."""
    return sum(p.numel * each // (setup.edp if p.expert else setup.dp_cp) for p in parameters)


def packed_bytes(setup: Setup, stage: int = 0) -> int:
    """Return the bytes of the copies of weights by which a native rollout multiplies while it generates on a CPU
    (`quintet.engine.layers.linear`): of linear layers that are whole, and of the head. 0 in bf16, and on GPUs."""
    if setup.device != "cpu" or setup.dtype != "fp32":
        return 0
    held = [p for part in chunks(setup, stage) for p in part]
    linear = (
        [p.numel for p in held if _PACKED.fullmatch(p.name) and not p.expert] if setup.layout.tp == 1 else []
    )
    heads = [p.numel for p in held if p.name in ("output_layer.weight", "embedding.word_embeddings.weight")]
    return 4 * (sum(linear) + (heads[-1] if stage == setup.last else 0))


_PACKED = re.compile(r"decoder\..*\.linear_(qkv|proj|fc1|fc2|q_proj|\w+_up_proj)\.weight")
"""Linear layers that are cut over tp; the latents' own projections are not."""


def _copies(setup: Setup, stage: int) -> int:
    """Of the matrices that are multiplied in 8 bits: as they are for the forward product, and transposed for the input's gradient;
    of blocks an fp32 scale in each. TransformerEngine makes them in the first micro-batch, and `Pipeline.run` drops them."""
    if setup.engine.fp8 is None:
        return 0
    experts = experts_in_8_bits(setup.shape)
    parts = chunks(setup, stage)
    held = sum(
        p.numel for part in parts for p in part if _PACKED.fullmatch(p.name) and (experts or not p.expert)
    )
    return 2 * held + (2 * 4 * held // 128**2 if setup.engine.fp8 == "blockwise" else 0)


def _state_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of state an element: on the device, and where it is on the host with its copy of the gradient.

    Adam has two fp32 moments, SGD one; bf16 parameters have an fp32 master. (ZeRO's K: Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054, section 3.1)
    """
    recipe = setup.optimizer
    assert recipe is not None
    # TransformerEngine's SGD, which core takes on GPUs, holds a momentum also where that is 0.
    moments = 8 if recipe.name != "sgd" else (4 if recipe.momentum or setup.device == "cuda" else 0)
    master = 4 if setup.dtype == "bf16" else 0
    return moments + master, moments + 4 + 4


def _update(setup: Setup, elements: int) -> int:
    """Adam's kernels need nothing. torch's SGD on a GPU adds weight decay to a copy of all gradients."""
    recipe = setup.optimizer
    assert recipe is not None
    on_gpu = setup.device == "cuda" and setup.backend == "portable"
    return 4 * elements if recipe.name == "sgd" and recipe.weight_decay and on_gpu else 0


def _activations(setup: Setup, stage: int) -> int:
    """All micro-batches in flight. Stage p of the 1F1B schedule has pp - p of them before its first backward pass, and
    an interleaved one 2 (pp - p - 1) + (vpp - 1) pp + 1 passes through a chunk (Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473, section 2.2)."""
    layout, shape = setup.layout, setup.shape
    kept = []
    for part, layers in enumerate(layout.layers_of(shape.layers, stage)):
        ends = stage == setup.last and part == layout.vpp - 1
        kept.append(of_chunk(setup, layers, ends=ends))
    if layout.vpp == 1:
        flying = layout.pp - stage
        return kept[0] * min(flying, setup.microbatches or flying)
    passes = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    if setup.microbatches:
        passes = min(passes, setup.microbatches * layout.vpp)
    # Chunks take turns, pp micro-batches each.
    turns = [min(layout.pp, max(0, passes - start)) for start in range(0, passes, layout.pp)]
    return sum(kept[i % layout.vpp] * n for i, n in enumerate(turns))


def _head(setup: Setup) -> int:
    """Logits of one micro-batch's trained tokens: those kept and those of a chunk; their hidden states and what they are
    gradients of; the weight's gradient, of more than one chunk an fp32 sum besides. Heads of layers for multi-token prediction
    have as many tokens each; those that keep logits share the memory for them, and those that are distilled keep none."""
    shape, w = setup.shape, setup.width
    tokens = setup.tokens if setup.trained_tokens is None else setup.trained_tokens
    hidden = shape.hidden_size
    stream = setup.tokens * hidden * w  # the gradient of the stage's output
    if shape.head == "value":
        return tokens * (hidden * (w + 8) + 4) + stream  # rows and their gradients in fp32, and in w bytes
    rows, heads = -(-shape.vocab_size // setup.layout.tp), 1 + setup.depths
    logits = tokens * rows * w
    distilled = setup.mtp is not None and setup.mtp.loss == "self_distill" and heads > 1
    keeping = 1 if distilled else heads
    kept = min(logits, KEPT_LOGITS_BYTES[setup.device] // keeping // (rows * w) * rows * w)
    chunk = min(logits - kept, CHUNK_LOGITS_BYTES[setup.device])
    if distilled:  # of both sides, in fp32
        chunk = max(chunk, 8 * min(tokens * rows, _DISTILLED_AT_ONCE))
    weight = 0 if setup.lora else rows * hidden * (w if not chunk else w + 4)
    teacher = tokens * setup.layout.cp * hidden * w if distilled else 0
    return keeping * kept + chunk + weight + heads * tokens * (2 * hidden * w + 4 * 6) + teacher + stream
