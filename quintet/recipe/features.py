"""What a recipe can switch on, which two of those cannot be combined, and what this version does not offer yet.

Each is on or off by the recipe and the model's shape alone. What cannot work is refused by name, with what to do
instead; nothing is ever ignored. The tables here are the one place for it: the rules iterate over them, and so does the
test that wants every pair of features either tried or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.models.shape import ModelShape
from quintet.recipe.rollout import own_processes
from quintet.recipe.schema import Optimizer, Recipe

IsOn = Callable[[Recipe, ModelShape | None], bool]


@dataclass(frozen=True)
class Feature:
    """One thing a recipe can switch on: its name in messages, the keys that do it, and how to tell.

    choice: features of the same choice are values of one key and never on together.
    needs: what must be on with it. engine: of the training engine, rather than of the rollout or the loop.
    """

    id: str
    name: str
    keys: tuple[str, ...]
    is_on: IsOn
    choice: str = ""
    needs: tuple[str, ...] = ()
    engine: bool = True

    @property
    def key(self) -> str:
        return self.keys[0]


@dataclass(frozen=True)
class RefusedPair:
    """Two features, by id, that cannot be combined: why, and what to do instead.

    `instead` may name {tp} and {pp}, the sizes of the training layout. commands: those that would combine them.
    """

    first: str
    second: str
    why: str
    instead: str
    commands: tuple[str, ...] = ("train", "sft", "generate", "eval")

    def sentence(self, recipe: Recipe | None = None) -> str:
        """What the user is told; without a recipe, with "…" for its sizes."""
        a, b = FEATURES[self.first], FEATURES[self.second]
        sizes = {name: getattr(recipe.layout, name) if recipe else "…" for name in ("tp", "pp")}
        instead = self.instead.format(**sizes)
        return f"{a.key} ({a.name}) does not go with {b.key} ({b.name}): {self.why}; {instead}"


@dataclass(frozen=True)
class NotAvailable:
    """A feature this version does not have, and what a user does instead."""

    feature: Feature
    instead: str


@dataclass(frozen=True)
class NeedsGpu:
    """A feature that does not work on CPU ranks: why, and what a user does instead."""

    feature: str
    why: str
    instead: str

    @property
    def sentence(self) -> str:
        one = FEATURES[self.feature]
        return f"{one.key} ({one.name}) needs GPUs: {self.why}; {self.instead}"


def optimizers(recipe: Recipe) -> dict[str, Optimizer]:
    """The optimizer sections of a recipe, by key."""
    found = {"optimizer": recipe.optimizer}
    return found if recipe.sft is None else found | {"sft.optimizer": recipe.sft.optimizer}


def expert_tp(recipe: Recipe) -> int:
    """Size of the expert tensor-parallel axis."""
    return recipe.layout.tp if recipe.layout.etp is None else recipe.layout.etp


def data_parallel(recipe: Recipe) -> int:
    """Size of the data-parallel axis; meaningful once the layout divides the ranks."""
    layout = recipe.layout
    return max(1, recipe.cluster.ranks // (layout.tp * layout.pp * layout.cp))


def shares_weights(recipe: Recipe) -> bool:
    """Whether the rollout reads the engine's own parameters: its layout is the training layout."""
    layout, rollout = recipe.layout, recipe.rollout.layout
    if own_processes(recipe):
        return False
    return rollout is None or type(layout)(tp=rollout.tp, pp=rollout.pp).model_dump() == layout.model_dump()


def _has_experts(shape: ModelShape | None) -> bool:
    return shape is not None and shape.moe is not None


def _any_optimizer(is_on: Callable[[Optimizer], bool]) -> IsOn:
    return lambda recipe, shape: any(is_on(one) for one in optimizers(recipe).values())


def _of_optimizers(name: str) -> tuple[str, ...]:
    return f"optimizer.{name}", f"sft.optimizer.{name}"


_ENGINE = [
    Feature("dp", "data parallelism", ("cluster.ranks",), lambda r, s: data_parallel(r) > 1),
    Feature("tp", "tensor parallelism", ("layout.tp",), lambda r, s: r.layout.tp > 1),
    Feature("sp", "sequence parallelism", ("layout.sp",), lambda r, s: r.layout.sp, needs=("tp",)),
    Feature("pp", "pipeline parallelism", ("layout.pp",), lambda r, s: r.layout.pp > 1),
    Feature(
        "vpp",
        "the interleaved pipeline",
        ("layout.vpp",),
        lambda r, s: r.layout.vpp > 1 and r.layout.pp > 1,
        needs=("pp",),
    ),
    Feature(
        "cp_all_gather",
        "context parallelism by all-gather",
        ("layout.cp", "engine.cp_comm"),
        lambda r, s: r.layout.cp > 1 and r.engine.cp_comm == "all_gather",
        choice="engine.cp_comm",
    ),
    Feature(
        "cp_all_to_all",
        "context parallelism by all-to-all",
        ("layout.cp", "engine.cp_comm"),
        lambda r, s: r.layout.cp > 1 and r.engine.cp_comm == "all_to_all",
        choice="engine.cp_comm",
    ),
    Feature(
        "ep",
        "expert parallelism",
        ("layout.ep",),
        lambda r, s: _has_experts(s) and r.layout.ep > 1,
        needs=("experts",),
    ),
    Feature(
        "etp",
        "tensor parallelism of experts",
        ("layout.etp", "layout.tp"),
        lambda r, s: _has_experts(s) and expert_tp(r) > 1,
        needs=("experts",),
    ),
    Feature(
        "etp_apart",
        "experts cut otherwise than the rest of the model",
        ("layout.etp",),
        lambda r, s: _has_experts(s) and expert_tp(r) != r.layout.tp,
        needs=("experts", "ep"),
    ),
    Feature("experts", "experts", ("model.path",), lambda r, s: _has_experts(s)),
    Feature("mla", "latent attention", ("model.path",), lambda r, s: s is not None and s.mla is not None),
    Feature(
        "tied",
        "tied embeddings",
        ("model.path", "model.build.tied_embeddings"),
        lambda r, s: s is not None and s.tied_embeddings,
    ),
    Feature(
        "recompute_selective",
        "selective recompute",
        ("engine.recompute",),
        lambda r, s: r.engine.recompute == "selective",
        choice="engine.recompute",
    ),
    Feature(
        "recompute_full",
        "full recompute",
        ("engine.recompute",),
        lambda r, s: r.engine.recompute == "full",
        choice="engine.recompute",
    ),
    Feature(
        "distributed_optimizer",
        "the distributed optimizer",
        ("engine.distributed_optimizer",),
        lambda r, s: r.engine.distributed_optimizer,
        choice="engine.distributed_optimizer",
    ),
    Feature(
        "whole_optimizer",
        "optimizer state whole on each data-parallel rank",
        ("engine.distributed_optimizer",),
        lambda r, s: not r.engine.distributed_optimizer,
        choice="engine.distributed_optimizer",
    ),
    Feature(
        "transformer_engine",
        "TransformerEngine's layers",
        ("engine.backend",),
        lambda r, s: r.engine.backend == "transformer_engine",
    ),
    Feature("bf16", "bf16", ("model.dtype",), lambda r, s: r.model.dtype == "bf16", choice="model.dtype"),
    Feature("fp32", "fp32", ("model.dtype",), lambda r, s: r.model.dtype == "fp32", choice="model.dtype"),
    Feature(
        "adam",
        "Adam with L2 weight decay",
        _of_optimizers("name"),
        _any_optimizer(lambda o: o.name == "adam"),
        choice="optimizer.name",
    ),
    Feature(
        "sgd",
        "SGD",
        _of_optimizers("name"),
        _any_optimizer(lambda o: o.name == "sgd"),
        choice="optimizer.name",
    ),
    Feature("lora", "low-rank adapters", ("lora",), lambda r, s: r.lora is not None),
    Feature(
        "lr_multipliers",
        "learning rates by parameter",
        _of_optimizers("lr_multipliers"),
        _any_optimizer(lambda o: bool(o.lr_multipliers)),
    ),
    Feature(
        "cpu_optimizer",
        "optimizer state on the CPU",
        _of_optimizers("cpu_fraction"),
        _any_optimizer(lambda o: o.cpu_fraction > 0),
    ),
    Feature(
        "offload_params",
        "offload of parameters",
        ("engine.offload_params",),
        lambda r, s: r.engine.offload_params > 0,
    ),
    Feature(
        "offload_grads",
        "offload of gradients",
        ("engine.offload_grads",),
        lambda r, s: r.engine.offload_grads > 0,
    ),
    Feature(
        "offload_optimizer",
        "offload of optimizer state",
        ("engine.offload_optimizer",),
        lambda r, s: r.engine.offload_optimizer > 0,
    ),
]
_LOOP = [
    Feature(
        "shared_rollout",
        "a rollout on the engine's weights",
        ("rollout.layout",),
        lambda r, s: r.rollout.backend == "native" and shares_weights(r),
        choice="rollout.layout",
        engine=False,
    ),
    Feature(
        "own_rollout",
        "a rollout with a layout of its own",
        ("rollout.layout",),
        lambda r, s: not shares_weights(r),
        choice="rollout.layout",
        engine=False,
    ),
    Feature(
        "own_process_rollout",
        "rollouts in processes of their own",
        ("rollout.own_processes", "rollout.backend", "rollout.placement"),
        lambda r, s: own_processes(r),
        needs=("own_rollout",),
        engine=False,
    ),
    Feature(
        "separate_rollout",
        "rollouts on devices of their own",
        ("rollout.placement",),
        lambda r, s: r.rollout.placement == "separate",
        needs=("own_process_rollout",),
        engine=False,
    ),
    Feature(
        "fp8_rollout",
        "an 8-bit rollout",
        ("rollout.quantization",),
        lambda r, s: r.rollout.quantization == "fp8",
        engine=False,
    ),
    Feature(
        "reference",
        "a reference policy",
        ("algorithm.kl_coef",),
        lambda r, s: r.algorithm.kl_coef > 0,
        engine=False,
    ),
]
FEATURES: dict[str, Feature] = {one.id: one for one in (*_ENGINE, *_LOOP)}
"""Every feature, by id. Those with `engine` are what the training engine can be asked for."""

_GENERATES = ("train", "generate", "eval")
_SHARED = "it reads them only where tp, sp and pp alone cut them"
_GIVE_LAYOUT = "set rollout.layout.tp={tp}, and weights are resharded after each step"
REFUSED_PAIRS = [
    *(
        RefusedPair(other, "shared_rollout", _SHARED, _GIVE_LAYOUT, _GENERATES)
        for other in ("cp_all_gather", "cp_all_to_all", "ep", "etp_apart", "vpp")
    ),
    RefusedPair(
        "offload_params",
        "shared_rollout",
        "the rollout generates with the very parameters that would be away",
        "set rollout.layout.tp to another size than layout.tp, so that it has weights of its own, or engine.offload_params=0",
        _GENERATES,
    ),
    *(
        RefusedPair(
            f"offload_{kind}",
            "separate_rollout",
            "training state and rollout both keep their devices, and nothing has to make room",
            f"set engine.offload_{kind}=0",
            _GENERATES,
        )
        for kind in ("params", "grads", "optimizer")
    ),
    RefusedPair(
        "sgd",
        "distributed_optimizer",
        "megatron-core's distributed optimizer holds Adam's state only",
        "set engine.distributed_optimizer=false, or use adamw",
    ),
    *(
        RefusedPair(
            other,
            "cpu_optimizer",
            "megatron-core updates adamw alone on the CPU",
            "use adamw, or set cpu_fraction=0",
        )
        for other in ("adam", "sgd")
    ),
    RefusedPair(
        "lora",
        "cpu_optimizer",
        "the state of adapters is too small to be worth the way to the CPU, and has not been tried there",
        "set cpu_fraction=0",
    ),
    *(
        RefusedPair(
            other,
            "cpu_optimizer",
            "megatron-core keeps state on the CPU for the distributed optimizer of bf16 parameters alone",
            "set engine.distributed_optimizer=true and model.dtype=bf16, or cpu_fraction=0",
        )
        for other in ("whole_optimizer", "fp32")
    ),
]
"""Pairs that are refused. A pair of one choice needs no entry: the key takes one value."""


def refused_pair(first: str, second: str) -> str | None:
    """The sentence with which two features, by id, are refused together; None where they can be combined."""
    for pair in REFUSED_PAIRS:
        if {first, second} == {pair.first, pair.second}:
            return pair.sentence()
    a, b = FEATURES[first], FEATURES[second]
    if a is not b and a.choice and a.choice == b.choice:
        return f"{a.name} and {b.name} are two values of {a.choice}, which takes one"
    return None


def features_on(recipe: Recipe, shape: ModelShape | None = None) -> set[str]:
    """Ids of what a recipe switches on. What depends on the model is off without its shape."""
    return {one.id for one in FEATURES.values() if one.is_on(recipe, shape)}


NEEDS_GPU = [
    NeedsGpu(
        "transformer_engine",
        "TransformerEngine runs on CUDA alone",
        "use engine.backend=portable or auto, or cluster.device=cuda",
    ),
    NeedsGpu(
        "cpu_optimizer",
        "on CPU ranks all of the optimizer is on the CPU already, and megatron-core's hybrid optimizer does not run there",
        "set cpu_fraction=0",
    ),
    NeedsGpu("fp8_rollout", "its kernels run on CUDA alone", "set rollout.quantization=null"),
]
"""What CPU ranks cannot do."""


def _available_later(id: str, name: str, keys: tuple[str, ...], is_on: IsOn, instead: str) -> NotAvailable:
    return NotAvailable(Feature(id, name, keys, is_on), instead)


NOT_AVAILABLE = [
    _available_later(
        "rollout_ep",
        "expert parallelism in the native rollout",
        ("rollout.layout.ep", "rollout.backend"),
        lambda r, s: (
            r.rollout.backend == "native" and r.rollout.layout is not None and r.rollout.layout.ep > 1
        ),
        "use rollout.layout.ep=1: every rank of the rollout then holds all experts; or rollout.backend=vllm",
    ),
    _available_later(
        "muon",
        "Muon",
        _of_optimizers("name"),
        _any_optimizer(lambda o: o.name == "muon"),
        "use adamw: megatron-core's Muon needs a package that does not come with it, and refuses the distributed optimizer",
    ),
]
"""What this version does not offer."""
