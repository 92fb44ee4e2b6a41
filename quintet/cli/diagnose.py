"""`quintet diagnose mismatch`: where do the rollout's and the trainer's log-probs of the same tokens part?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command, print_table
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.diagnose.mismatch import Found

NAMED = 4
"""Exit code where a place was named."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    """What is to be diagnosed, the run, and which step of it."""
    parser.add_argument("what", choices=["mismatch"], help="rollout and trainer disagree in log-probs")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="the step whose samples are replayed (default: the newest that can be)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay a run's saved samples and print where the log-probs part; writes nothing. 0 nowhere, 4 a place was named."""
    from quintet.diagnose.mismatch import diagnose, recorded_gaps
    from quintet.observe.numbers import short

    if arguments.step is not None and arguments.step < 1:
        raise UserError(f"--step {arguments.step}: steps count from 1")
    found = diagnose(arguments.run, arguments.step, lambda text: print(text, file=sys.stderr, flush=True))
    _print(found)
    gaps = recorded_gaps(arguments.run)
    if len(gaps) > 1:
        told = ", ".join(f"{step} {short(gap)}" for step, gap in gaps.items())
        print(f"Mean |Δ| of the samples kept of each step, as recorded: {told}")
    return 0 if found.diagnosis.place is None else NAMED


def _print(found: Found) -> None:
    """The table of evidence, and the one conclusion."""
    from quintet.observe.numbers import short

    diagnosis = found.diagnosis
    print(
        f"Step {found.step}, {found.samples} samples, {found.tokens} response tokens; weights: {found.weights}"
    )
    if diagnosis.lines:
        rows = [(line.compared, short(line.mean), short(line.most), line.says) for line in diagnosis.lines]
        print_table(("compared", "mean |Δ|", "largest", ""), rows, to_the_left=("compared", ""))
    if diagnosis.place is None:
        print(diagnosis.sentence)
        return
    print(f"They part at: {diagnosis.place}. {diagnosis.sentence}\nWhat to do: {diagnosis.advice}")


COMMAND = Command(
    name="diagnose",
    summary="where rollout and trainer part, from a run's saved samples",
    description="""\
Replay samples of a run and name the first place where rollout and trainer part: tokens, weights, routes, temperature and
filters, kernels and precision. The samples are those below RUN/replay; the weights that generated them must be there: a
checkpoint or an export of the step before, the trained model, or, for step 1, the model that the run began with. Their
log-probs are computed by the recipe's engine in its own layout, scored by its rollout, and computed once more in fp32 on one
rank; then with every cause that could explain what was recorded. It needs the devices of the run.""",
    examples="""\
  quintet diagnose mismatch runs/demo-20261121-100000
  quintet diagnose mismatch runs/demo-20261121-100000 --step 12""",
    run=run,
    add_options=_add_options,
    usage="mismatch RUN [--step N]",
    codes="0 they agree, 4 a place was named, 2 something to put right, 3 a worker failed, 130 Ctrl-C",
    of_recipe=False,
)
