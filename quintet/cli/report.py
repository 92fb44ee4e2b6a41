"""`quintet report`: a run's report and summary, made anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from quintet.cli.command import Command
from quintet.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Write RUN/report.html and RUN/summary.json anew, unless the run is under way and does so itself. 0 done."""
    from quintet.observe.report import make_anew
    from quintet.runs.lock import LOCK, holder_of

    if arguments.run.is_dir() and (holder := holder_of(arguments.run / LOCK)) is not None:
        print(f"{arguments.run} is under way: {holder} rewrites {arguments.run / 'report.html'} as it goes")
        return 0
    try:
        report = make_anew(arguments.run)
    except OSError as error:
        raise UserError(f"{error.filename or arguments.run} cannot be written: {error.strerror}") from None
    print(f"{report} and summary.json are made anew")
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")


COMMAND = Command(
    name="report",
    summary="make a run's report and summary anew",
    description="""\
Write report.html and summary.json of a run directory anew, from what the run recorded: metrics.jsonl, samples.jsonl, its recipe
and its environment. A run writes both from its first step on; this is for one that was killed, or moved, or made by an
earlier version.""",
    examples="""\
  quintet report runs/demo-20261121-100000""",
    run=run,
    add_options=_add_options,
    usage="RUN",
    codes="0 done, 2 something to put right, 130 Ctrl-C",
    of_recipe=False,
)
