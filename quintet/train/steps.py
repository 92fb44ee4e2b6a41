"""What one step came to, as it is collected while the step is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.expert_load import ExpertLoad
from quintet.controller.messages import MiniBatchTold, OptimizerTold, PartedRoutes, TrainedTokens, joined
from quintet.controller.samples import Samples
from quintet.rewards.result import RewardResult


@dataclass
class Update:
    """What a role's optimizer steps on one step's samples came to: loss and gradient norm are means over mini-batches, the rate is
    the last's."""

    tally: Tally = field(default_factory=Tally)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    replayed: dict[int, TrainedTokens] = field(default_factory=dict)
    """The step's first samples as they were trained on, by number."""
    parted: PartedRoutes = field(default_factory=dict)
    load: ExpertLoad | None = None
    """Of experts, in all mini-batches."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What is told of further heads, of experts and of routes, by name."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def grad_norm(self) -> float:
        return sum(self.norms) / len(self.norms)

    def add(self, told: Sequence[MiniBatchTold], stepped: OptimizerTold) -> None:
        """Count a mini-batch."""
        self.losses.append(sum(one.loss for one in told))
        self.tally.merge(one.tally for one in told)
        self.norms.append(stepped.grad_norm)
        self.lr = stepped.lr
        for one in told:
            self.replayed |= one.replayed
            self.parted = joined(self.parted, one.parted)
        means = self.tally.means()
        self.metrics = {name: mean for name, mean in means.items() if "/" in name} | stepped.metrics
        if stepped.load is not None:
            self.load = stepped.load if self.load is None else self.load + stepped.load
            self.metrics |= self.load.metrics()
        self.metrics |= self._routes()

    def _routes(self) -> dict[str, float]:
        """Of replayed routes: the share of tokens, in all layers and in each, whose own choice would have been another."""
        if not self.parted:
            return {}
        name = "routes/parted"
        counts = {name: [sum(some) for some in zip(*self.parted.values(), strict=True)]}
        counts |= {f"{name}_{layer}": list(some) for layer, some in self.parted.items()}
        return {name: other / max(tokens, 1) for name, (other, tokens) in counts.items()}


@dataclass
class Step:
    """One step under way. metrics: what is told of it besides."""

    number: int
    samples: Samples | None = None
    rewards: list[RewardResult] = field(default_factory=list)
    """Of all that was generated, also of groups that were not selected."""
    updates: dict[str, Update] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, role: str, told: Sequence[MiniBatchTold], stepped: OptimizerTold) -> None:
        """Count what a role's optimizer step on a mini-batch came to."""
        self.updates.setdefault(role, Update()).add(told, stepped)
