"""What the suite runs: families × layouts, the layouts of covering sets in which every allowed pair of values stands.

One table of axes and one of constraints; the constraints are the refusals of `quintet.recipe`, and a test holds them to
those. All cases follow from the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from quintet.packing.align import FP8_TOKENS
from quintet.recipe import schema
from quintet.recipe.megatron import FUSED_EXPERTS
from tests.oracle.balance import AUX_WEIGHT, BIAS_RATE, Z_WEIGHT, Balance
from tests.oracle.covering import Constraint, PackedRow, Table
from tests.oracle.data import AHEAD_CLIP, AHEAD_WEIGHT, BATCHES, BF16_BATCH

DENSE = ("qwen3", "qwen3-tied", "qwen2", "qwen2-tied", "llama", "mimo")
MOE = ("qwen3_moe", "deepseek_v3", "deepseek_v3-tied", "glm4_moe", "mixtral", "gpt_oss")
FAMILIES = (*DENSE, *MOE)
REPLAYED = ("gpt_oss-top4",)
"""Models of cases that replay routes alone, near ties or not."""
THOROUGH = ("qwen3", "deepseek_v3")
"""The families that run all pairs on GPUs; in `make test` the first does, the others FEW_LAYOUTS, and of these some BRIEFLY one."""
BRIEFLY = ("qwen2", "llama", "mimo", "deepseek_v3-tied", "glm4_moe", "mixtral", "gpt_oss")
THOROUGH_SLOWLY = ("qwen3_moe", "deepseek_v3", "gpt_oss")
"""The families that run all pairs in `make test-slow`, on at most 4 ranks. OF_QWEN3 run every value of every axis there."""
OF_QWEN3 = ("qwen3-tied", "qwen2", "llama")
"""Families of qwen3's layers but for their tied embeddings, biases and norms. `make test-nightly` runs all pairs of all these on 8 ranks."""
LANGUAGE_ONLY = ("glm4_moe",)
"""The families of which transformers has no classifier, which a value model would be compared with."""
LAYERS, HEADS = 4, {"qwen2": 2, "qwen2-tied": 2, "mimo": 2}
"""Layers of every tiny model, and the heads that context-parallel ranks exchange: KV heads, 4 where not said."""
TOKENS_PER_ROW = 24
"""Token budget of a micro-batch over all cp ranks: the longest sample with any layout's padding, no more."""

OPTIMIZERS = {
    "adamw": schema.Optimizer(lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-4, weight_decay=0.1, clip_grad_norm=2.0),
    "adam": schema.Optimizer(
        name="adam", lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-4, weight_decay=0.1, clip_grad_norm=2.0
    ),
    "sgd": schema.Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, clip_grad_norm=2.0),
}
"""Adam divides by the root of the second moment: where a gradient is rounding noise only, eps keeps the noise out of the
update. The norms of the gradients are about 4, so every step is clipped."""
LR_MULTIPLIERS = {"*norm.weight": 3.0, "model.embed_tokens.weight": 0.5}
LORA_LR_MULTIPLIERS = {"*.lora_B.weight": 3.0, "*.o_proj.lora_A.weight": 0.5}


def lr_multipliers(lora: bool) -> dict[str, float]:
    """Of the weights in training."""
    return LORA_LR_MULTIPLIERS if lora else LR_MULTIPLIERS


@dataclass(frozen=True)
class Case:
    """A family trained in one layout. The defaults are one rank that computes as plainly as it can."""

    family: str
    head: str = "lm"
    lora: bool = False
    dtype: str = "fp32"
    backend: str = "portable"
    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    stages: str = ""
    """Layers of each stage, 3.1, where they are not equally many."""
    cp: int = 1
    cp_comm: str = "all_gather"
    ep: int = 1
    etp: int = 1
    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_dispatch: bool = False
    row_buckets: bool = False
    optimizer: str = "adamw"
    lr_multipliers: bool = False
    frozen: str = ""
    """The end of the names of weights that are not trained."""
    cpu_optimizer: bool = False
    offload_params: bool = False
    offload_grads: bool = False
    offload_optimizer: bool = False
    mtp: int = 0
    """Layers for multi-token prediction."""
    mtp_loss: str = "cross_entropy"
    mtp_detach: bool = True
    replay: str = ""
    """Which routes the updates replay: "old", of the weights before the first step, or "rollout", drawn ones."""
    expert_bias: bool = False
    """Whether steps move the stored bias of experts."""
    z_loss: bool = False
    aux_loss: str = ""
    """Of routers: per "sequence" or "batch"."""
    fused_experts: bool = False
    """Whether kernels of TransformerEngine's choose experts and permute tokens."""
    experts: str = "auto"
    """Whose products compute experts beside TransformerEngine's layers."""
    mixed: bool = False
    """Dynamic context parallelism: blocks are cut otherwise in each round, by a table that leaves out no way (`ranks.recut`)."""
    fp8: str = ""
    """The recipe of FP8 that rows are padded for."""

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches (`data.BATCHES`) of the optimizer steps."""
        return (BF16_BATCH,) if self.dtype == "bf16" else tuple(range(len(BATCHES)))

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch on a rank; of one padded for FP8 no whole number of multiples."""
        if self.fp8:
            return FP8_TOKENS[self.fp8] * (self.tp if self.sp else 1) + TOKENS_PER_ROW
        return TOKENS_PER_ROW // self.cp

    @property
    def name(self) -> str:
        """The family, and what differs from the defaults."""
        said = [self.family]
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default:
                flag = value is True or one.name == "distributed_optimizer"
                text = value if isinstance(value, str) else f"{one.name}{'' if flag else value}"
                said.append(
                    f"{one.name}_{value}"
                    if one.name in ("recompute", "replay", "aux_loss", "stages")
                    else text
                )
        return "-".join(said)

    def adapters(self, path: Path) -> Path:
        """Where the adapters beside a model are."""
        return path / "adapter"

    def recipe(self, path: Path, device: str = "cpu") -> schema.Recipe:
        """The recipe of this case, as a user would write it for `quintet sft`."""
        optimizer = self.optimizer_recipe.model_dump()
        moe = self.family in (*MOE, *REPLAYED)
        return schema.Recipe(
            cluster=schema.Cluster(ranks=self.ranks, device=device),
            model=schema.Model(path=path, dtype=self.dtype),
            layout=schema.Layout(
                tp=self.tp,
                sp=self.sp,
                pp=self.pp,
                vpp=self.vpp,
                stage_layers=[int(one) for one in self.stages.split(".")] if self.stages else None,
                cp=self.cp,
                dynamic_cp=self.mixed,
                ep=self.ep,
                etp=self.etp if moe else None,
            ),
            engine=schema.Engine(
                tokens_per_microbatch_per_rank=self.budget,
                fp8=self.fp8 or None,  # type: ignore[arg-type]
                distributed_optimizer=self.distributed_optimizer,
                overlap_grad_reduce=self.overlap_grad_reduce,
                overlap_param_gather=self.overlap_param_gather,
                overlap_dispatch=self.overlap_dispatch,
                row_buckets=self.row_buckets,
                backend=self.backend,
                experts=self.experts,  # type: ignore[arg-type]
                cp_comm=self.cp_comm,
                recompute=self.recompute,
                replay_routes=self.replay or None,  # type: ignore[arg-type]
                expert_bias_rate=BIAS_RATE * self.expert_bias,
                z_loss=Z_WEIGHT * self.z_loss,
                aux_loss={"per": self.aux_loss, "weight": AUX_WEIGHT} if self.aux_loss else None,  # type: ignore[arg-type]
                megatron=dict.fromkeys(FUSED_EXPERTS, True) if self.fused_experts else {},
                recompute_modules=_MODULES[self.family] if self.recompute == "selective" else None,
                offload_params=float(self.offload_params),
                offload_grads=0.6 * self.offload_grads,
                offload_optimizer=float(self.offload_optimizer),
            ),
            lora=schema.Lora(path=self.adapters(path)) if self.lora else None,
            mtp=self.mtp_recipe,
            optimizer=optimizer,
            sft=schema.Sft(optimizer=optimizer),
            # What is not of the engine: some data that fits.
            data=schema.Data(train_path=str(path / "config.json"), max_prompt_tokens=4),
            rollout=schema.Rollout(max_response_tokens=TOKENS_PER_ROW - 4),
        )

    @property
    def balance(self) -> Balance:
        """What evens out the load of its experts."""
        return Balance(self.expert_bias, self.z_loss, self.aux_loss)

    @property
    def mtp_recipe(self) -> schema.Mtp | None:
        """Of its layers for multi-token prediction, if it has any."""
        settings: dict[str, Any] = {"loss": self.mtp_loss, "detach": self.mtp_detach}
        made = schema.Mtp(loss_weight=AHEAD_WEIGHT, clip_grad_norm=AHEAD_CLIP, **settings)
        return made if self.mtp else None

    @property
    def optimizer_recipe(self) -> schema.Optimizer:
        changed: dict[str, Any] = {"lr_multipliers": lr_multipliers(self.lora) if self.lr_multipliers else {}}
        changed["frozen"] = [f"*{self.frozen}.weight"] if self.frozen else []
        return OPTIMIZERS[self.optimizer].model_copy(
            update={**changed, "cpu_fraction": 0.5 * self.cpu_optimizer}
        )


_LATENT = ["core_attn", "mlp", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
_MODULES: dict[str, list[Any]] = {
    **{family: ["core_attn", "mlp", "layernorm"] for family in DENSE},
    **{family: ["core_attn", "mlp_act", "layernorm"] for family in ("llama", "qwen3-tied")},
    **{family: ["core_attn", "moe_act", "layernorm"] for family in ("qwen3_moe", "gpt_oss")},
    "deepseek_v3": _LATENT,
    "deepseek_v3-tied": _LATENT,
    "glm4_moe": ["core_attn", "mlp_act", "moe_act", "shared_experts", "layernorm"],
    "mixtral": ["core_attn", "moe", "layernorm"],
}
"""What selective recompute computes again: all that the family has and that go together."""


def table(moe: bool, heads: int, ranks: int, **fixed: Any) -> Table:
    """Axes and constraints of a model's layouts of at most so many ranks. fixed: axes with one value.

    Values are those of `Case`'s fields; cp and cp_comm, which counts only beside it, are one axis of pairs.
    """
    powers = (1, 2, 4)
    small = tuple(n for n in powers if n <= max(ranks // 2, min(ranks, 2)))  # leaves room beside it
    two = tuple(n for n in powers[:2] if n <= ranks)
    # Axes that constrain each other stand together, so that a search fails early.
    axes: dict[str, tuple[Any, ...]] = {
        "pp": tuple(n for n in powers if n <= ranks),
        "vpp": (1, 2),
        "tp": two,
        "sp": (False, True),
        "cp": ((1, "all_gather"), *product(small[1:], ("all_gather", "all_to_all"))),
        "mixed": (False, True),
        "dp": small,
        **({"ep": small, "etp": two} if moe else {}),
        "recompute": ("none", "selective", "full"),
        "distributed_optimizer": (False, True),
        "optimizer": ("adamw", "adam", "sgd"),
        "lr_multipliers": (False, True),
        "head": ("lm", "value"),
        "offload_params": (False, True),
        "offload_grads": (False, True),
        "offload_optimizer": (False, True),
    }
    constraints = [
        Constraint(("tp", "cp", "dp", "pp"), lambda tp, cp, dp, pp: tp * cp[0] * dp * pp <= ranks),
        *_constraints(heads),
    ]
    if moe:
        constraints.append(Constraint(("tp", "sp"), lambda tp, sp: sp or tp == 1))
    return Table({**axes, **{name: (value,) for name, value in fixed.items()}}, constraints)


def _constraints(heads: int) -> list[Constraint]:
    return [
        Constraint(("tp", "sp"), lambda tp, sp: not sp or tp > 1),
        Constraint(("pp", "vpp"), lambda pp, vpp: (vpp == 1 or pp > 1) and LAYERS % (pp * vpp) == 0),
        Constraint(("cp", "mixed"), lambda cp, mixed: not mixed or cp[0] > 1),
        Constraint(("cp", "tp"), lambda cp, tp: cp[1] == "all_gather" or heads % (cp[0] * tp) == 0),
        Constraint(("ep", "etp", "tp"), lambda ep, etp, tp: ep > 1 or etp == tp),
        Constraint(("ep", "overlap_dispatch"), lambda ep, halves: ep > 1 or not halves),
        Constraint(
            ("ep", "etp", "tp", "cp", "dp"), lambda ep, etp, tp, cp, dp: tp * cp[0] * dp % (ep * etp) == 0
        ),
        Constraint(
            ("optimizer", "distributed_optimizer"), lambda name, sharded: name != "sgd" or not sharded
        ),
        Constraint(("optimizer", "cpu_optimizer"), lambda name, cpu: name == "adamw" or not cpu),
        Constraint(("distributed_optimizer", "cpu_optimizer"), lambda sharded, cpu: sharded or not cpu),
        Constraint(("dtype", "cpu_optimizer"), lambda dtype, cpu: dtype == "bf16" or not cpu),
    ]


def covering(family: str, ranks: int, strength: int = 2, **fixed: Any) -> list[Case]:
    """Cases of a family on at most `ranks` ranks in which every allowed pair of values stands."""
    if family in LANGUAGE_ONLY:
        fixed = {"head": "lm", **fixed}
    rows = _rows(family in MOE, HEADS.get(family, 4), ranks, strength, tuple(fixed.items()))
    return [case_of(family, row) for row in rows]


def case_of(family: str, row: PackedRow) -> Case:
    """The case of a table's row."""
    cp, comm = row["cp"]
    return Case(family, **{**row, "cp": cp, "cp_comm": comm})


def row_of(case: Case, whole: Table) -> PackedRow:
    """The row of a case in a table."""
    return {name: getattr(case, name) for name in whole.axes} | {"cp": (case.cp, case.cp_comm)}


@cache
def _rows(
    moe: bool, heads: int, ranks: int, strength: int, fixed: tuple[tuple[str, Any], ...]
) -> tuple[PackedRow, ...]:
    return tuple(table(moe, heads, ranks, **dict(fixed)).covering(strength))


FEW_LAYOUTS = (
    {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "distributed_optimizer": True},
    {"cp": 2, "dp": 2, "recompute": "full"},
    {"tp": 2, "sp": True, "cp": 2, "recompute": "selective"},
    {"pp": 2, "dp": 2, "distributed_optimizer": True},
)
_EXPERTS_TOO = ({"etp": 2}, {"ep": 2}, {"ep": 4, "etp": 1}, {"ep": 2})


def few(family: str) -> list[Case]:
    """Four layouts of a family."""
    layouts = [
        layout | (experts if family in MOE else {})
        for layout, experts in zip(FEW_LAYOUTS, _EXPERTS_TOO, strict=True)
    ]
    return [Case(family, **layout) for layout in layouts]


LORA = ("qwen3", "qwen2", "qwen3_moe", "deepseek_v3")
"""The families that are trained by adapters, too."""
LORA_LAYOUTS = {
    "qwen3": {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "distributed_optimizer": True},
    "deepseek_v3": {"tp": 2, "sp": True, "dp": 2, "ep": 2, "etp": 2, "recompute": "full"},
}
"""Of those, what `make test` runs."""


def lora_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside adapters, with each family; in bf16 those of one."""
    found = [case for family in LORA for case in covering(family, ranks, strength=1, lora=True, **fixed)]
    if ranks > 1:  # the embedding on both ends; attention alone
        found.append(Case("qwen3-tied", lora=True, pp=2, **fixed))
        found.append(Case("gpt_oss", lora=True, tp=2, sp=True, etp=2, **fixed))
    return [*found, *bf16("qwen3", ranks, lora=True, **fixed)]


MTP_LAYOUTS = (
    Case("mimo", mtp=2, tp=2, sp=True, pp=2, vpp=2, distributed_optimizer=True),
    Case("mimo", mtp=1, mtp_loss="self_distill", mtp_detach=False, pp=2, cp=2, recompute="full"),
    Case("mimo", mtp=2, mtp_loss="self_distill", tp=2, sp=True, cp=2, mixed=True, lr_multipliers=True),
    Case("deepseek_v3", mtp=2, dp=2, ep=2, recompute="full", distributed_optimizer=True),
    Case("deepseek_v3", mtp=2, pp=2, vpp=2, dp=2, ep=2, recompute="selective"),
)
"""Layers for multi-token prediction."""
_MTP = (("cross_entropy", True), ("cross_entropy", False), ("self_distill", True), ("self_distill", False))


def mtp_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside layers for multi-token prediction: however they are trained, and with each family of those
    that have them. A trunk that they train too would come near ties of routes."""
    found = []
    for number, (loss, detach) in enumerate(_MTP):
        how = {"mtp": 2 - number % 2, "mtp_loss": loss, "mtp_detach": detach, "head": "lm"}
        found += covering("mimo", ranks, strength=1, **how, **fixed)
    for family in ("deepseek_v3", "glm4_moe"):
        found += covering(family, ranks, strength=1, mtp=2, head="lm", **fixed)
    if ranks > 1:
        found.append(Case("deepseek_v3-tied", mtp=2, pp=2, **fixed))
    return [*found, *bf16("mimo", ranks, mtp=1, head="lm", **fixed)]


_R, _O = {"replay": "rollout"}, {"replay": "old"}
REPLAY_LAYOUTS = (
    Case("qwen3_moe", **_R, optimizer="sgd"),
    Case("deepseek_v3", **_R, tp=2, sp=True, ep=2, etp=1, recompute="selective"),
    Case("deepseek_v3", **_R, pp=2, vpp=2, dp=2, ep=2, recompute="selective", distributed_optimizer=True),
    Case("qwen3_moe", **_R, tp=2, sp=True, pp=2, vpp=2, etp=2, recompute="full"),
    Case("qwen3_moe", **_R, tp=2, sp=True, dp=2, ep=2, etp=2, lora=True),
    Case("qwen3_moe", **_R, tp=2, sp=True, cp=2, etp=2, recompute="full", mixed=True),
    Case("deepseek_v3", **_R, cp=2, cp_comm="all_to_all", pp=2),
    Case("deepseek_v3", **_R, mtp=2, dp=2, ep=2, recompute="full"),
    Case("deepseek_v3", **_R, head="value", pp=2),
    Case("deepseek_v3-tied", **_R, pp=2),
    Case("gpt_oss-top4", **_R, tp=2, sp=True, ep=2, etp=1),
    Case("mixtral", **_R, pp=2, vpp=2, cp=2, ep=2, recompute="selective"),
    Case("glm4_moe", **_R, pp=2, recompute="full"),
    Case("qwen3_moe", **_O, optimizer="sgd"),
    Case("deepseek_v3", **_O, pp=2, vpp=2, dp=2, ep=2, recompute="full"),
    Case("deepseek_v3", **_O, tp=2, sp=True, cp=2, etp=2, recompute="selective", mixed=True),
    Case("deepseek_v3", **_O, mtp=2, pp=2),
    Case("qwen3_moe", **_O, tp=2, sp=True, ep=2, etp=1, lora=True),
)
"""Replay of routes."""


def replay_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside replay of either kind of routes, with experts of each kind; in bf16 those of one."""
    found = []
    for replay in ("old", "rollout"):
        how = {"replay": replay, **fixed}
        found += covering("qwen3_moe", ranks, strength=1, **how)
        found += covering("deepseek_v3", ranks, strength=1, **how)
        found += [Case(family, **how) for family in ("mixtral", "glm4_moe", "gpt_oss")]
        found += [Case("qwen3_moe", lora=True, **how), Case("deepseek_v3", mtp=2, **how)]
        found.append(Case("deepseek_v3-tied", **how))
        found += bf16("qwen3_moe", ranks, **how)
    if ranks >= LAYERS:  # a stage without any experts
        found.append(Case("deepseek_v3", pp=LAYERS, replay="rollout", **fixed))
    return found


_BIAS, _Z = {"expert_bias": True}, {"z_loss": True}
_AUX, _BATCH = {"aux_loss": "sequence"}, {"aux_loss": "batch"}
BALANCE_LAYOUTS = (
    Case("deepseek_v3", **_BIAS, tp=2, sp=True, ep=2, etp=1, recompute="selective"),
    Case(
        "deepseek_v3", **_BIAS, **_AUX, pp=2, vpp=2, dp=2, ep=2, recompute="full", distributed_optimizer=True
    ),
    Case("deepseek_v3", **_BIAS, tp=2, sp=True, cp=2, etp=2, recompute="full", mixed=True),
    Case("deepseek_v3", **_BIAS, **_Z, **_BATCH, cp=2, cp_comm="all_to_all", mtp=2),
    Case("deepseek_v3", **_BIAS, **_R, tp=2, sp=True, dp=2, ep=2, etp=2),
    Case("deepseek_v3", **_BIAS, **_O, pp=2, head="value"),
    Case("glm4_moe", **_BIAS, **_BATCH, pp=2),
    Case("qwen3_moe", **_Z, **_AUX, tp=2, sp=True, cp=2, etp=2, recompute="full", mixed=True),
    Case("qwen3_moe", **_Z, **_AUX, lora=True, tp=2, sp=True, etp=2),
    Case("qwen3_moe", **_BATCH, tp=2, sp=True, cp=2, etp=2, recompute="selective"),
    Case("deepseek_v3", **_Z, **_BATCH, pp=2, vpp=2, dp=2, ep=2, recompute="full"),
    Case("qwen3_moe", **_BATCH, **_R, dp=2),
    Case("qwen3_moe", **_BATCH, **_O, pp=2),
    Case("qwen3_moe", **_AUX, **_R, cp=2),
    Case("mixtral", **_Z, **_AUX, pp=2, recompute="selective"),
    Case("gpt_oss", **_Z, **_AUX, tp=2, sp=True, etp=2),
)
"""What evens out the load of experts."""


def balance_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside each way to even out the load of experts; in bf16 those of one family."""
    ways = [{**_BIAS, **fixed}, {**_BIAS, **_Z, **_AUX, **fixed}, {**_Z, **_BATCH, **fixed}]
    found = []
    for how in ways:
        found += covering("deepseek_v3", ranks, strength=1, **how)
        found += [
            Case("glm4_moe", **how),
            Case("deepseek_v3-tied", optimizer="sgd", **how),
        ]  # else near a tie
        found += [Case("deepseek_v3", replay=replay, **how) for replay in ("old", "rollout")]
        found.append(Case("deepseek_v3", mtp=2, **how))
        found += bf16("deepseek_v3", ranks, **how)
    for how in ({**_Z, **_AUX, **fixed}, {**_Z, **_BATCH, **fixed}):
        found += covering("qwen3_moe", ranks, strength=1, **how, head="lm")
        found += [Case(family, **how) for family in ("mixtral", "gpt_oss")]
        found.append(Case("qwen3_moe", lora=True, **how))
    return [*found, Case("glm4_moe", **_BIAS, **_BATCH, **fixed)]


_GATE = {"frozen": ".mlp.gate"}
FROZEN_LAYOUTS = (
    Case("qwen3", frozen=".o_proj", tp=2, sp=True, pp=2, vpp=2, distributed_optimizer=True),
    Case("qwen3-tied", frozen="embed_tokens", pp=2, recompute="full"),
    Case("qwen3_moe", **_GATE, tp=2, sp=True, cp=2, etp=2, distributed_optimizer=True),
    Case("deepseek_v3", **_GATE, **_BIAS, dp=2, ep=2, recompute="full"),
    Case("qwen3_moe", **_GATE, **_Z, **_AUX, optimizer="sgd", pp=2),
    Case("qwen2", frozen="embed_tokens", dp=2, recompute="full", head="value"),
    Case("deepseek_v3", frozen="norm", optimizer="sgd", mtp=2, pp=2),
)
"""Weights that are not trained."""


def frozen_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside frozen routers, or layers of each kind."""
    found = covering("qwen3", ranks, strength=1, frozen=".o_proj", **fixed)
    found += covering("deepseek_v3", ranks, strength=1, **_GATE, **fixed)
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3-tied", "mimo", "glm4_moe", "qwen2"):
        found.append(Case(family, frozen=".o_proj", **fixed))
    for how in ({**_Z, **_BATCH}, {**_Z, **_AUX}, _R, _O):
        found.append(Case("qwen3_moe", **_GATE, **how, optimizer="sgd", **fixed))  # else near a tie
    found.append(Case("mimo", frozen=".o_proj", mtp=1, **fixed))
    return [*found, *bf16("qwen3", ranks, frozen=".o_proj", **fixed)]


STAGE_LAYOUTS = (
    Case("qwen3", stages="3.1", pp=2, dp=2, distributed_optimizer=True),
    Case("qwen3-tied", stages="1.3", pp=2, tp=2, sp=True, recompute="full"),
    Case("qwen2-tied", stages="0.2.2.0", pp=4),
    Case("deepseek_v3", stages="1.3", pp=2, dp=2, ep=2, distributed_optimizer=True),
    Case("deepseek_v3-tied", stages="2.1.1.0", pp=2, vpp=2, recompute="selective"),
    Case("deepseek_v3", stages="4.0", **_R, **_BIAS, mtp=2, pp=2, cp=2, mixed=True),
    Case("qwen3_moe", stages="0.1.1.2", **_O, **_Z, **_AUX, pp=2, vpp=2, cp=2, etp=1),
)
"""Uneven pipeline stages, those of an embedding or a head alone among them."""


def stage_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside uneven stages, and what no axis has."""
    if ranks < 2:
        return []
    two, four = {"pp": 2, "stages": "1.3", **fixed}, {"pp": 2, "vpp": 2, "stages": "0.1.2.1", **fixed}
    found = []
    for family in ("qwen3", "deepseek_v3"):
        found += covering(family, ranks, strength=1, vpp=1, **two)
        found += covering(family, ranks, strength=1, **four)
        found += bf16(family, ranks, vpp=1, **two)
    for how in ({**_Z, **_BATCH}, {**_Z, **_AUX}, _R, _O, _GATE, {"lora": True}):
        found.append(Case("qwen3_moe", **how, optimizer="sgd", **two))  # else near a tie
    found += [Case(family, **two) for family in ("llama", "glm4_moe", "mixtral", "gpt_oss", "qwen2")]
    found.append(Case("mimo", mtp=1, mtp_loss="self_distill", mtp_detach=False, **two))
    return [*found, Case("deepseek_v3", **_BIAS, **two)]


_OVERLAP = {"overlap_grad_reduce": True}
OVERLAP_LAYOUTS = (
    Case("qwen3", **_OVERLAP, dp=2, distributed_optimizer=True),
    Case("qwen3", **_OVERLAP, pp=2, vpp=2, dp=2, distributed_optimizer=True),
    Case("qwen3", **_OVERLAP, cp=2, dp=2, mixed=True, recompute="full"),
    Case("deepseek_v3", **_OVERLAP, mtp=2, dp=2, ep=2, recompute="selective", distributed_optimizer=True),
    Case("deepseek_v3", **_OVERLAP, **_O, **_BIAS, **_Z, **_BATCH, dp=2, distributed_optimizer=True),
)
"""Gradients that are reduced during the backward pass; in buckets of a few parameters."""


def overlap_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside gradients that are reduced during the backward pass, and each other feature once."""
    return _beside_all(ranks, **_OVERLAP, **fixed)


_SIZES = {"row_buckets": True}
SIZES_LAYOUTS = (
    Case("qwen3", **_SIZES, tp=2, sp=True, pp=2, vpp=2, distributed_optimizer=True),
    Case("qwen3", **_SIZES, **_OVERLAP, cp=2, dp=2, mixed=True, recompute="full"),
    Case("deepseek_v3", **_SIZES, mtp=2, cp=2, cp_comm="all_to_all", ep=2, recompute="selective"),
    Case("deepseek_v3", **_SIZES, **_O, **_BIAS, **_Z, **_BATCH, tp=2, sp=True, etp=2),
    Case("qwen3_moe", **_SIZES, **_R, **_AUX, dp=2, ep=2, optimizer="sgd"),
)
"""Rows of few sizes, each up to twice as long as its sequences."""


def sizes_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside rows of few sizes, and each other feature once."""
    return _beside_all(ranks, **_SIZES, **fixed)


_SHARDED = {"distributed_optimizer": True}
GATHER: dict[str, Any] = {**_OVERLAP, **_SHARDED, "overlap_param_gather": True}
GATHER_LAYOUTS = (
    Case("qwen3-tied", **GATHER, dp=2),
    Case("qwen3", **GATHER, pp=2, vpp=2, dp=2, recompute="full", offload_params=True),
    Case("qwen3", **GATHER, head="value", cp=2, dp=2, mixed=True, optimizer="adam", lr_multipliers=True),
    Case("deepseek_v3", **GATHER, mtp=2, dp=2, ep=2, recompute="selective"),
    Case(
        "deepseek_v3", **GATHER, **_O, **_BIAS, **_Z, **_BATCH, tp=2, sp=True, dp=2, etp=2, row_buckets=True
    ),
)
"""Parameters that are gathered during the forward pass."""


def gather_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside parameters that are gathered during the forward pass, and each other feature once."""
    return _beside_all(ranks, "adamw", **GATHER, **fixed)


_WITH_EXPERTS: tuple[dict[str, Any], ...] = (_R, _O, {**_BIAS, **_Z, **_AUX}, {**_Z, **_BATCH}, _GATE)
"""What models with experts have besides, each once."""
_HALVES = {"overlap_dispatch": True}
_SPREAD = {**_HALVES, "dp": 2, "ep": 2}
DISPATCH_LAYOUTS = (
    Case("qwen3_moe", **_SPREAD, **_R, **_Z, **_AUX, distributed_optimizer=True),
    Case("qwen3_moe", **_HALVES, **_SIZES, **_OVERLAP, tp=2, sp=True, cp=2, ep=2, etp=2, mixed=True),
    Case("qwen3_moe", **_SPREAD, lora=True),
    Case("deepseek_v3", **_SPREAD, **_O, **_BIAS, **_BATCH, recompute="full"),
    Case("deepseek_v3", **_SPREAD, mtp=2, pp=2, vpp=2, recompute="selective", frozen=".mlp.gate"),
    Case("gpt_oss", **_HALVES, tp=2, sp=True, ep=2, etp=1, optimizer="sgd"),
)
"""Tokens that travel to experts in two halves."""


def dispatch_cases(ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis beside tokens that travel in halves, and each other feature once."""
    if ranks < 2:
        return []
    found = [*covering("deepseek_v3", ranks, strength=1, **_HALVES, **fixed)]
    found += covering("qwen3_moe", ranks, strength=1, **_HALVES, **fixed)
    families = ("glm4_moe", "mixtral", "gpt_oss", "deepseek_v3-tied")
    found += [Case(family, **_SPREAD, **fixed) for family in families]
    others = (*_WITH_EXPERTS, GATHER, _SIZES, {"mtp": 2})
    found += [Case("deepseek_v3", **{**_SPREAD, **other, **fixed}) for other in others]
    if fixed.get("backend") == "transformer_engine":
        fused = {"fused_experts": True, **fixed}
        found += [Case("qwen3_moe", **_SPREAD, **fused, recompute=again) for again in ("none", "full")]
        if ranks > 3:
            found.append(Case("qwen3_moe", **_HALVES, **fused, tp=2, sp=True, dp=2, ep=2, etp=2))
    if ranks > 3:
        found.append(Case("deepseek_v3", **_HALVES, cp=2, ep=2, pp=2, stages="1.3", **fixed))
    found.append(Case("qwen3_moe", lora=True, **_SPREAD, **fixed))
    return [*found, *bf16("qwen3_moe", ranks, **_HALVES, **fixed)]


def _beside_all(ranks: int, optimizer: str = "sgd", **how: Any) -> list[Case]:
    """optimizer: of cases that would be near a tie with some other."""
    found = [*covering("qwen3", ranks, strength=1, **how), *covering("deepseek_v3", ranks, strength=1, **how)]
    families = ("qwen3_moe", "gpt_oss", "deepseek_v3-tied", "mimo", "glm4_moe", "qwen2")
    found += [Case(family, **how) for family in families]
    found += [Case("deepseek_v3", **other, optimizer=optimizer, **how) for other in _WITH_EXPERTS]
    found += [Case("mimo", mtp=1, **how), Case("qwen3", lora=True, **how)]
    found += [Case("qwen3", **{**how, "pp": 2, "stages": "1.3"})] if ranks > 1 else []
    return [*found, *bf16("qwen3", ranks, **how)]


_OFFLOAD = {"offload_params": True, "offload_grads": True, "offload_optimizer": True}
PADDED_LAYOUTS = tuple(
    replace(case, fp8=fp8)
    for fp8, cases in {
        "tensorwise": (
            Case("qwen3", tp=2, sp=True, pp=2, vpp=2, **_SHARDED, **_OFFLOAD, optimizer="adam"),
            Case("qwen3", head="value", cp=2, cp_comm="all_to_all", tp=2, sp=True, optimizer="sgd"),
            Case("qwen3_moe", **_R, dp=2, ep=2, **_AUX, **_Z, **_SHARDED),
            Case("qwen3_moe", **_O, tp=2, sp=True, cp=2, ep=2, etp=1, mixed=True, frozen=".mlp.gate"),
            Case("qwen3", **GATHER, dp=2, lr_multipliers=True),
            Case("mimo", mtp=2, tp=2, sp=True, cp=2, mixed=True),
            Case("deepseek_v3", pp=2, vpp=2, dp=2, ep=2, recompute="selective"),
            Case("deepseek_v3", dp=2, ep=2, **_BIAS, **_BATCH, recompute="full"),
            Case("gpt_oss", tp=2, sp=True, etp=2),
            Case("qwen3-tied", stages="1.3", pp=2),
            Case("qwen3", dtype="bf16", tp=2, sp=True),
            Case("qwen3", dtype="bf16", cp=2),
            Case("qwen3_moe", dtype="bf16", tp=2, sp=True, ep=2),
            Case("qwen3_moe", **_SIZES, **_SPREAD, **_Z),
        ),
        "blockwise": (
            Case("qwen3", tp=2, sp=True, pp=2, vpp=2, **_SHARDED, optimizer="adam", lr_multipliers=True),
            Case("qwen3", head="value", cp=2, tp=2, sp=True, optimizer="sgd", **_OFFLOAD),
            Case("qwen3", **_SIZES, cp=2, mixed=True),
            Case("qwen3", cp=2, cp_comm="all_to_all", frozen=".o_proj"),
            Case("qwen3_moe", **_R, **_SPREAD, **_AUX, **_Z),
            Case("qwen3_moe", **_O, tp=2, sp=True, cp=2, ep=2, etp=1, mixed=True),
            Case("mimo", mtp=2, dp=2, **GATHER),
            Case("deepseek_v3", mtp=2, pp=2, vpp=2, dp=2, ep=2, recompute="selective"),
            Case("deepseek_v3", dp=2, ep=2, **_BIAS, **_BATCH, recompute="full"),
            Case("gpt_oss", tp=2, sp=True, etp=2),
            Case("qwen3-tied", stages="1.3", pp=2),
            Case("qwen3", dtype="bf16", tp=2, sp=True),
            Case("qwen3", dtype="bf16", cp=2, mixed=True),
            Case("qwen3_moe", dtype="bf16", dp=2, ep=2),
        ),
    }.items()
    for case in cases
)
"""Rows padded for FP8 in `make test`, those of blocks in `make test-slow`: each other feature with both recipes, but for what a
GPU alone has."""


def fast_cases() -> list[Case]:
    """What `make test` runs: families on up to 4 ranks, and of each feature the first two layouts on up to 2, and those of models that
    no other has."""
    found: list[Case] = []
    for family in FAMILIES:
        if family in BRIEFLY:
            found += few(family)[:1]
            continue
        found += covering(family, 4) if family == "qwen3" else few(family)
        found += bf16(family, 4)[: None if family in THOROUGH else 1]
    for layouts in feature_layouts():
        on_two = [case for case in layouts if case.ranks <= 2]
        seen = {case.family for case in found}
        found += [case for n, case in enumerate(on_two) if n < 2 or case.family not in seen]
    return ordered(found)


def feature_layouts() -> list[Sequence[Case]]:
    """Each feature in a few layouts, those that `make test` does not run in `make test-slow`."""
    lora = [Case(family, lora=True, **layout) for family, layout in LORA_LAYOUTS.items()]
    found = [lora, MTP_LAYOUTS, REPLAY_LAYOUTS, BALANCE_LAYOUTS, FROZEN_LAYOUTS, STAGE_LAYOUTS]
    return [*found, OVERLAP_LAYOUTS, GATHER_LAYOUTS, SIZES_LAYOUTS, DISPATCH_LAYOUTS]


FEATURES = (
    lora_cases,
    mtp_cases,
    replay_cases,
    balance_cases,
    frozen_cases,
    stage_cases,
    overlap_cases,
    gather_cases,
    sizes_cases,
    dispatch_cases,
)
"""Every value of every axis beside each feature, on so many ranks."""


def slow_cases() -> list[Case]:
    """What `make test-slow` runs besides: all pairs of families with experts up to 4 ranks, every value of the others' axes and on 8
    ranks, and some features on 2."""
    found = [case for family in THOROUGH_SLOWLY for case in (*covering(family, 4), *bf16(family, 4))]
    found += [case for family in OF_QWEN3 for case in (*covering(family, 4, 1), *bf16(family, 4))]
    found += covering("deepseek_v3", 8, strength=1)
    found += [case for family in BRIEFLY for case in (*few(family), *bf16(family, 4)[:1])]
    found += chain(*feature_layouts())
    found += [*lora_cases(2), *mtp_cases(2), *replay_cases(2), *stage_cases(2)]
    fast = set(fast_cases())
    return ordered(case for case in found if case not in fast)


def nightly_cases() -> list[Case]:
    """What `make test-nightly` runs besides: all pairs up to 8 ranks, and features on 4."""
    families = ("qwen3", *OF_QWEN3, *THOROUGH_SLOWLY)
    found = [case for family in families for case in (*covering(family, 8), *bf16(family, 8))]
    found += [case for cases in FEATURES for case in cases(4)]
    before = {*fast_cases(), *slow_cases()}
    return ordered(case for case in found if case not in before)


def bf16(family: str, ranks: int, **fixed: Any) -> list[Case]:
    """Every value of every axis once in bf16."""
    return covering(family, ranks, strength=1, dtype="bf16", **fixed)


def gpu_cases(gpus: int, backends: Iterable[str]) -> list[Case]:
    """What `python -m tests.oracle` runs on so many GPUs: with each back end of layers all pairs of some families, every
    value of every axis of the others, beside adapters and of bf16, and of bf16 beside optimizer state on the CPU."""
    found = [case for backend in backends for cases in FEATURES for case in cases(gpus, backend=backend)]
    for family, backend in product(FAMILIES, backends):
        found += covering(family, gpus, 2 if family in THOROUGH else 1, backend=backend)
        if family in MOE and family not in THOROUGH_SLOWLY:
            continue  # its routes are near ties in bf16, where GPU kernels round otherwise than CPU's
        found += bf16(family, gpus, backend=backend)
        hybrid = {"optimizer": "adamw", "distributed_optimizer": True, "cpu_optimizer": True}
        # Of tied embeddings one copy would be updated on the CPU and the other on a GPU: refused.
        one_stage = {"pp": 1} if family.endswith("-tied") else {}
        found += bf16(family, gpus, backend=backend, **hybrid, **one_stage)
        if family == "mimo":  # its embedding is on two stages as well
            found += bf16(family, gpus, backend=backend, mtp=1, head="lm", **hybrid, pp=1)
        if family == "qwen3":
            found += bf16(family, gpus, backend=backend, frozen=".o_proj", **hybrid)
            if gpus > 1:
                found += bf16(family, gpus, backend=backend, pp=2, vpp=1, stages="3.1", **hybrid)
            for how in (_OVERLAP, GATHER, _SIZES):
                found += bf16(family, gpus, backend=backend, **{**how, **hybrid})
        if family == "deepseek_v3":
            for how in ({**_BIAS, **_Z, **_AUX}, _BATCH, *([_HALVES] if gpus > 1 else [])):
                found += bf16(family, gpus, backend=backend, **how, **hybrid)
        if family in MOE and backend == "transformer_engine":
            spread = {"dp": 2, "ep": 2} if gpus > 1 else {}
            found.append(Case(family, backend=backend, fused_experts=True, **spread))
            if family == "qwen3_moe":
                found += bf16(family, gpus, backend=backend, experts="torch")
        if family == "qwen3_moe":
            for replay in ("old", "rollout"):
                found += bf16(family, gpus, backend=backend, replay=replay, **hybrid)
    return ordered(found)


def ordered(cases: Iterable[Case]) -> list[Case]:
    """By ranks, so that the process group changes seldom; each once."""
    return sorted(dict.fromkeys(cases), key=lambda case: case.ranks)
