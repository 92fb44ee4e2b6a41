"""`quintet verify-resume`: does this recipe, saved and resumed, come to what it comes to straight through?"""

from __future__ import annotations

import argparse
import shutil
import time
from operator import attrgetter
from typing import TYPE_CHECKING

from quintet.cli.command import Command, print_table
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.diagnose.verify import Outcome
    from quintet.recipe.schema import Recipe

DIFFERS = 4
LAYOUT = ("layout", "cluster", "engine", "rollout.layout")
"""Where and how it is computed: what --layout may change."""


def run(arguments: argparse.Namespace) -> int:
    """Run straight through and resumed, in a directory that stays when they differ, and compare. 0 the same, 4 not."""
    from quintet.recipe.loader import load_recipe

    command = arguments.command
    if arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps}: at least 1 step before the save, and as many after it")
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, "resume=null"], command=command)
    resumed = load_recipe(
        arguments.recipe, [*arguments.overrides, "resume=null", *arguments.layout], command=command
    )
    _check_layout(arguments.layout)
    from quintet.diagnose.verify import judge, verify

    scratch = recipe.run.dir / f"verify-resume-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"run.dir: cannot make {scratch}: {error.strerror}") from None
    outcome = verify(recipe, resumed, command, arguments.steps, scratch, lambda text: print(text, flush=True))
    _print(outcome)
    sections = attrgetter(*LAYOUT)
    sound, words = judge(
        outcome,
        same_layout=sections(recipe) == sections(resumed),
        gpu=_on_gpus(recipe),
        bf16=recipe.model.dtype_on("cuda" if _on_gpus(recipe) else "cpu") == "bf16",
    )
    print(words)
    if sound and not arguments.keep:
        shutil.rmtree(scratch)
    else:
        print(f"the runs are in {scratch}")
    return 0 if sound else DIFFERS


def _check_layout(overrides: list[str]) -> None:
    """Whatever else a resumed run may change, such as its length, is set here for all three runs alike."""
    from quintet.recipe.resume import MAY_NOT

    for one in overrides:
        key = one.partition("=")[0].strip()
        if not any(f"{key}.".startswith(f"{section}.") for section in LAYOUT):
            raise UserError(f"--layout {one}: only keys of {', '.join(LAYOUT)} can be given there")
        if any(f"{key}.".startswith(f"{section}.") for section in MAY_NOT):
            raise UserError(f"--layout {one}: a resumed run may not change that key")


def _on_gpus(recipe: Recipe) -> bool:
    if recipe.cluster.device != "auto":
        return recipe.cluster.device == "cuda"
    import torch

    return torch.cuda.is_available() or recipe.cluster.address is not None


def _print(outcome: Outcome) -> None:
    """One line a step: what it was straight through, and whether it was the same resumed."""
    rows = []
    for a, b in outcome.pairs():
        values = [
            f"{a.values[k]:.9g}" if k in a.values else "–" for k in ("loss", "reward/mean", "grad_norm")
        ]
        parted = [
            f"{key} {b.values[key]:.9g}"
            for key in a.values
            if key in b.values and a.values[key] != b.values[key]
        ]
        parted += [f"samples {b.samples}"] if a.samples != b.samples else []
        at = "resumed  " if (a, b) == next(iter(outcome.resumed_pairs()), None) else ""
        rows.append((f"{at}{a.stage} {a.step}", *values, a.samples or "–", ", ".join(parted) or "the same"))
    names = ("step", "loss", "reward", "grad norm", "samples", "saved and resumed")
    print_table(names, rows, to_the_left=names[-1:])
    straight, resumed = outcome.fingerprints
    same = "the same" if straight == resumed else f"{resumed}, {len(outcome.weights)} tensors differ"
    print(f"trained weights: fingerprint {straight}; saved and resumed {same}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", metavar="N", type=int, default=3, help="steps before the save and after it (default: 3)"
    )
    parser.add_argument(
        "--layout",
        metavar="key=value",
        action="append",
        default=[],
        help="resume with this changed, such as layout.tp=2; may be repeated",
    )
    parser.add_argument(
        "--command", choices=["train", "sft"], default="train", help="what the recipe is for (default: train)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs also when all is well")


COMMAND = Command(
    name="verify-resume",
    summary="prove that a recipe's run can be saved and resumed",
    description="""\
Prove for a recipe that saving and resuming changes nothing: 2N steps straight through; then N steps, a save, the end of every
process, and N steps from that save. What is loaded is saved once more right away: weights, fp32 weights and moments must be
the same bits in any layout. Loss, reward, gradient norm and samples of every step and the weights at the end are compared. On CPUs in the same layout they must be the same bit for bit. On GPUs, whose kernels need not repeat themselves, loss
and gradient norm of the first step after resuming may part by 1e-3, or ten times what the steps before the save part by when
computed twice. With --layout losses may part by 1e-6 at first and 1e-4 after (in bf16 by 2e-2), gradient norms by 1e-3 of
the norm (5e-2), for as long as the samples are the same, which they must be at the first step. A warm-up is cut to 2N steps, evaluations are left out. The runs are made below run.dir and removed if all is well.

Exit codes besides those below: 4 what was resumed differs.""",
    examples="""\
  quintet verify-resume my.yaml
  quintet verify-resume my.yaml --steps 5 --layout layout.tp=2
  quintet verify-resume my.yaml --command sft""",
    run=run,
    add_options=_add_options,
)
