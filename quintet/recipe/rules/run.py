"""Rules of the run as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quintet.recipe.rules.facts import Facts, Problem, rule


@rule
def run_name_is_a_name(facts: Facts) -> Iterator[Problem]:
    """The run's name becomes part of a directory name."""
    if not re.fullmatch(r"[\w.+-]+", name := facts.recipe.run.name):
        yield Problem(
            ("run.name",), f"run.name={name!r}: use letters, digits and - _ + . only; it names a directory"
        )


@rule
def evaluations_have_prompts(facts: Facts) -> Iterator[Problem]:
    """Evaluating every few steps needs prompts to evaluate on."""
    train = facts.recipe.train
    if train.eval_every_steps and not train.eval_prompts:
        yield Problem(
            ("train.eval_every_steps", "train.eval_prompts"),
            f"train.eval_every_steps={train.eval_every_steps} needs train.eval_prompts > 0",
        )


@rule
def sft_has_its_section(facts: Facts) -> Iterator[Problem]:
    """`quintet sft` trains by the sft section."""
    if facts.command == "sft" and facts.recipe.sft is None:
        yield Problem(
            ("sft",),
            "quintet sft needs an sft section; add sft.steps and what else differs from its defaults",
        )
