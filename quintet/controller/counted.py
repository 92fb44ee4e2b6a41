"""What rollouts counted in a step, as its metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from quintet.controller.dealing import SlotTime
from quintet.rollout.base import accepted_at


def counted_metrics(counts: Mapping[str, float], slots: Sequence[SlotTime]) -> dict[str, float]:
    """Return metrics of the counts of all rollouts (`Rollout.metrics`): shares of the prefix cache's and of the drafts' tokens, and of
    the time of their slots, where there are any."""
    told = {}
    if total := sum(one.total for one in slots):
        told["rollout/tail_idle_fraction"] = sum(one.idle for one in slots) / total
    if counts.get("prefix_cache_queries"):
        told["rollout/prefix_cache_fraction"] = counts["prefix_cache_hits"] / counts["prefix_cache_queries"]
    if counts.get("draft_tokens"):
        told["rollout/draft_tokens"] = counts["draft_tokens"]
        told["rollout/accepted_fraction"] = counts["accepted_tokens"] / counts["draft_tokens"]
        told["rollout/accepted_length"] = 1 + counts["accepted_tokens"] / counts["drafts"]
        for position in itertools.count(1):
            if accepted_at(position) not in counts:
                break
            told[f"rollout/{accepted_at(position)}"] = counts[accepted_at(position)] / counts["drafts"]
    return told
