"""Rules of the run as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule


@rule
def run_name_is_a_name(facts: Facts) -> Iterator[Problem]:
    """The run's name becomes part of a directory name."""
    if not re.fullmatch(r"[\w.+-]+", name := facts.recipe.run.name):
        yield Problem(f"run.name={name!r}: use letters, digits and - _ + . only; it names a directory")


@rule
def evaluations_have_prompts(facts: Facts) -> Iterator[Problem]:
    """Evaluating every few steps needs prompts to evaluate on."""
    train = facts.recipe.train
    if train.eval_every_steps and not train.eval_prompts:
        yield Problem(f"train.eval_every_steps={train.eval_every_steps} needs train.eval_prompts > 0")


@rule
def resume_is_of_training(facts: Facts) -> Iterator[Problem]:
    """Only a run that trains goes on; other commands take weights from a Hugging Face directory."""
    if facts.recipe.resume is not None and facts.command in ("generate", "eval"):
        yield Problem(
            f"resume is read by quintet train and sft alone; for quintet {facts.command} set resume=null and model.path to "
            "a Hugging Face directory of the run: checkpoint/, or one below hf/"
        )


@rule
def resume_names_something(facts: Facts) -> Iterator[Problem]:
    """A path to go on from exists."""
    resume = facts.recipe.resume
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        yield Problem(
            f"resume={resume}: there is no such directory (looked in {Path.cwd()}); name a run directory or one of its "
            "checkpoints, or auto"
        )


@rule
def sft_has_its_section(facts: Facts) -> Iterator[Problem]:
    """`quintet sft` trains by the sft section."""
    if facts.command == "sft" and facts.recipe.sft is None:
        yield Problem(
            "quintet sft needs an sft section; add sft.steps and what else differs from its defaults"
        )
