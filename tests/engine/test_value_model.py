"""Value models: a scalar head on the trunk, in every kind of layout, beside models of other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tests.oracle.reference import LENGTHS, NORM_FLOOR, PROMPT, save, token_ids

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp-cp2": (4, {"tp": 2, "sp": True, "cp": 2}),
    "pp2-vpp2-dp2": (4, {"pp": 2, "vpp": 2}),
}
TOKENS = sum(n - PROMPT for n in LENGTHS)


class SquaredError:
    """Mean squared distance of the values from 1."""

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return (((outputs.values - 1) ** 2) * fields["loss_mask"]).sum() / TOKENS, {}


def run(path: Path, layout: dict[str, Any], out: Path) -> dict[str, Any]:
    """Start a value model from a language model, take steps, save it, load it again."""
    from quintet.data.batch import make_batch, select
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.packing.align import alignment_of
    from quintet.packing.plan import plan_microbatches, rank_cells
    from quintet.recipe import schema

    shape, sizes = read_shape(path).as_value_model(), schema.Layout(**layout)
    settings: dict[str, Any] = {
        "engine": schema.Engine(tokens_per_microbatch_per_rank=32, distributed_optimizer=False),
        "optimizer": schema.Optimizer(lr=1e-2, clip_grad_norm=None),
        "dtype": "fp32",
    }
    engine = Engine(shape, sizes, **settings)
    engine.load_hf(path)
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    mesh = engine.mesh
    cp, dp = mesh.sizes.cp, mesh.at("dp")
    plan = plan_microbatches(
        LENGTHS, dp=mesh.sizes.dp, budget=32, alignment=alignment_of(sizes, cp, None), cp=cp
    )
    mine, local = select(batch, plan.samples_of(dp)), rank_cells(plan.local(dp), mesh.at("cp"))
    first = engine.forward(mine, local)
    for _ in range(2):
        engine.forward_backward(mine, local, SquaredError())
        engine.optimizer_step()
    engine.save_hf(out, path)
    again = Engine(read_shape(out), sizes, **settings)
    again.load_hf(out)
    result = again.forward_backward(mine, local, SquaredError())
    return {
        "first": first.values if first else None,
        "values": again.forward(mine, local),
        "samples": plan.samples_of(dp),
        "loss": result.loss if result and mesh.at("tp") == 0 else 0.0,
        "gradients": [(s.name, s.box, s.read().clone()) for s in again.shard_map("main_grad")],
    }


def reference(path: Path) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The saved value model in transformers: loss, gradients, values of each sample."""
    made = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    total, values = torch.zeros(()), []
    for ids in token_ids():
        hidden = made.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        state = made.score(hidden)[:-1, 0]
        values.append(torch.cat([torch.zeros(PROMPT), state[PROMPT - 1 :].detach()]))
        total = total + ((state[PROMPT - 1 :] - 1) ** 2).sum() / TOKENS
    total.backward()
    return total.item(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}, values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3-tied", marks=pytest.mark.slow)])
def test_value_model_equals_transformers(pool, tmp_path, name, layout):
    world, sizes = LAYOUTS[layout]
    path = save(name, tmp_path / name)
    results = pool.run(run, world, path, sizes, tmp_path / "out")
    loss, gradients, values = reference(tmp_path / "out")

    assert sum(r["loss"] for r in results) == pytest.approx(loss, rel=1e-5)
    seen = set()
    for result in results:
        for weight, box, gradient in result["gradients"]:
            want = gradients[weight][tuple(slice(a, b) for a, b in box)]
            assert (gradient - want).norm() / (want.norm() + NORM_FLOOR) < 1e-4, weight
            seen.add(weight)
        if result["values"] is not None:
            assert not result["first"].any()  # a fresh value model says 0
            want = torch.cat([values[i] for i in result["samples"]])
            torch.testing.assert_close(result["values"].values, want, rtol=1e-5, atol=1e-5)
    assert seen == set(gradients)
    assert "score.weight" in seen
