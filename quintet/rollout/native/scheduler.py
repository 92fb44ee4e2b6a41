"""Continuous batching: which sequences decode, which prompts enter, who leaves.

Plain bookkeeping, the same on every rank that shares the requests. Samples of one prompt enter together when there
is room, so their prompt is computed once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quintet.errors import UserError
from quintet.rollout.base import Request, Sampling


@dataclass
class SequenceState:
    """One sample being written."""

    request: int
    number: int
    prompt_length: int
    most_tokens: int
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    finished: float = 0.0
    """When it was retired, by `time.perf_counter`."""


class Scheduler:
    """Waiting and active sequences of one `generate`. `active[i]` sits in slot i."""

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, slots: int, prefill_tokens: int
    ) -> None:
        self.requests, self.slots, self.prefill_tokens = requests, slots, prefill_tokens
        self.active: list[SequenceState] = []
        self.sequences: list[list[SequenceState]] = []
        self._waiting: deque[SequenceState] = deque()
        for r, request in enumerate(requests):
            if not request.prompt_ids:
                raise UserError(f"prompt {r} has no tokens: a response cannot start from nothing")
            limits = request.limits(sampling)
            made = [SequenceState(r, k, len(request.prompt_ids), limits[k]) for k in range(request.samples)]
            self.sequences.append(made)
            self._waiting.extend(made)
        self._unstarted = [len(row) for row in self.sequences]
        self._left = [len(row) for row in self.sequences]
        self._finished: list[int] = []

    @property
    def capacity(self) -> int:
        """The most tokens any sequence may come to hold."""
        return max(s.prompt_length + s.most_tokens for row in self.sequences for s in row)

    @property
    def most_active(self) -> int:
        """The most sequences ever active at once."""
        return min(self.slots, len(self._waiting) + len(self.active))

    @property
    def done(self) -> bool:
        return not self._waiting and not self.active

    def admit(self) -> list[list[SequenceState]]:
        """Move waiting samples into free slots, all of a prompt's together, so that its prompt is computed once.

        At most `prefill_tokens` prompt tokens, but always one prompt. Waits until an eighth of the slots is free:
        a prefill for every slot that falls vacant would hold up all others each time.
        """
        groups: list[list[SequenceState]] = []
        free, tokens = self.slots - len(self.active), 0
        if self.active and free < self.slots // 8:
            return groups
        while self._waiting:
            request = self._waiting[0].request
            size = min(self._unstarted[request], self.slots)
            length = self._waiting[0].prompt_length
            if size > free or (groups and tokens + length > self.prefill_tokens):
                break
            groups.append([self._waiting.popleft() for _ in range(size)])
            self.active.extend(groups[-1])
            self._unstarted[request] -= size
            free, tokens = free - size, tokens + length
        return groups

    def give_up(self) -> None:
        """End all sequences that are not done, the waiting ones without a token."""
        for row in self.sequences:
            for sequence in row:
                sequence.finish = sequence.finish or "abort"
        self._count_finished(self._waiting)
        self._waiting.clear()

    def take_finished(self) -> list[int]:
        """Return requests whose last sequence was retired since this was asked before."""
        found, self._finished = self._finished, []
        return found

    def _count_finished(self, gone: Iterable[SequenceState]) -> None:
        for one in gone:
            one.finished = time.perf_counter()
            self._left[one.request] -= 1
            if not self._left[one.request]:
                self._finished.append(one.request)

    def retire(self) -> tuple[list[int], list[int]]:
        """Drop finished sequences and close the gaps from the end. Returns moves (from slots, to slots)."""
        self._count_finished(s for s in self.active if s.finish)
        keep = sum(not s.finish for s in self.active)
        holes = [i for i, s in enumerate(self.active[:keep]) if s.finish]
        movers = [i for i in range(keep, len(self.active)) if not self.active[i].finish]
        for hole, mover in zip(holes, movers, strict=True):
            self.active[hole] = self.active[mover]
        del self.active[keep:]
        return movers, holes
