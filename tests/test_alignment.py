"""Whoever plans a row or packs one aligns it alike: all callers of the one function are known here, and what they say of its engine."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import quintet
from quintet.controller.batch_ref import Placement
from quintet.controller.scatter import Scatterer
from quintet.errors import UserError
from quintet.packing.align import FP8_TOKENS, alignment_of
from quintet.packing.plan import Plan
from quintet.recipe import schema
from quintet.recipe.capacity import overflow
from quintet.recipe.rules.facts import shape_of_built

ROOT = Path(quintet.__file__).parent
SAYS = {
    "controller/scatter.py": {"self._recipe.engine"},
    "engine/pipeline.py": {"self._recipe"},
    "plan/describe.py": {"recipe.engine"},
    "recipe/capacity.py": {"recipe.engine"},
    "sync/logprob_probe.py": {"engine.recipe"},
    "diagnose/oracle_model.py": {"None"},  # an engine in fp32
    "rollout/native/stage.py": {"None"},  # its weights are in model.dtype
}
"""Each file that aligns rows: log-probs, updates, reference, critic, routes and layers for multi-token prediction all go through the
first two; the section that it aligns by."""


def said(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        of = [node.func, *node.args[:1]] if getattr(node.func, "id", "") == "partial" else [node.func]
        names = [getattr(one, "id", "") for one in of]
        if "alignment" in names:
            found.add("alignment")
        if "alignment_of" in names:
            given = [one.value for one in node.keywords if one.arg == "engine"] or node.args[2:]
            found |= {ast.unparse(one) for one in given} or {"nothing"}
    return found


def test_every_caller_says_which_engine_computes_its_rows() -> None:
    files = {file.relative_to(ROOT).as_posix(): said(file) for file in ROOT.rglob("*.py")}
    callers = {name: found for name, found in files.items() if found}
    assert callers.pop("packing/align.py") == {"alignment"}
    # Those that plan by a function are given one: `alignment` is their parameter.
    assert {name for name, found in callers.items() if "alignment" in found} == {
        "packing/dynamic.py",
        "packing/time_model.py",
    }
    assert {name: found for name, found in callers.items() if "alignment" not in found} == SAYS


@st.composite
def layouts(draw: st.DrawFn) -> schema.Layout:
    cp = draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    return schema.Layout(
        tp=tp, sp=tp > 1 and draw(st.booleans()), cp=cp, dynamic_cp=cp > 1 and draw(st.booleans())
    )


@given(
    layouts(),
    layouts(),
    layouts(),
    st.sampled_from([None, *FP8_TOKENS]),
    st.integers(1, 1200),
    st.lists(st.integers(1, 2000), min_size=4, max_size=12),
    st.booleans(),
)
def test_what_is_planned_is_packed_within_the_budget(
    policy: schema.Layout,
    reference: schema.Layout,
    critic: schema.Layout,
    fp8: str | None,
    budget: int,
    lengths: list[int],
    few: bool,
) -> None:
    """By any recipe of FP8, rows of any or of few sizes, tp, sp, cp and dynamic cp, of the policy and of a reference and a critic with
    layouts of their own: the planner's rows, packed by the engine's alignment for the cell's own ranks, are whole multiples and within the
    budget; and the planner refuses what `quintet check` refuses."""
    recipe = schema.Recipe(
        layout=policy,
        reference=schema.Reference(layout=reference),
        critic=schema.Critic(layout=critic),
        engine=schema.Engine(fp8=fp8, tokens_per_microbatch_per_rank=budget, row_buckets=few),  # type: ignore[arg-type]
    )
    placements = [
        Placement(name, layout, [{}] * (2 * layout.tp * layout.cp))
        for name, layout in (("policy", policy), ("reference", reference), ("critic", critic))
    ]
    scatterer = Scatterer(None, recipe, shape_of_built(schema.BuildModel()), placements)  # type: ignore[arg-type]
    found = {one.name: plan for one in placements if (plan := planned(scatterer, lengths, one)) is not None}
    assert ("policy" in found) is (overflow(recipe, max(lengths)) is None)
    for role in ("reference", "critic"):
        assert ({"policy", role} <= found.keys()) is (overflow(recipe, max(lengths), [role]) is None)
    for placement in placements:
        layout = placement.layout
        packed = partial(alignment_of, layout, engine=recipe.engine)
        for cell in (
            (cell for row in found[placement.name].rounds for cell in row) if placement.name in found else ()
        ):
            row = packed(cell.cp).row([lengths[i] for i in cell.samples])
            rank = row // cell.cp // (layout.tp if layout.sp else 1)
            assert rank % FP8_TOKENS.get(fp8 or "", 1) == 0
            assert row // cell.cp <= budget or not cell.samples


def planned(scatterer: Scatterer, lengths: list[int], placement: Placement) -> Plan | None:
    """The plan of a placement; None where it is refused."""
    try:
        return scatterer.plan(lengths, placement)
    except UserError:
        return None


def test_native_rollouts_are_built_without_fp8() -> None:
    """Their rows are of a token each; and what they compute by is looked at nowhere but in the trainer."""
    given = {}
    for file in (
        ROOT / "controller" / "in_process_rollout.py",
        ROOT / "rollout" / "native" / "standalone.py",
    ):
        calls = [
            one for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(one, ast.Call)
        ]
        made = [one for one in calls if ast.unparse(one.func).endswith("build_chunks")]
        given[file.name] = [ast.unparse(one.args[4]) for one in made]
    assert list(given.values()) == 2 * [["recipe.engine.without_fp8"]]
    assert schema.Engine(fp8="blockwise", z_loss=0.5).without_fp8 == schema.Engine(z_loss=0.5)
