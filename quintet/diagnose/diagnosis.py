"""From log-probs computed in many ways to the first place where rollout and trainer part.

Every way stands for a cause: the same weights at another temperature, with the filters, with the routes that the rollout told,
with the weights of a step before, one position further. The cause that explains a side's recorded numbers, where the right way
does not, is the place. Causes are tried in the order in which a sample goes through them: tokens, weights, routes,
temperature and filters, kernels and precision. Here are numbers only: no file, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Place = Literal["tokens", "weights", "routes", "temperature and filters", "kernels and precision"]
FP32 = 1e-4
"""Mean |Δ log-prob| that kernels and layouts come to in fp32."""
BF16 = 1e-3
"""The least that counts in bf16, where what rounding comes to is measured."""
ROUNDING = 3.0
"""As many times what bf16 alone parts may two ways of computing in bf16 part."""
EXPLAINS = 1 / 3
"""A cause explains numbers if it leaves at most this share of their distance from what is right."""
TIES = 1.5
"""Causes as near to the best as this are as good; the first of them counts."""

FEW = 0.01
"""Share of the tokens that may be infinitely apart."""

ADVICE: dict[Place, str] = {
    "tokens": "The trainer must be given the token ids that were sampled, never their text tokenized again; look at what "
    "handles samples between rollout and trainer, and at the versions of the tokenizer's files.",
    "weights": "Keep rollout.sync_proof on, and look at the first step at which mismatch/kl_k3 rises: what was done between the "
    "sync before it and its samples (a restart, a sleep at level 2, a changed layout) left the rollout with other weights.",
    "routes": "Near ties between experts fall otherwise in other kernels. engine.replay_routes=rollout has the trainer send tokens "
    "where the rollout sent them; a rollout in the trainer's layout and dtype (rollout.backend=native) shows whether that is all.",
    "temperature and filters": "Trainer and rollout must mean the same distribution: rollout.temperature applied, top-p, top-k "
    "and min-p not. With vllm look at logprobs_mode and at what rollout.vllm passes through.",
    "kernels and precision": "Bring the sides nearer: model.dtype the same on both, rollout.quantization=null, "
    "rollout.vllm.enforce_eager=true to try without compiled kernels. What stays is rounding, for which mismatch.stop_above_kl "
    "must leave room.",
}


@dataclass
class Cause:
    """A way of computing that stands for something gone wrong, and what it came to: fp32 [tokens]."""

    place: Place
    what: str
    logprobs: Tensor


@dataclass
class Evidence:
    """Log-probs of the same response tokens, fp32 [tokens] each, and what else was found."""

    dtype: str
    """fp32 or bf16: in what the engine computes."""
    rollout: Tensor
    """As recorded: what the rollout told."""
    trainer: Tensor
    """As recorded: the trainer's before the step's first update."""
    plain: Tensor
    """Computed in fp32 in the plainest way, at the recipe's temperature, with the weights that generated."""
    bf16: Tensor
    """The same in bf16."""
    causes: list[Cause] = field(default_factory=list)
    engine: Tensor | None = None
    """Computed by the engine in its own layout, now."""
    now: tuple[Tensor, Tensor] | None = None
    """At temperature 1, now: scored by the rollout, and computed by the engine."""
    tokens: list[str] = field(default_factory=list)
    """What is wrong with the tokens, in sentences."""
    sync: str | None = None
    """What the proof of the weights said when they were brought to the rollout now, if it found them to differ."""
    routes: float | None = None
    """Share of the routes, by token and layer, that the plain model chooses otherwise than the rollout told."""


@dataclass(frozen=True)
class Line:
    """One line of the table of evidence: what was compared, mean and largest |Δ log-prob|, and what it says."""

    compared: str
    mean: float | None
    most: float | None
    says: str


@dataclass(frozen=True)
class Diagnosis:
    """The place where rollout and trainer part, None where they do not; a sentence that says so; and the evidence."""

    place: Place | None
    sentence: str
    lines: list[Line]

    @property
    def advice(self) -> str:
        """The advice on what to do."""
        return "" if self.place is None else ADVICE[self.place]


def judge(e: Evidence) -> Diagnosis:
    """Return the first place where the sides part, by the evidence."""
    bf16 = _mean(e.bf16, e.plain)
    rounding = max(ROUNDING * bf16, BF16)
    allowed = FP32 if e.dtype == "fp32" else rounding
    lines = _table(e, allowed, rounding)
    found = _find(e, allowed, rounding)
    if found is None:
        apart = _mean(e.rollout, e.trainer)
        said = f"Rollout and trainer agree: {apart:.1e} nats apart in the mean, {allowed:.1e} allowed."
        off = min(_mean(one, e.plain) for one in (e.rollout, e.trainer))
        if not off <= rounding:
            said += (
                f" Both are {off:.2g} nats from what these weights come to: they are not those that generated, or both sides "
                "were wrong alike."
            )
        return Diagnosis(None, said, lines)
    return Diagnosis(found[0], found[1], lines)


def _find(e: Evidence, allowed: float, rounding: float) -> tuple[Place, str] | None:
    if e.tokens:
        return "tokens", e.tokens[0]
    if e.sync is not None:
        return "weights", f"The weights do not arrive at the rollout: {e.sync}"
    for side, numbers in (("rollout", e.rollout), ("trainer", e.trainer)):
        if odd := int((~numbers.isfinite()).sum()):
            return "kernels and precision", f"{odd} of the {side}'s log-probs are no finite numbers."
    if _mean(e.rollout, e.trainer) <= allowed:
        return _now(e, allowed, rounding)
    sides = {"rollout": e.rollout, "trainer": e.trainer}
    off = {name: _mean(numbers, e.plain) for name, numbers in sides.items()}
    # The side further from what is right is the one to explain.
    for side in sorted(off, key=lambda name: -off[name]):
        numbers, gap = sides[side], off[side]
        if not gap <= allowed and (cause := _explains(e.causes, numbers, gap, allowed, rounding)) is not None:
            left = _mean(numbers, cause.logprobs)
            return cause.place, (
                f"The {side}'s log-probs are those of {cause.what}: that leaves {left:.2g} of the {gap:.2g} nats by which they "
                "are off."
            )
    side = max(off, key=lambda name: off[name])
    if off[side] <= rounding:
        return "kernels and precision", (
            f"The {side}'s log-probs are off by {off[side]:.1e} nats in the mean, no more than computing in bf16 comes to "
            f"({rounding:.1e}), and no other cause explains them."
        )
    now = _now(e, allowed, rounding)
    if now is not None:
        return now
    return "weights", (
        f"The {side}'s log-probs are off by {off[side]:.2g} nats in the mean, more than any rounding, and no temperature, filter, "
        f"route or position explains them: the {side} had other weights than those of the step before. What is computed now "
        "with the right ones agrees."
    )


def _now(e: Evidence, allowed: float, rounding: float) -> tuple[Place, str] | None:
    """What parts the sides when both compute now, with weights that were just brought from one to the other."""
    if e.engine is not None and not (gap := _mean(e.engine, e.plain)) <= rounding:
        return "kernels and precision", (
            f"The engine in its own layout is {gap:.1e} nats from the plain fp32 model with the same weights: what it computes with "
            "there (layers, attention, parallelism) is wrong."
        )
    if e.now is not None and not (gap := _mean(*e.now)) <= allowed:
        what = "more than bf16 comes to" if gap > rounding else "as much as bf16 comes to"
        return "kernels and precision", (
            f"With the same weights the rollout scores the samples {gap:.1e} nats from the engine, {what}: their kernels differ."
        )
    return None


def _explains(
    causes: list[Cause], numbers: Tensor, gap: float, allowed: float, rounding: float
) -> Cause | None:
    """The first cause, in the order of places, among those that explain the numbers best."""
    order = list(ADVICE)
    left = {id(one): _mean(numbers, one.logprobs) for one in causes}
    near = [one for one in causes if left[id(one)] <= min(EXPLAINS * gap, max(allowed, rounding))]
    if not near:
        return None
    best = min(left[id(one)] for one in near)
    # Below what is allowed nothing is better than anything else.
    good = [one for one in near if left[id(one)] <= max(TIES * best, allowed / 10)]
    return min(good, key=lambda one: order.index(one.place))


def _table(e: Evidence, allowed: float, rounding: float) -> list[Line]:
    def line(compared: str, a: Tensor, b: Tensor, limit: float) -> Line:
        mean = _mean(a, b)
        says = "agree" if mean <= limit else "bf16's rounding, or less" if mean <= rounding else "part"
        return Line(compared, mean, _most(a, b), says)

    lines = [
        Line(
            "tokens and numbers: as generated ↔ as trained on",
            None,
            None,
            "; ".join(e.tokens) or "the same",
        ),
        line("recorded: rollout ↔ trainer", e.rollout, e.trainer, allowed),
        line("recorded rollout ↔ fp32, one rank", e.rollout, e.plain, allowed),
        line("recorded trainer ↔ fp32, one rank", e.trainer, e.plain, allowed),
        Line("bf16 ↔ fp32, one rank", _mean(e.bf16, e.plain), _most(e.bf16, e.plain), "what rounding parts"),
    ]
    if e.engine is not None:
        lines.append(line("engine in its layout, now ↔ fp32, one rank", e.engine, e.plain, allowed))
    if e.now is not None:
        lines.append(line("now: rollout's scores ↔ engine's", *e.now, allowed))
    if e.sync is not None:
        lines.append(Line("weights brought to the rollout now", None, None, e.sync))
    if e.routes is not None:
        lines.append(Line("routes: told by the rollout ↔ fp32", None, None, f"{e.routes:.2%} differ"))
    return lines + _tried(e, allowed, rounding)


def _tried(e: Evidence, allowed: float, rounding: float) -> list[Line]:
    """A line a cause, for the side that is further from what is right."""
    gaps = {"rollout": _mean(e.rollout, e.plain), "trainer": _mean(e.trainer, e.plain)}
    side = "trainer" if gaps["trainer"] > max(gaps["rollout"], allowed) else "rollout"
    numbers, gap = getattr(e, side), gaps[side]
    lines = []
    for cause in e.causes:
        explains = _explains([cause], numbers, gap, allowed, rounding) is not None
        says = "" if gap <= allowed else "explains it" if explains else "does not"
        left, most = _mean(numbers, cause.logprobs), _most(numbers, cause.logprobs)
        lines.append(Line(f"recorded {side} ↔ {cause.what}", left, most, says))
    return lines


def shifted(logprobs: Tensor, lengths: list[int], by: int) -> Tensor:
    """Return each response's log-probs one position later (by=1) or earlier (by=-1); the end that is left repeats its neighbour."""
    rows = []
    for row in logprobs.split(lengths):
        at = (torch.arange(len(row)) - by).clamp(0, max(len(row) - 1, 0))
        rows.append(row[at])
    return torch.cat(rows)


def _mean(a: Tensor, b: Tensor) -> float:
    """Mean |difference|. A few tokens may be infinitely apart, which a filter leaves out by a hair here and not there; more of
    them, or one that is no number, make it infinite."""
    gap = (a - b).abs().double()
    if not len(gap):
        return 0.0
    lost = gap.isinf()
    if bool(gap.isnan().any()) or float(lost.double().mean()) > FEW:
        return float("inf")
    return float(gap[~lost].mean())


def _most(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if len(a) else 0.0
