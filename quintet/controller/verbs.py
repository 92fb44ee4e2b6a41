"""The verbs of the ranks, for the controller: to types and editors the workers' methods, when it runs their names.

The one table of what is called on ranks that the controller does not import: their modules bring megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.cluster.verbs import StandIn

if TYPE_CHECKING:
    from quintet.controller.rank_rollout import RankRollout as Rollout
    from quintet.controller.rollout_worker import RolloutWorker as RolloutProcess
    from quintet.controller.worker import PolicyWorker as Policy
    from quintet.rollout.base import Rollout as Backend
else:
    Policy = StandIn("quintet.controller.worker:PolicyWorker")
    Rollout = StandIn("quintet.controller.rank_rollout:RankRollout", part="rollout")
    Backend = StandIn("quintet.rollout.base:Rollout", part="rollout.backend")
    RolloutProcess = StandIn("quintet.controller.rollout_worker:RolloutWorker")

__all__ = ["Backend", "Policy", "Rollout", "RolloutProcess"]
