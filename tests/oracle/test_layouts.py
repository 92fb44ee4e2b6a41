"""Every layout computes what one transformers process computes: loss, each gradient, log-probs, entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle.reference import LENGTHS, NORM_FLOOR, PROMPT, reference, save, token_ids

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "tp2-sp-pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
}
FAMILIES = ["qwen3", "qwen3-tied", "qwen2", "llama"]
TOKENS = sum(n - PROMPT for n in LENGTHS)


class MeanNll:
    """Mean negative log-likelihood of the trained tokens, plus nothing else."""

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(outputs.logprobs * fields["loss_mask"]).sum() / TOKENS
        return loss, {"nll": -outputs.logprobs}


def run_rank(
    path: Path, layout: dict[str, Any], distributed_optimizer: bool, budget: int, dtype: str = "fp32"
) -> dict[str, Any]:
    """On one rank: forward, forward_backward, one step. Returns shards of gradients and what the rank reports."""
    from quintet.data.batch import make_batch, select
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.packing import plan_microbatches
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(
            tokens_per_microbatch_per_rank=budget, distributed_optimizer=distributed_optimizer
        ),
        optimizer=schema.Optimizer(lr=1e-3, clip_grad_norm=None),
        dtype=dtype,
    )
    engine.load_hf(path)
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    plan = plan_microbatches(LENGTHS, dp=engine.mesh.sizes.dp, budget=budget, alignment=engine.alignment)
    dp = engine.mesh.at("dp")
    mine = select(batch, plan.samples_of(dp))
    forward = engine.forward(mine, plan.local(dp))
    result = engine.forward_backward(mine, plan.local(dp), MeanNll())
    if distributed_optimizer:
        _gather_gradients(engine)
    gradients = [(s.name, s.box, s.read().cpu().clone()) for s in engine.shard_map("main_grad")]
    info = engine.optimizer_step()
    return {
        "gradients": gradients,
        "loss": result.loss if result and engine.mesh.owns_output else 0.0,
        "norm": info["grad_norm"],
        "samples": plan.samples_of(dp),
        "forward": forward,
    }


def _gather_gradients(engine: Any) -> None:
    """The distributed optimizer leaves each dp rank a slice of each reduced bucket: put them together again."""
    group = engine.mesh.groups.dp_cp
    for buffer in engine._chunk.buffers:
        for bucket in buffer.buckets:
            mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root / name) for name in FAMILIES}


CASES = [(family, layout, False) for family in FAMILIES for layout in LAYOUTS]
CASES += [("qwen3", layout, True) for layout in ("dp2", "tp2-sp", "pp2", "tp2-sp-pp2")]


@pytest.mark.parametrize(
    ("family", "layout", "distributed_optimizer"),
    CASES,
    ids=["-".join((f, lay, *(["distopt"] if d else []))) for f, lay, d in CASES],
)
def test_layout_equals_transformers(pool, model_dirs, family, layout, distributed_optimizer):
    world, sizes = LAYOUTS[layout]
    results = pool.run(run_rank, world, model_dirs[family], sizes, distributed_optimizer, 32)
    expected = reference(family)

    assert sum(r["loss"] for r in results) == pytest.approx(expected.loss, rel=1e-5)
    seen = set()
    for result in results:
        for name, box, gradient in result["gradients"]:
            want = expected.gradients[name][tuple(slice(a, b) for a, b in box)]
            error = (gradient - want).norm() / (want.norm() + NORM_FLOOR)
            assert error < 1e-4, f"{name} {box}: relative gradient error {error:.1e}"
            seen.add(name)
        norm = torch.stack([g.norm() for g in expected.gradients.values()]).norm().item()
        assert result["norm"] == pytest.approx(norm, rel=1e-4)
    assert seen == set(expected.gradients)
    _check_forward(results, expected)


@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2"])
def test_bf16_stays_within_its_rounding(pool, model_dirs, layout):
    """bf16 parameters and compute, fp32 gradients and master weights. Rounding to 8 bits of mantissa in 4 layers of
    large weights: loss to 2%, each gradient to 15% of its norm, and all of them together to 5%."""
    world, sizes = LAYOUTS[layout]
    results = pool.run(run_rank, world, model_dirs["qwen3"], sizes, True, 32, "bf16")
    expected = reference("qwen3")
    assert sum(r["loss"] for r in results) == pytest.approx(expected.loss, rel=0.02)
    off, total = 0.0, 0.0
    for result in results:
        for name, box, gradient in result["gradients"]:
            assert gradient.dtype == torch.float32
            want = expected.gradients[name][tuple(slice(a, b) for a, b in box)]
            difference = (gradient - want).norm()
            assert difference / (want.norm() + NORM_FLOOR) < 0.15, name
            off, total = off + difference**2, total + want.norm() ** 2
    assert (off / total) ** 0.5 < 0.05


def _check_forward(results: list[dict[str, Any]], expected: Any) -> None:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    reported = set()
    for result in results:
        if result["forward"] is None:
            continue
        logprobs, entropy = result["forward"]
        at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in result["samples"]])
        torch.testing.assert_close(logprobs, expected.logprobs[at], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, expected.entropy[at], rtol=1e-4, atol=1e-5)
        reported.update(result["samples"])
    assert reported == set(range(len(LENGTHS)))
