"""Ranks without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quintet.cluster.verbs import Asked, Ranks


class Named(str):
    """A call on its way, by its verb."""

    heard: Any = None


class AskedRanks(Ranks):
    """Ranks that answer at once, by `answer`."""

    n_ranks = 1

    def coords(self) -> list[dict[str, int]]:
        return [{"dp": rank} for rank in range(self.n_ranks)]

    def answer(self, name: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        """What a rank answers to a verb."""

    def submit(self, asked: Asked) -> Any:
        told = {
            rank: self.answer(asked.verb.__name__, rank, *args, **kwargs)
            for rank, (args, kwargs) in asked.calls.items()
        }
        value = [told[rank] for rank in asked.owners]
        return SimpleNamespace(result=lambda watch=None: value[0] if asked.single else value, others=None)
