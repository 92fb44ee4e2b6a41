"""The oracle: transformers, one process, fp32. What it says about a batch is what every layout must say.

It trains one of the tiny `models` for a few optimizer steps, each on a batch of its own, and keeps what a layout is
compared with.

Routes: a model with experts is a discontinuous function. Where two scores are nearly equal, rounding decides which
expert a token gets. Where a case does not replay routes, the weights of the MoE families (`models.SEEDS`) are drawn so that no
token in any layer at any step comes near a tie: the smallest gap between a chosen and a rejected score (of experts, and
of groups of experts) is at least MARGIN times the scores' numeric error, which is what the same training in float64
differs by. `reference` raises when that does not hold. On the batch BF16_BATCH the gap is large enough for bf16 as
well. `python -m tests.oracle.reference [family …]` looks for such seeds. Where a case replays routes, the experts are forced
here too, by hooks on transformers' routers, and no tie is too near.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import cached

from tests.oracle.ahead import layers_of, losses, named
from tests.oracle.balance import Balance, Layer, move_biases
from tests.oracle.balance import losses as losses_of_load
from tests.oracle.cases import OPTIMIZERS, Case, lr_multipliers
from tests.oracle.data import (  # noqa: F401  (LENGTHS and PROMPT: for those who import this module alone)
    AHEAD_CLIP,
    AHEAD_WEIGHT,
    BATCHES,
    BF16_BATCH,
    ENTROPY_WEIGHT,
    LENGTHS,
    PROMPT,
    TEMPERATURE,
    VOCAB,
    ahead_counts,
    loss_mask,
    returns,
    routes,
    token_ids,
    trained_tokens,
)
from tests.oracle.lora import attach, base_names
from tests.oracle.models import (  # noqa: F401  (the same)
    CONFIGS,
    SEEDS,
    drawn,
    hub_names,
    model,
    save,
    value_head,
)

NORM_FLOOR = 1e-6
"""Errors are relative to the reference's norm plus this. No gradient's norm is below 1000 of it."""
MARGIN = 50.0
WIDE_MARGIN = 2 * MARGIN
"""Of seeds that are looked for: on a processor with other kernels the same error is up to twice as large."""


@dataclass(frozen=True)
class Ahead:
    """Layers for multi-token prediction, and how they are trained."""

    depths: int
    loss: str
    detach: bool


@dataclass(frozen=True)
class Step:
    """One optimizer step: loss and gradients before it (norm before clipping), parameters after it, by hub name. Of layers for
    multi-token prediction: what each depth's head says (loss, accuracy), and the norm of their gradients. balance: what is told of the load of experts."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    ahead: dict[str, float]
    ahead_norm: float
    balance: dict[str, float]


@dataclass(frozen=True)
class Reference:
    """parameters: before the first step. outputs: of the first batch, flat over its tokens, 0 where untrained:
    log-probs and entropy, or values. buffers: what is on disk beside parameters, after the last step."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    steps: list[Step]


def reference(case: Case) -> Reference:
    """What every layout of a case's family, head, optimizer and adapters must say.

    Raises AssertionError when a routing choice is too near a tie to be compared, or a gradient too small.
    """
    ahead = Ahead(case.mtp, case.mtp_loss, case.mtp_detach) if case.mtp else None
    kind = case.head, case.optimizer, case.lr_multipliers, case.lora
    replay = case.replay if case.head == "lm" else ""
    return _reference(case.family, *kind, case.batches, ahead, replay, case.balance, case.frozen)


@cache
def _reference(
    name: str,
    head: str,
    optimizer: str,
    multipliers: bool,
    lora: bool,
    batches: tuple[int, ...],
    ahead: Ahead | None,
    replay: str,
    balance: Balance,
    frozen: str,
) -> Reference:
    how = (name, head, optimizer, multipliers, lora, ahead, replay, balance, frozen)
    trained = _Run(*how)
    found = trained.train(batches)
    if any(router.scores for router in trained.routers):
        exact = _Run(*how, dtype=torch.float64)
        exact.train(batches)
        check_margin(name, trained, exact)
    for step in found.steps:
        small = [n for n, gradient in step.gradients.items() if 0 < gradient.norm() < 1000 * NORM_FLOOR]
        assert not small, f"{name}: gradients too small to be compared: {small}"
    return found


class _Run:
    """A model in training, in one float type."""

    def __init__(
        self,
        name: str,
        head: str = "lm",
        optimizer: str = "adamw",
        multipliers: bool = False,
        lora: bool = False,
        ahead: Ahead | None = None,
        replay: str = "",
        balance: Balance = Balance(),  # noqa: B008  (a value)
        frozen: str = "",
        *,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        adapter_seed: int | None = None,
        ahead_seed: int | None = None,
    ) -> None:
        self.name, self.ahead, self.replay, self.balance = name, ahead, replay, balance
        made = model(name) if seed is None else drawn(name, seed)
        self.model = made.to(dtype)
        self.layers = layers_of(name, ahead.depths, ahead_seed).to(dtype) if ahead else []
        self.seen: tuple[Tensor, Tensor] | None = None  # states before and after the final norm
        self.model.model.norm.register_forward_hook(self._see)
        self.score = torch.nn.Parameter(value_head().to(dtype)) if head == "value" else None
        self.routers = [
            _Router(m, made.config, of_trunk=one is made)
            for one in (made, *self.layers)
            for m in one.modules()
            if hasattr(m, "top_k") and hasattr(m, "weight")
        ]
        self.forced: dict[int, tuple[Tensor, Tensor]] = {}
        """By batch the experts [samples · tokens, layers, top-k] that the trunk's tokens are sent to, and which tokens."""
        self.adapters = attach(self.model, name, adapter_seed) if lora else None
        for weight, p in self._named():
            if frozen and weight.endswith(f"{frozen}.weight"):
                p.requires_grad_(False)
        self.recipe = OPTIMIZERS[optimizer]
        self.optimizer = self._optimizer(lr_multipliers(lora) if multipliers else {})

    def _see(self, norm: Any, given: tuple[Tensor], normed: Tensor) -> None:
        self.seen = given[0], normed

    def _optimizer(self, multipliers: Mapping[str, float]) -> torch.optim.Optimizer:
        """torch's own, of the engine's recipe: matrices decay, vectors (also one an expert) do not, and the first pattern that matches a name counts."""
        groups = []
        for name, p in ((name, p) for name, p in self._named() if p.requires_grad):
            factor = next((f for pattern, f in multipliers.items() if fnmatchcase(name, pattern)), 1.0)
            decay = self.recipe.weight_decay if p.dim() > 1 and not name.endswith("bias") else 0.0
            groups.append({"params": [p], "lr": self.recipe.lr * factor, "weight_decay": decay})
        if self.recipe.name == "sgd":
            return torch.optim.SGD(groups, momentum=self.recipe.momentum)
        kind = torch.optim.AdamW if self.recipe.name == "adamw" else torch.optim.Adam
        return kind(groups, betas=(self.recipe.beta1, self.recipe.beta2), eps=self.recipe.eps)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained: the model, or its adapters, and in either case a value head."""
        if self.adapters is not None:
            trunk = list(self.adapters.items())
        else:
            trunk = list(self.model.named_parameters())
        if self.ahead:
            trunk += [(n, p) for n, p in named(self.name, self.layers) if not n.endswith("_bias")]  # type: ignore[misc]
        if self.score is None:
            return trunk
        return [*((n, p) for n, p in trunk if n != "lm_head.weight"), ("score.weight", self.score)]

    def _fixed(self) -> dict[str, Tensor]:
        """What is on disk and not trained."""
        fixed = {n: b.clone() for n, b in self.model.named_buffers() if n.endswith("e_score_correction_bias")}
        fixed |= {n: b for n, b in named(self.name, self.layers) if n.endswith("e_score_correction_bias")}
        if self.adapters is not None:
            base = self._on_hub((n, p.detach().clone()) for n, p in base_names(self.model.named_parameters()))
            fixed |= {n: t for n, t in base.items() if self.score is None or n != "lm_head.weight"}
        return fixed

    def _on_hub(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return hub_names(named, self.name)

    def train(self, batches: Iterable[int]) -> Reference:
        before = self._on_hub((n, p.detach().clone()) for n, p in self._named())
        buffers = self._fixed()
        outputs: tuple[Tensor, ...] = ()
        steps = []
        batches = list(batches)
        if self.replay:
            self.forced = {b: self._recorded(b) if self.replay == "old" else self._told(b) for b in batches}
        for batch in batches:
            self.optimizer.zero_grad()
            with cached():  # adapters are merged once
                loss, outs = self._loss(batch)
                ahead = self._ahead(batch)
            outputs = outputs or outs
            load = self._load(batch)
            balancing, balanced = losses_of_load(load, self.balance)
            (loss + AHEAD_WEIGHT * sum(one[0] for one in ahead) + balancing).backward()
            gradients = self._on_hub((n, p.grad.clone()) for n, p in self._named() if p.grad is not None)
            of_ahead = {id(p) for p in self.layers.parameters()} if self.ahead else set()
            own = [p for _, p in self._named() if id(p) not in of_ahead]
            norm = torch.nn.utils.clip_grad_norm_(own, self.recipe.clip_grad_norm)
            ahead_norm = torch.nn.utils.clip_grad_norm_(
                self.layers.parameters() if self.ahead else [], AHEAD_CLIP
            )
            self.optimizer.step()
            if self.balance.bias:
                move_biases(load)
            after = self._on_hub((n, p.detach().clone()) for n, p in self._named())
            told = {
                f"mtp/{what}_{depth}": float(torch.as_tensor(value).detach())
                for depth, one in enumerate(ahead, start=1)
                for what, value in zip(("loss", "accuracy"), one, strict=True)
            }
            steps.append(Step(loss.item(), norm.item(), gradients, after, told, ahead_norm.item(), balanced))
        return Reference(before, self._fixed() if self.balance.bias else buffers, outputs, steps)

    def _load(self, batch: int) -> list[Layer]:
        """What the trunk's routers did in the forward pass before."""
        lengths = BATCHES[batch]
        shape = len(lengths), max(lengths), -1
        layers = [n for n, one in enumerate(self.model.model.layers) if hasattr(one.mlp, "experts")]
        of_trunk = [router for router in self.routers if router.of_trunk]
        return [
            Layer(n, one.module, one.logits.view(shape), one.sent.view(shape), lengths)
            for n, one in zip(layers, of_trunk, strict=True)
        ]

    def _loss(self, batch: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All samples at once, padded on the right: under a causal mask no token sees what follows it."""
        samples = [torch.tensor(ids) for ids in token_ids(batch)]
        padded = _padded(batch)
        of_trunk = [router for router in self.routers if router.of_trunk]
        for router in self.routers:
            router.real = padded.flatten() >= 0
        if batch in self.forced:
            told, there = self.forced[batch]
            for number, router in enumerate(of_trunk):
                router.forced = told[:, number], there
        states = self._states(padded.clamp(min=0))
        columns: list[tuple[Tensor, ...]] = []
        loss = torch.zeros(())
        for x, state in zip(samples, states, strict=True):
            mask, state = torch.tensor(loss_mask(len(x), self.ahead is not None)), state[: len(x)]
            if self.score is None:
                made = _log_probs_and_entropy(x, state)
                loss = loss - (mask * (made[0] + ENTROPY_WEIGHT * made[1])).sum()
            else:
                made = (_shifted(state),)
                loss = loss + (mask * (made[0] - torch.tensor(returns(len(x)))) ** 2).sum()
            columns.append(tuple((mask * column).detach() for column in made))
        count = ahead_counts(batch, 0)[0] if self.ahead else trained_tokens(batch)
        return loss / count, tuple(torch.cat(c) for c in zip(*columns, strict=True))

    def _told(self, batch: int) -> tuple[Tensor, Tensor]:
        """The routes that a rollout told, of all tokens of a sample but the last."""
        of_trunk = [router for router in self.routers if router.of_trunk]
        made = routes(batch, len(of_trunk), self.routers[0].module.num_experts, self.routers[0].module.top_k)
        longest = max(BATCHES[batch])
        told = torch.stack([torch.cat((o, o.new_zeros(longest - len(o), *o.shape[1:]))) for o in made])
        there = torch.arange(longest) < torch.tensor(BATCHES[batch])[:, None] - 1
        return told.flatten(0, 1).long(), there.flatten()

    @torch.no_grad()
    def _recorded(self, batch: int) -> tuple[Tensor, Tensor]:
        """The routes that tokens choose by themselves now."""
        self._loss(batch)
        heard = [router.chosen for router in self.routers if router.of_trunk]
        return torch.stack(heard, 1), _padded(batch).flatten() >= 0

    def _ahead(self, batch: int) -> list[tuple[Tensor, float]]:
        """Loss and accuracy of each depth, of the states that the loss has just been made from."""
        if self.ahead is None:
            return []
        assert self.seen is not None
        how = {"loss": self.ahead.loss, "detach": self.ahead.detach}
        return list(zip(*losses(self, _padded(batch), *self.seen, batch, **how), strict=True))

    def _states(self, ids: Tensor) -> Tensor:
        """ids: [samples, tokens]. Logits [..., vocabulary], or values."""
        if self.score is None:
            return self.model(input_ids=ids).logits
        return (self.model.model(input_ids=ids).last_hidden_state @ self.score.t())[..., 0]


def _padded(batch: int) -> Tensor:
    samples = [torch.tensor(ids) for ids in token_ids(batch)]
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def _log_probs_and_entropy(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    of_next = log_p[:-1].gather(1, x[1:, None])[:, 0]
    return torch.cat((of_next.new_zeros(1), of_next)), _shifted(-(log_p.exp() * log_p).sum(-1))


def _shifted(x: Tensor) -> Tensor:
    """What is read at the position before each token; 0 for the first."""
    return torch.cat((x.new_zeros(1), x[:-1]))


@dataclass
class _Router:
    """Records, at every call of a router, the scores that are compared and how far apart chosen and rejected are, or has it take
    other experts than it would.

    of_trunk: rather than of a layer for multi-token prediction. real: which of the call's tokens are no padding. chosen: the
    experts [tokens, top-k] of the last call that chose. forced: what is chosen instead, and by which of the tokens. logits, sent: of
    the last call, with whatever was forced.
    """

    module: Any
    config: Any
    of_trunk: bool = True
    scores: list[Tensor] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)
    real: Tensor | None = None
    chosen: Tensor = field(default_factory=lambda: torch.empty(0))
    forced: tuple[Tensor, Tensor] | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    sent: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.module.register_forward_hook(lambda module, args, out: self._choose(*out))

    def _choose(self, logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.logits, self.sent = logits, chosen
        if self.forced is None:
            self._record(logits.detach()[self.real])
            self.chosen = chosen
            return logits, weights, chosen
        told, there = self.forced
        self.sent = chosen = torch.where(there[:, None], told, chosen)
        return logits, self._weights(logits, chosen), chosen

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights of chosen experts; in all these families they sum to one, or to a factor."""
        if not hasattr(self.module, "e_score_correction_bias"):
            return logits.gather(1, chosen).softmax(-1)
        scores = logits.sigmoid().gather(1, chosen)
        return scores / scores.sum(-1, keepdim=True) * self.module.routed_scaling_factor

    def _record(self, logits: Tensor) -> None:
        if not hasattr(self.module, "e_score_correction_bias"):
            self.scores.append(logits)
            self.gaps.append(_gap(logits, self.module.top_k))
            return
        scores = logits.sigmoid() + self.module.e_score_correction_bias
        by_group = scores.view(len(scores), self.config.n_group, -1)
        of_groups = by_group.topk(2).values.sum(-1)
        allowed = torch.zeros_like(of_groups).scatter_(1, of_groups.topk(self.config.topk_group).indices, 1.0)
        within = by_group.masked_fill(allowed[..., None] == 0, -torch.inf).flatten(1)
        self.scores.append(scores)
        self.gaps.append(
            torch.minimum(_gap(of_groups, self.config.topk_group), _gap(within, self.module.top_k))
        )


def _gap(scores: Tensor, k: int) -> Tensor:
    if k == scores.shape[1]:  # nothing is rejected
        return torch.full((len(scores),), torch.inf, dtype=scores.dtype)
    best = scores.topk(k + 1).values
    return best[:, k - 1] - best[:, k]


def check_margin(name: str, trained: _Run, exact: _Run, least: float = MARGIN) -> float:
    """The smallest gap of a run over its scores' numeric error, which the same run in float64 tells.

    Raises AssertionError when it is less than `least`.
    """
    pairs = [
        (a, b)
        for one, other in zip(trained.routers, exact.routers, strict=True)
        for a, b in zip(one.scores, other.scores, strict=True)
    ]
    error = max((a - b).abs().max().item() for a, b in pairs)
    margin = smallest_gap(trained) / error
    assert margin >= least, (
        f"{name}: a routing choice is only {margin:.0f} times the numeric error from a tie"
    )
    return margin


def smallest_gap(run: _Run) -> float:
    """Over all routers, tokens and steps that the run has seen."""
    return min(gap.min().item() for router in run.routers for gap in router.gaps)


def _search(name: str, adapters: bool, tries: int = 1500) -> None:
    """Print seeds of the weights, or of adapters beside them, with a wide gap on BF16_BATCH that keep WIDE_MARGIN in training with
    every head and optimizer."""
    which = "adapter_seed" if adapters else "seed"
    wide: list[tuple[float, int]] = []
    for seed in range(tries):
        run = _Run(name, lora=adapters, **{which: seed})
        with torch.no_grad():
            run._loss(BF16_BATCH)
        wide.append((smallest_gap(run), seed))
    for gap, seed in sorted(wide, reverse=True)[: tries // 60]:
        margins = []
        for kind in product(("lm", "value"), OPTIMIZERS, (False, True)):
            dtypes = (torch.float32, torch.float64)
            runs = [_Run(name, *kind, adapters, **{which: seed}, dtype=dtype) for dtype in dtypes]
            for run in runs:
                run.train(range(len(BATCHES)))
            margins.append(check_margin(name, *runs, least=0.0))
            if margins[-1] < WIDE_MARGIN:
                break
        else:
            found = f"gap {gap:.3f} on the bf16 batch, margin {min(margins):.0f}"
            print(f"{name} {which} {seed}: {found}", flush=True)


if __name__ == "__main__":
    for family, adapters in product(sys.argv[1:] or SEEDS, (False, True)):
        _search(family, adapters)
