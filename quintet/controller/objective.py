"""What a micro-batch is trained on: a per-token loss, its weights, and the quantities worth watching."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.algorithms import kl
from quintet.algorithms.policy_loss import BoundLoss, clipped_loss, sft_loss
from quintet.algorithms.value_loss import value_loss_of_fields
from quintet.controller.messages import RouteUse
from quintet.recipe import schema

if TYPE_CHECKING:
    from quintet.engine.outputs import Outputs, ValueOutputs


@dataclass(frozen=True)
class Objective:
    """Per-token loss · the field `weights` (see `token_weights`), summed. Pickles, so the controller can name it.

    over_threshold: |Δ log-prob| of rollout and trainer above which a token counts as over the threshold. temperature: of the policy
    whose log-probs are trained.
    """

    loss: BoundLoss
    over_threshold: float = 0.5
    temperature: float = 1.0
    reads: tuple[str, ...] = ()
    """Fields that ranks hold of a batch, and that an update needs."""
    routes: RouteUse | None = None
    """What the update replays."""

    def __call__(self, outputs: Outputs, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the mini-batch's loss, and per-token quantities."""
        logprobs = outputs.logprobs
        # The first optimizer step on fresh samples: the old policy is the present one, its ratio exactly 1.
        fields.setdefault("old_logprobs", logprobs.detach())
        token_loss = self.loss(logprobs, fields)
        quantities = {**token_loss.stats, "entropy": outputs.entropy}
        if "rollout_logprobs" in fields:
            quantities |= kl.mismatch(
                fields["rollout_logprobs"], fields["old_logprobs"], fields["loss_mask"], self.over_threshold
            )
        return (token_loss.per_token * fields["weights"]).sum(), quantities


@dataclass(frozen=True)
class ValueObjective:
    """The same of a value model: its loss reads values instead of log-probs."""

    loss: BoundLoss
    temperature: float = 1.0
    reads: tuple[str, ...] = ("old_values", "returns")
    routes: RouteUse | None = None

    def __call__(self, outputs: ValueOutputs, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the mini-batch's loss, and per-token quantities."""
        token_loss = self.loss(outputs.values, fields)
        return (token_loss.per_token * fields["weights"]).sum(), token_loss.stats


def policy_objective(
    recipe: schema.Algorithm,
    mismatch: schema.Mismatch,
    temperature: float = 1.0,
    routes: RouteUse | None = None,
) -> Objective:
    """Return the objective of an RL step. routes: what it replays."""
    reads = (("ref_logprobs", recipe.kl_coef > 0), ("routes", routes is not None))
    return Objective(
        partial(
            clipped_loss,
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            kl_coef=recipe.kl_coef if recipe.kl_in == "loss" else 0.0,
            kl_estimator=recipe.kl_estimator,
        ),
        mismatch.token_threshold,
        temperature,
        ("advantages", *(name for name, read in reads if read)),
        routes,
    )


def sft_objective() -> Objective:
    """Return the negative log-likelihood of the responses."""
    return Objective(sft_loss)


def value_objective(clip: float | None) -> ValueObjective:
    """Return the clipped value loss of PPO; reads the fields `old_values`, `returns`, `loss_mask` and `weights`."""
    return ValueObjective(partial(value_loss_of_fields, clip=clip))
