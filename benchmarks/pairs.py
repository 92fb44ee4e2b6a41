"""Two ways to train the same packed rows, both of quintet's engine, each in processes of its own that take turns on the GPUs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.engine_work import Setup
from benchmarks.sides import Side


class Taken:
    """What a side's turns came to: seconds of each step, by turn, and losses; the most memory that it held."""

    def __init__(self) -> None:
        self.turns: list[list[float]] = []
        self.losses: list[float] = []
        self.peak_gib = 0.0

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Add a turn, as all ranks saw it: a step ends with its slowest rank; losses are shares."""
        self.turns.append([max(ranks) for ranks in zip(*(one["seconds"] for one in answers), strict=True)])
        self.losses += [sum(ranks) for ranks in zip(*(one["losses"] for one in answers), strict=True)]
        self.peak_gib = max(self.peak_gib, *(one["peak_gib"] for one in answers))

    @property
    def seconds(self) -> float:
        """The median of all steps."""
        return statistics.median(second for turn in self.turns for second in turn)


def in_turns(pair: Sequence[tuple[str, Setup]], args: argparse.Namespace) -> list[Taken]:
    """Let two sides, each with its name, take `args.rounds` turns of `args.steps_per_turn` steps. They live through it beside each other, or with
    `args.sequential` are started anew for each turn, for models that fit only once."""
    found = [Taken() for _ in pair]
    with ExitStack() as stack:
        live: list[Side] = []

        def start(name: str, setup: Setup) -> Side:
            worker = ["benchmarks.engine", "--worker", "quintet", "--setup", json.dumps(setup.asdict())]
            side = Side(name, worker, ranks=setup.gpus, timeout_s=args.timeout_s)
            stack.callback(side.kill)
            return side

        if not args.sequential:
            live = [start(*one) for one in pair]
            for side in live:
                side.answer()
        for turn in range(args.rounds):
            for at, (name, setup) in enumerate(pair):
                side = start(name, setup) if args.sequential else live[at]
                if args.sequential:
                    side.answer()
                warmup = setup.steps + 1 if turn == 0 or args.sequential else 1
                found[at].add(side.ask(do="burst", warmup=warmup, steps=args.steps_per_turn))
                if args.sequential:
                    side.stop()
        for side in live:
            side.stop()
    return found
