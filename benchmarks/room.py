"""How deep a model a card trains, by the formula of `quintet.plan`, before anything is started."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.engine_work import Setup
from quintet.plan.memory import Memory, rank_memory
from quintet.plan.setup import Place
from quintet.plan.setup import Setup as Planned
from quintet.recipe.schema import Layout

USABLE = 0.93
"""Of a card's memory: the rest is CUDA's contexts, what libraries work in, and fragments."""
GIB = float(1 << 30)


def card_bytes() -> int | None:
    """Return the memory of this machine's first GPU as torch tells it, None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def memory_of(setup: Setup) -> Memory:
    """Return what the plan says of a rank of this setup."""
    layout = Layout(**setup.layout)
    return rank_memory(
        Planned(setup.shape, layout, setup.gpus, engine=setup.engine_recipe, backend="transformer_engine"),
        Place(),
    )


def needed(sides: Sequence[Setup], sequential: bool = False) -> int:
    """Return the most bytes that sides take of a card which take turns: one computes while others wait beside it with weights, gradients
    and optimizer state, or alone, if `sequential`."""
    plans = [memory_of(one) for one in sides]
    waiting = 0 if sequential else sum(one.static for one in plans)
    return max(one.peak + max(waiting - one.static, 0) for one in plans)


def deepest(needs: Callable[[int], int], most: int, card: int | None) -> int:
    """Return the largest depth, of at most `most` layers, whose need fits the card; `most` where the card is not known, 0 where none fits."""
    if card is None or needs(most) <= USABLE * card:
        return most
    return bisect_right(range(1, most), USABLE * card, key=needs)


def depth_of(
    sides: Sequence[Setup], asked: int | None, most: int, card: int | None, sequential: bool = False
) -> int:
    """Return the depth of sides that take turns: what was asked for, or the most that fits. SystemExit where it does not fit."""

    def needs(layers: int) -> int:
        return needed([replace(one, layers=layers) for one in sides], sequential)

    fits = deepest(needs, asked or most, card)
    if card is not None and (fits == 0 or (asked and fits < asked)):
        one_by_one = "" if sequential else ", --sequential has one side at a time on it"
        deep = f"--layers {fits} fits" if fits else "no depth fits"
        raise SystemExit(
            f"{asked or 1} layers take {needs(asked or 1) / GIB:.0f} GiB of a card of {card / GIB:.0f}, of which {USABLE:.0%} count: "
            f"{deep}{one_by_one}; --tokens makes rows smaller"
        )
    return fits
