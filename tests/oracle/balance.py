"""How experts are balanced, in the reference: from the formulas, router by router and sample by sample, without any of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BIAS_RATE, Z_WEIGHT, AUX_WEIGHT = 0.01, 0.02, 0.5


@dataclass(frozen=True)
class Balance:
    """What a case switches on. aux: "sequence", "batch" or ""."""

    bias: bool = False
    z: bool = False
    aux: str = ""


@dataclass
class Layer:
    """What a router did with a batch. logits: [samples, longest, experts]; sent: [samples, longest, top-k]."""

    number: int
    module: Any
    logits: Tensor
    sent: Tensor
    lengths: Sequence[int]

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Of each its logits, and the tokens that each expert got."""
        experts = self.logits.shape[-1]
        return [
            (logits[:n], torch.bincount(sent[:n].flatten(), minlength=experts))
            for logits, sent, n in zip(self.logits, self.sent, self.lengths, strict=True)
        ]

    def counts(self) -> Tensor:
        return torch.stack([counts for _, counts in self.samples()]).sum(0)

    def probabilities(self, logits: Tensor) -> Tensor:
        if hasattr(self.module, "e_score_correction_bias"):
            scores = logits.sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return logits.softmax(-1)

    def aux(self, per: str) -> Tensor:
        """The loss of how tokens are spread, without its weight."""
        experts, top_k = self.logits.shape[-1], self.sent.shape[-1]
        found = self.samples()
        if per == "batch":
            found = [(torch.cat([logits for logits, _ in found]), self.counts())]
        losses = []
        for logits, counts in found:
            share = counts * (experts / (top_k * len(logits)))
            losses.append((share * self.probabilities(logits).mean(0)).sum())
        return torch.stack(losses).mean()

    def z(self) -> Tensor:
        """The loss of how large logits are, without its weight."""
        return (torch.cat([logits for logits, _ in self.samples()]).logsumexp(-1) ** 2).mean()


def losses(layers: Sequence[Layer], how: Balance) -> tuple[Tensor, dict[str, float]]:
    """What is added to the loss, and what is told."""
    told: dict[str, float] = {}
    total = torch.zeros(())
    if not layers:
        return total, told
    if how.aux:
        aux = torch.stack([one.aux(how.aux) for one in layers]).sum()
        total, told = total + AUX_WEIGHT * aux, told | {"experts/aux_loss": aux.item()}
    if how.z:
        z = torch.stack([one.z() for one in layers]).sum()
        total, told = total + Z_WEIGHT * z, told | {"experts/z_loss": z.item()}
    for one in layers:
        counts = one.counts()
        told[f"experts/load_{one.number}"] = (counts.max() / counts.double().mean()).item()
        told[f"experts/idle_{one.number}"] = float((counts == 0).sum())
    return total, told


@torch.no_grad()
def move_biases(layers: Sequence[Layer]) -> None:
    """After an optimizer step: up where an expert got less than the mean of its layer, down where it got more."""
    for one in layers:
        counts = one.counts()
        mean = counts.double().mean()
        one.module.e_score_correction_bias += BIAS_RATE * (mean - counts).sign().float()
