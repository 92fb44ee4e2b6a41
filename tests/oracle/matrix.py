"""Feature × feature: which pairs a case of the suite runs, and which the recipe refuses. A pair is one or the other.

    python -m tests.oracle.matrix            # writes docs/pairs.md

Features and refusals are those of `quintet.recipe.features` and `quintet.recipe.refused`; what no recipe switches on (a value
head, biases) is added here. A case runs a pair when its recipe and model have both on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from quintet.errors import UserError
from quintet.models import family_of, read_shape
from quintet.models.family import read_config
from quintet.recipe.features import FEATURES
from quintet.recipe.rules.facts import Facts
from quintet.recipe.rules.fp8 import eight_bits_are_the_same_on_both_sides
from quintet.recipe.schema import Recipe
from tests.oracle.cases import (
    FAMILIES,
    PADDED_LAYOUTS,
    REPLAYED,
    Case,
    fast_cases,
    gpu_cases,
    nightly_cases,
    slow_cases,
)
from tests.recipe.feature_sets import features_on, refused_pair

PAGE = Path(__file__).parents[2] / "docs" / "pairs.md"
GPUS = 4
BACKENDS = ("portable", "transformer_engine")

FROM_MODEL = {
    "value_head": "a value head",
    "qkv_bias": "biases of q, k and v",
    "sinks": "attention sinks and sliding windows",
    "shared_experts": "shared experts",
    "groups": "groups of experts with a stored bias",
}
TITLES = {one.id: one.name for one in FEATURES.values() if one.engine} | FROM_MODEL
"""Every feature of the training engine, in the order of the page."""


FP8 = ("fp8_tensorwise", "fp8_blockwise")
STEP = "python -m benchmarks.step --gpus 4 --shape qwen3-8b --fp8"
PROOF, PROVED = "python -m benchmarks.fp8 --prove", ("transformer_engine", "cpu_optimizer")
"""What runs in 8 bits beside what no CPU has, and which."""


class Cell(NamedTuple):
    """What becomes of a pair. where: one of `_MARKS`, "" for a gap. text: a case, or the refusal."""

    where: str
    text: str


def matrix() -> dict[frozenset[str], Cell]:
    """The cell of every pair of features, gaps included."""
    with tempfile.TemporaryDirectory() as root:
        paths = directories(Path(root))
        runs = [
            ("test", "cpu", fast_cases()),
            ("slow", "cpu", slow_cases()),
            ("nightly", "cpu", nightly_cases()),
            ("gpus", "cuda", gpu_cases(GPUS, BACKENDS)),
        ]
        ran = {frozenset((fp8, one)): Cell("gpus", PROOF) for fp8 in FP8 for one in PROVED}
        for where, device, cases in runs:
            for case in cases:
                for pair in combinations(sorted(on(case, paths[case.family], device)), 2):
                    ran.setdefault(frozenset(pair), Cell(where, case.name))
        for case in PADDED_LAYOUTS:
            fp8 = f"fp8_{case.fp8}"
            for other in on(case, paths[case.family], "cpu") - {
                fp8,
                "fp32",
            }:  # what GPUs round is not padding
                ran.setdefault(frozenset((fp8, other)), Cell("padded", case.name))
        found = {}
        for first, second in combinations(TITLES, 2):
            pair = frozenset((first, second))
            refused = refusal(first, second, paths)
            if refused and pair in ran:
                raise AssertionError(
                    f"{first} and {second} are refused, yet {ran[pair].text} runs them: {refused}"
                )
            found[pair] = Cell("refused", refused) if refused else ran.get(pair, Cell("", ""))
        return found


def directories(root: Path) -> dict[str, Path]:
    """A Hugging Face directory of each family."""
    from tests.oracle.models import save

    return {family: save(family, root / family) for family in (*FAMILIES, *REPLAYED)}


def on(case: Case, path: Path, device: str) -> set[str]:
    """Features that a case has on."""
    shape = _shape(path)
    found = features_on(case.recipe(path, device), shape)
    from_model = (
        ("value_head", case.head == "value"),
        ("qkv_bias", shape.qkv_bias),
        ("sinks", shape.sinks),
        ("shared_experts", shape.moe is not None and shape.moe.shared_ffn_hidden_size > 0),
        ("groups", shape.moe is not None and shape.moe.groups > 1 and shape.moe.bias),
    )
    return (found | {name for name, there in from_model if there}) & set(TITLES)


_shape = cache(read_shape)


def refusal(first: str, second: str, paths: Mapping[str, Path]) -> str | None:
    """The sentence with which a pair is refused; None where it can be combined."""
    if {first, second} <= set(FEATURES):
        return refused_pair(first, second)
    pair = frozenset((first, second))
    if pair in _REFUSED_CONFIGS:
        family, keys = _REFUSED_CONFIGS[pair]
        try:
            family_of(config := read_config(paths[family])).shape_of(config | keys)
        except UserError as error:
            return str(error)
    return _IN_NO_FAMILY.get(pair)


_REFUSED_CONFIGS: dict[frozenset[str], tuple[str, dict[str, bool]]] = {
    frozenset(("qkv_bias", "mla")): ("deepseek_v3", {"attention_bias": True}),
    frozenset(("qkv_bias", "groups")): ("deepseek_v3", {"attention_bias": True}),
    frozenset(("sinks", "tied")): ("gpt_oss", {"tie_word_embeddings": True}),
}
"""Pairs that a config.json asks for in vain: a family, and what its config.json would have to say."""
_IN_NO_FAMILY = {
    frozenset(("sinks", "mla")): "no family of models has both",
    frozenset(("sinks", "mtp")): "no family of models has both",
    frozenset(("sinks", "shared_experts")): "no family of models has both",
    frozenset(("sinks", "groups")): "no family of models has both",
    frozenset(("sinks", "expert_bias")): "no family of models has both",
    frozenset(
        ("value_head", "mtp")
    ): "a value model predicts no tokens: a critic is made without these layers",
}


def page(cells: Mapping[frozenset[str], Cell], loop: Mapping[frozenset[str], Cell]) -> str:
    """The matrix as Markdown, and below it what 8 bits are beside the rest of a run."""
    lines = [
        "# Which features go together",
        "",
        "Every pair of the training engine's features is either run by a case of [the oracle](../tests/oracle), which compares",
        "all numbers with one transformers process, or refused when a recipe is loaded. This page is made by",
        "`python -m tests.oracle.matrix` from the cases and the refusals; a test holds it to them.",
        "",
        "● run by `make test` · ○ run by `make test-slow` · ◇ run by `make test-nightly`",
        "· G run on GPUs by `python -m tests.oracle --gpus 4` · × refused",
        "",
        "Which runs on GPUs are on record, and of which commits: [performance.md](performance.md).",
        "",
        "Products in 8 bits: ◐ run by `make test`, with scales of blocks by `make test-slow`, with the rows, plans and padding that they need, multiplied as without; G run in 8 bits",
        f"on a GPU by `{PROOF}` ([fp8.md](fp8.md) says what has been seen).",
        "",
        "| | | " + " | ".join(str(i) for i in range(1, len(TITLES) + 1)) + " |",
        "|" + "---|" * (len(TITLES) + 2),
    ]
    for i, (one, title) in enumerate(TITLES.items(), start=1):
        marks = [_MARKS[cells[frozenset((one, other))].where] if one != other else "" for other in TITLES]
        lines.append(f"| {i} | {title} | " + " | ".join(marks) + " |")
    lines += ["", "## Products in 8 bits beside the rest of a run", ""]
    lines += [
        "◐ run by `make test-slow`: steps on rows padded for 8 bits tell what they tell without, with a critic, a reference policy and a rollout of each",
        f"kind. G run by `{STEP}`.",
        "",
        "| | with a scale a tensor | with scales of blocks |",
        "|---|---|---|",
    ]
    for one in (one for one in FEATURES.values() if not one.engine):
        marks = [_MARKS[loop[frozenset((fp8, one.id))].where] for fp8 in FP8]
        lines.append(f"| {one.name} | {' | '.join(marks)} |")
    lines += ["", "## What is refused", "", "| | |", "|---|---|"]
    for first, second in combinations(TITLES, 2):
        cell = cells[frozenset((first, second))]
        if cell.where == "refused":
            lines.append(f"| {TITLES[first]} × {TITLES[second]} | {cell.text.replace('|', chr(92) + '|')} |")
    for pair, cell in loop.items():
        if cell.where == "refused":
            (fp8,) = pair & set(FP8)
            (other,) = pair - {fp8}
            lines.append(f"| {FEATURES[fp8].name} × {FEATURES[other].name} | {cell.text} |")
    return "\n".join(lines) + "\n"


_MARKS = {"test": "●", "slow": "○", "nightly": "◇", "padded": "◐", "gpus": "G", "refused": "×", "": "**?**"}


def beside_the_loop() -> dict[frozenset[str], Cell]:
    """What becomes of products in 8 bits beside what is of the rollout and the loop."""
    from tests.controller.test_padded import ROLLOUTS, recipe

    ran = {
        feature: Cell("padded", f"{name} rollout, a critic and a reference policy")
        for name in ROLLOUTS
        for feature in features_on(recipe(Path(), None, name))
    }
    found = {}
    for fp8, one in product(FP8, (one.id for one in FEATURES.values() if not one.engine)):
        refused = refused_pair(fp8, one) or (one == "fp8_rollout" and _by_rule(fp8)) or None
        other = Cell("gpus", STEP) if one == "fp8_rollout" else ran.get(one, Cell("", ""))
        found[frozenset((fp8, one))] = Cell("refused", refused) if refused else other
    return found


def _by_rule(fp8: str) -> str | None:
    """With which sentence a rule refuses a rollout in 8 bits beside the trainer's."""
    words = {"engine": {"fp8": fp8.removeprefix("fp8_")}, "rollout": {"quantization": "fp8"}}
    facts = Facts(Recipe.model_validate(words), "train", None)
    return next((one.message for one in eight_bits_are_the_same_on_both_sides(facts)), None)


def gaps(cells: Mapping[frozenset[str], Cell]) -> Iterable[str]:
    """Pairs that are neither run nor refused."""
    return [" × ".join(sorted(pair)) for pair, cell in cells.items() if not cell.where]


if __name__ == "__main__":
    PAGE.write_text(page(matrix(), beside_the_loop()), encoding="utf-8")
