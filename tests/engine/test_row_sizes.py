"""Rows of few sizes: what an engine computes with engine.row_buckets, and what the planner counts on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.engine_work import MODELS
from quintet.data.batch import make_batch, select
from quintet.packing.align import alignment_of
from quintet.packing.plan import plan_microbatches, rank_cells
from quintet.recipe import schema

BUDGET = 64
LENGTHS = [61, 50, 47, 33, 29, 28, 40, 9, 22, 43, 55, 17, 38, 52]


def rows_of(row_buckets: bool, layout: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens of this rank's rows, as they went to the layers, and the sizes that they may have."""
    from quintet.engine import pipeline
    from quintet.engine.engine import Engine

    recipe = schema.Engine(tokens_per_microbatch_per_rank=BUDGET, row_buckets=row_buckets)
    sizes = schema.Layout(**layout)
    engine = Engine(MODELS["tiny"].shape, sizes, engine=recipe, optimizer=None, dtype="fp32")
    batch = make_batch([torch.arange(n) % 7 for n in LENGTHS], [1] * len(LENGTHS))
    aligned = alignment_of(sizes, sizes.cp, recipe)
    plan = plan_microbatches(LENGTHS, dp=1, budget=BUDGET, alignment=aligned, cp=sizes.cp)
    real, seen = pipeline.pack, []

    def pack(*args: Any) -> Any:
        made = real(*args)
        seen.append(made.tokens)
        return made

    with mock.patch.object(pipeline, "pack", pack):
        engine.forward(select(batch, plan.samples_of(0)), rank_cells(plan.local(0), engine.mesh.at("cp")))
    return seen, [one // sizes.cp for one in aligned.buckets]


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {"tp": 2, "sp": True}), (2, {"cp": 2})])
def test_rows_have_the_sizes_that_were_planned(pool, ranks: int, layout: dict[str, Any]) -> None:
    plain, none = pool.run(rows_of, ranks, False, layout)[0]
    assert none == []
    for rows, sizes in pool.run(rows_of, ranks, True, layout):
        assert set(rows) <= set(sizes)
        assert max(rows) <= BUDGET
        assert rows != plain
        assert len(set(rows)) < len(set(plain)) or len(rows) < 4
