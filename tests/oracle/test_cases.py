"""The cases: what they cover, and that the recipe's rules accept each of them and refuse what they leave out."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest

from quintet.recipe.rules import broken_rules
from quintet.recipe.rules import model as rules_of_models
from tests.oracle.ahead import save_with_layers
from tests.oracle.cases import (
    FAMILIES,
    HEADS,
    LANGUAGE_ONLY,
    MOE,
    REPLAYED,
    Case,
    case_of,
    covering,
    fast_cases,
    few,
    gpu_cases,
    nightly_cases,
    row_of,
    slow_cases,
    table,
)
from tests.oracle.covering import together
from tests.oracle.lora import save_adapters
from tests.oracle.reference import save


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family in (*FAMILIES, *REPLAYED):
        (save(family, root / family) / "tokenizer.json").write_text("{}")
        if any(case.lora for case in slow_cases() if case.family == family):
            save_adapters(family, Case(family).adapters(root / family))
    for family, depths in {(case.family, case.mtp) for case in gpu_cases(8, ["portable"]) if case.mtp}:
        (save_with_layers(family, depths, root / f"{family}{depths}") / "tokenizer.json").write_text("{}")
    return {path.name: path for path in root.iterdir()}


def problems(case: Case, models: dict[str, Path], device: str = "cpu") -> list[str]:
    path = models[f"{case.family}{case.mtp or ''}"]
    return [one.message for one in broken_rules(case.recipe(path, device), "sft")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [4, 8])
def test_pairs_are_covered(family: str, ranks: int) -> None:
    fixed = {"head": "lm"} if family in LANGUAGE_ONLY else {}
    whole = table(family in MOE, HEADS.get(family, 4), ranks, **fixed)
    covered = {pair for case in covering(family, ranks) for pair in together(row_of(case, whole))}
    assert covered == set(whole.allowed())


def test_recipes_of_all_cases_are_accepted(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the same few models every time.
    monkeypatch.setattr(rules_of_models, "check_weights", cache(rules_of_models.check_weights))
    # With TransformerEngine's layers, a rule asks whether it is installed here.
    on_cpu, on_gpus = [*fast_cases(), *slow_cases(), *nightly_cases()], gpu_cases(8, ["portable"])
    refused = {case.name: problems(case, models) for case in on_cpu}
    refused |= {f"{case.name} on GPUs": problems(case, models, "cuda") for case in on_gpus}
    assert not {name: found for name, found in refused.items() if found}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "deepseek_v3"])
def test_what_the_table_leaves_out_is_refused(models: dict[str, Path], family: str) -> None:
    """Every layout within 4 ranks, on the axes that constrain each other."""
    whole = table(family in MOE, HEADS.get(family, 4), 4)
    one = row_of(Case(family), whole)
    axes = {
        name: whole.axes[name]
        for name in ("pp", "vpp", "tp", "sp", "cp", "mixed", "dp", "ep", "etp")
        if name in one
    }
    axes["cp"] = tuple(product((1, 2), ("all_gather", "all_to_all")))
    for values in product(*axes.values()):
        row = one | dict(zip(axes, values, strict=True))
        case = case_of(family, row)
        if case.ranks <= 4:
            left_out = row["cp"] not in whole.axes["cp"] or not whole.allows(row)
            assert left_out == bool(problems(case, models)), case.name


def test_names_tell_cases_apart() -> None:
    cases = [*fast_cases(), *slow_cases(), *nightly_cases()]
    assert len({case.name for case in cases}) == len(cases)
    assert {case.family for case in fast_cases()} == {*FAMILIES, *REPLAYED}
    assert max(case.ranks for case in fast_cases()) == 4
    assert max(case.ranks for case in slow_cases()) == 8
    assert all(len(few(family)) == 4 for family in FAMILIES)
