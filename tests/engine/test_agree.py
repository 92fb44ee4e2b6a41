"""What ranks tell each other of their values and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from quintet.engine.agree import exchanged, gathered, most, run_on_all_or_raise
from quintet.errors import DamagedCheckpoint, QuintetError, UserError
from quintet.typed import Typed

TEXT: Typed[str] = Typed(str, "a text")
PAIR: Typed[tuple[int, str]] = Typed(tuple[int, str], "a pair")
NUMBER: Typed[int] = Typed(int, "a number")


def told(call: Callable[[], Any]) -> str:
    with pytest.raises(QuintetError) as caught:
        call()
    return str(caught.value)


def values() -> None:
    """On each rank: values of every length arrive from whom they are, and one of another type is said to be its sender's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for lengths in ([0] * world, [40, 0, 7, 40][:world]):
        assert gathered(TEXT, "é" * lengths[rank]) == ["é" * one for one in lengths]
    sent = [[(a, "x" * (5 * a + b)) for b in range(world)] for a in range(world)]
    assert exchanged(PAIR, sent[rank]) == [one[rank] for one in sent]
    assert most([]) == []
    assert most([rank, -rank, 2**40]) == [world - 1, 0, 2**40]
    if world > 1:
        kind, value, other = (TEXT, "a", 0) if rank == world - 1 else (NUMBER, 1, world - 1)
        for call in (lambda: gathered(kind, value), lambda: exchanged(kind, [value] * world)):
            assert f"what came from rank {other} is not {kind.what}" in told(call)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_values_arrive_as_they_were_sent(pool, world):
    pool.run(values, world)


def raised(errors: list[Exception | None]) -> tuple[str, str] | None:
    """On each rank: kind and words of what is raised where these are the ranks' failures."""

    def work() -> int:
        if (error := errors[dist.get_rank()]) is not None:
            raise error
        return dist.get_rank()

    try:
        assert run_on_all_or_raise(work) == dist.get_rank()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


BUG = ValueError("no such thing")
OF_BUG = [("RuntimeError", "rank 1 failed: no such thing"), ("ValueError", "no such thing")]


@pytest.mark.parametrize(
    ("errors", "want"),
    [
        ([None, None], [None, None]),
        ([None, BUG], OF_BUG),
        ([None, KeyError()], [("RuntimeError", "rank 1 failed: KeyError()"), ("KeyError", "")]),
        ([UserError("mine"), None], [("UserError", "mine")] * 2),
        ([DamagedCheckpoint("a"), DamagedCheckpoint("b")], [("DamagedCheckpoint", w) for w in "ab"]),
        ([None, DamagedCheckpoint("b")], [("DamagedCheckpoint", "b")] * 2),
        ([DamagedCheckpoint("a"), BUG], OF_BUG),
        ([UserError("mine"), BUG], [("UserError", "mine"), ("ValueError", "no such thing")]),
    ],
    ids=str,
)
def test_what_failed_on_one_rank_is_raised_on_all(pool, errors, want):
    assert pool.run(raised, len(errors), errors) == want


def test_one_rank_raises_what_was_raised(pool):
    assert pool.run(raised, 1, [BUG]) == [("ValueError", "no such thing")]
    assert pool.run(raised, 1, [None]) == [None]
