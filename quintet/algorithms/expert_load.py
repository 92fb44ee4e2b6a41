"""How evenly experts were used in some mini-batches, over all ranks (`quintet.engine.balance` says what counts)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertLoad:
    """sent: [layers, experts], fp64, by each of these layers with experts the tokens that it sent to each. losses: of routers, by name,
    without weights, summed over the mini-batches."""

    layers: tuple[int, ...]
    sent: Tensor
    losses: dict[str, float]
    minibatches: int = 1

    @classmethod
    def of(cls, total: Tensor, layers: Iterable[int], losses: Sequence[str] = ()) -> ExpertLoad:
        """Return that of one mini-batch. total: [layers of the model, experts + 2], the tokens, then the loss of load and that of
        logits. losses: which of the two the recipe adds."""
        here = tuple(layers)
        held = total[list(here)].cpu()
        sums = dict(zip(("experts/aux_loss", "experts/z_loss"), held[:, -2:].sum(0).tolist(), strict=True))
        return cls(here, held[:, :-2], {name: sums[name] for name in losses})

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        losses = {name: loss + other.losses[name] for name, loss in self.losses.items()}
        return ExpertLoad(self.layers, self.sent + other.sent, losses, self.minibatches + other.minibatches)

    def metrics(self) -> dict[str, float]:
        """Return what is logged: of each layer, the tokens of the busiest expert over the mean, and the experts without any; the worst of
        the one, the sum of the other; and the means of the losses over mini-batches."""
        busiest = (self.sent.amax(1) / self.sent.mean(1).clamp(min=1e-9)).tolist()
        idle = (self.sent == 0).sum(1).double().tolist()
        told = {"experts/load": max(busiest), "experts/idle": sum(idle)}
        for name, values in (("experts/load", busiest), ("experts/idle", idle)):
            told |= {f"{name}_{layer}": value for layer, value in zip(self.layers, values, strict=True)}
        return told | {name: loss / self.minibatches for name, loss in self.losses.items()}
