"""Which rollout gets which requests of a call, in which order; how long slots stood empty at its end, and what else rollouts counted, as
metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import NamedTuple

from quintet.rollout.base import accepted_at


class SlotTime(NamedTuple):
    """Slot-seconds of all rollouts: those of empty slots for which no request was left, and all of the call."""

    idle: float = 0.0
    total: float = 0.0


def deal(count: int, rollouts: int, expected: Sequence[float] | None) -> list[list[int]]:
    """Return by rollout the numbers of its requests, in the order in which they start. expected: tokens of a response to each.

    The longest first, each to the rollout that has the fewest tokens so far (Graham 1969): what starts last is short, and rollouts end
    together as far as responses are as long as expected; of others one may have a queue when another is done. Where nothing is expected
    requests go to the rollouts in turns, so that prompts in an order of length are shared out. It follows from the arguments
    alone, not from who is faster: a call that is repeated, after a death or on resuming, is the same batches bit for bit.
    """
    if expected is None:
        return [list(range(rollout, count, rollouts)) for rollout in range(rollouts)]
    shares: list[list[int]] = [[] for _ in range(rollouts)]
    loads = [(0.0, 0, rollout) for rollout in range(rollouts)]  # a heap, being sorted
    for number in sorted(range(count), key=lambda one: -expected[one]):
        tokens, requests, rollout = loads[0]
        shares[rollout].append(number)
        heapreplace(loads, (tokens + expected[number], requests + 1, rollout))
    return shares


def slot_time(finished: Sequence[Sequence[float]], slots: int, began: float = 0.0) -> SlotTime:
    """Return what a call's slots came to. finished: by rollout, when each of its sequences had its last token, and began: when the call
    did, seconds on one clock. slots: most sequences that a rollout writes at once.

    A rollout has as many slots as it ever filled. Its queue is empty once only as many sequences are left as it has slots: from then on
    one that finishes leaves its slot empty until the last sequence of all rollouts is done.
    """
    ends = max((at for times in finished for at in times), default=began)
    last = [at for times in finished for at in sorted(times)[-slots:]]
    return SlotTime(sum(ends - at for at in last), len(last) * (ends - began))


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
