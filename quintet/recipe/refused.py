"""What a recipe cannot have: two features together, what needs GPUs on CPU ranks, what this version does not offer yet.

What cannot work is refused by name, with what to do instead; nothing is ever ignored. The tables here are the one place
for it: the rules iterate over them, and so does the test that wants every pair of features either tried or refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.recipe.features import FEATURES, Feature, of_optimizers
from quintet.recipe.schema import Recipe


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
        """Return what the user is told; without a recipe, with "…" for its sizes."""
        a, b = FEATURES[self.first], FEATURES[self.second]
        sizes = {name: getattr(recipe.layout, name) if recipe else "…" for name in ("tp", "pp")}
        instead = self.instead.format(**sizes)
        return f"{a.key} ({a.name}) does not go with {b.key} ({b.name}): {self.why}; {instead}"


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


_GENERATES = ("train", "generate", "eval")
_ALL = ("train", "sft", "generate", "eval")
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
            "overlap_param_gather",
            "only the distributed optimizer, which SGD has none of, updates a part of the parameters on each rank, and gathers the rest",
            "set engine.distributed_optimizer=true and use adamw or adam, or set engine.overlap_param_gather=false",
        )
        for other in ("whole_optimizer", "sgd")
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
        RefusedPair(fp8, other, why, instead, commands)
        for fp8 in ("fp8_tensorwise", "fp8_blockwise")
        for other, why, instead, commands in (
            (
                "fp32",
                "TransformerEngine rounds to 8 bits from bf16, and adds up in it",
                "set model.dtype=bf16, or engine.fp8=null",
                _ALL,
            ),
            (
                "lora",
                "adapters beside products in 8 bits are untried",
                "set engine.fp8=null, or lora=null",
                _ALL,
            ),
            (
                "shared_rollout",
                "generating would keep copies of weights in 8 bits past their change, and rows of one token fit no block",
                "set rollout.own_processes=true, or another rollout.layout.tp than layout.tp: its own weights are bf16; or engine.fp8=null",
                _GENERATES,
            ),
        )
    ),
    RefusedPair(
        "frozen",
        "lora",
        "beside adapters all of the model is frozen, and lora.targets says which layers have some",
        "remove it, or set lora=null",
    ),
    RefusedPair(
        "lora",
        "expert_bias",
        "the bias is of the frozen model, of which nothing is saved or sent beside adapters",
        "set engine.expert_bias_rate=0, or lora=null",
    ),
    RefusedPair(
        "lora",
        "mtp",
        "adapters are beside the model's own layers, and nothing else is saved or trained then",
        "set mtp.train=false, which keeps the layers as they are, or lora=null",
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
    *(
        NeedsGpu(one, "TransformerEngine runs on CUDA alone", "set engine.fp8=null")
        for one in ("fp8_tensorwise", "fp8_blockwise")
    ),
    NeedsGpu("fp8_rollout", "its kernels run on CUDA alone", "set rollout.quantization=null"),
]
"""What CPU ranks cannot do."""


NOT_AVAILABLE: list[tuple[Feature, str]] = [
    (
        Feature(
            "rollout_ep",
            "expert parallelism in the native rollout",
            ("rollout.layout.ep", "rollout.backend"),
            lambda r, s: (
                r.rollout.backend == "native" and r.rollout.layout is not None and r.rollout.layout.ep > 1
            ),
        ),
        "use rollout.layout.ep=1: every rank of the rollout then holds all experts; or rollout.backend=vllm",
    ),
    (
        of_optimizers("muon", "Muon", "name", lambda o: o.name == "muon"),
        "use adamw: megatron-core's Muon needs a package that does not come with it, and refuses the distributed optimizer",
    ),
]
"""What this version does not offer, and what a user does instead."""
