"""What one layout saved another goes on with: the same numbers, bit by bit where the layout is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.ranks import Told, gathered, load_and_train, train_and_save
from tests.oracle.cases import Case
from tests.oracle.lora import written
from tests.oracle.models import save

FIRST_LOSS, LATER_LOSS = 1e-6, 1e-4

FAST = {
    "dense": [
        Case("qwen3", tp=2, pp=2, distributed_optimizer=True),
        Case("qwen3", dp=2, cp=2),
    ],
    "tied, experts, latent": [
        Case("deepseek_v3-tied", pp=2, dp=2, ep=2, distributed_optimizer=True),
        Case("deepseek_v3-tied", tp=2, sp=True, dp=2, ep=2, etp=2, distributed_optimizer=True),
    ],
    "layers ahead": [
        Case("mimo", mtp=1, pp=2, dp=2, distributed_optimizer=True),
        Case("mimo", mtp=1, tp=2, sp=True),
    ],
    "buckets": [
        Case("qwen3-tied", dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
        Case("qwen3-tied", dp=2, distributed_optimizer=True),
        Case("qwen3-tied", pp=2, dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    ],
}
SLOW = {
    "uneven stages": [
        Case("deepseek_v3", stages="0.2.1.1", pp=2, vpp=2, dp=2, ep=2, distributed_optimizer=True),
        Case("deepseek_v3", stages="1.3", pp=2, dp=2, ep=2, distributed_optimizer=True),
        Case("deepseek_v3", pp=2, vpp=2),
    ],
    "dense": [
        Case("qwen3", dp=2, tp=2, sp=True),
        Case("qwen3", dp=4, distributed_optimizer=True),
        Case("qwen3"),
    ],
    "interleaved": [
        Case("qwen2", pp=2, vpp=2, tp=2),
        Case("qwen2", tp=2, dp=2, distributed_optimizer=True),
        Case("qwen2", pp=4),
    ],
    "tied": [
        Case("qwen3-tied", pp=4, distributed_optimizer=True),
        Case("qwen3-tied", tp=4, sp=True),
        Case("qwen3-tied", dp=4, distributed_optimizer=True),
    ],
    "tied on uneven stages": [
        Case("qwen3-tied", stages="3.1", pp=2, dp=2, distributed_optimizer=True),
        Case("qwen3-tied", stages="0.2.2.0", pp=4),
        Case("qwen3-tied", pp=2, tp=2, sp=True),
    ],
    "fewer ranks hold more experts": [
        Case("qwen3_moe", dp=4, ep=4, distributed_optimizer=True),
        Case("qwen3_moe", tp=2, sp=True, dp=2, ep=2, etp=2, distributed_optimizer=True),
        Case("qwen3_moe", dp=2, ep=2),
        Case("qwen3_moe", distributed_optimizer=True),
    ],
    "latent": [
        Case("deepseek_v3", dp=2, ep=2, distributed_optimizer=True),
        Case("deepseek_v3", pp=2, tp=2, sp=True, ep=2, etp=1),
        Case("deepseek_v3", dp=2, cp=2, ep=4, distributed_optimizer=True),
    ],
    "biases of experts": [
        Case("gpt_oss", dp=2, ep=2, distributed_optimizer=True),
        Case("gpt_oss", tp=2, sp=True, ep=1, etp=2, distributed_optimizer=True),
    ],
    "value model": [
        Case("qwen3", head="value", tp=2, sp=True, dp=2, distributed_optimizer=True),
        Case("qwen3", head="value", pp=2, cp=2),
    ],
    "sgd": [Case("llama", optimizer="sgd", tp=2, dp=2), Case("llama", optimizer="sgd", pp=2)],
    "bf16": [
        Case("qwen3_moe", dtype="bf16", dp=2, ep=2, distributed_optimizer=True),
        Case("qwen3_moe", dtype="bf16", tp=2, sp=True, ep=1, etp=2),
    ],
}


def loss(told: list[Told], at: int) -> float:
    return sum(rank.losses[at] for rank in told)


def assert_resumes(pool, path: Path, where: Path, cases: list[Case]) -> None:
    first = cases[0]
    saved = pool.run(train_and_save, first.ranks, first, path, where)
    again = pool.run(load_and_train, first.ranks, first, path, where)
    assert [(r.losses, r.norms) for r in saved] == [(r.losses, r.norms) for r in again]
    for before, after in zip(saved, again, strict=True):
        for a, b in zip(before.held + before.at_end, after.held + after.at_end, strict=True):
            assert a[:2] == b[:2]
            assert torch.equal(a[2], b[2]), a[0]
    wanted = gathered(saved)
    # Cut into micro-batches and ranks otherwise, sums are rounded otherwise: in bf16 to 8 bits.
    slack = 1.0 if first.dtype == "fp32" else 2e4
    for case in cases[1:]:
        told = pool.run(load_and_train, case.ranks, case, path, where)
        found = gathered(told)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), f"{case.name}: {key}"
        assert loss(told, 0) == pytest.approx(loss(saved, 0), rel=FIRST_LOSS * slack), case.name
        assert loss(told, -1) == pytest.approx(loss(saved, -1), rel=LATER_LOSS * slack), case.name


@pytest.mark.parametrize("name", FAST)
def test_layouts(pool, models, tmp_path, name):
    cases = FAST[name]
    path = written(cases[0], models)
    assert_resumes(pool, path, tmp_path / "saved", cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_layouts(pool, models, tmp_path, name):
    cases = SLOW[name]
    head = cases[0].head
    path = save(cases[0].family, models / f"{cases[0].family}-{head}", head)
    assert_resumes(pool, path, tmp_path / "saved", cases)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_type(pool, models, tmp_path, dtypes):
    """Masters are fp32: what another type computes with is rounded from them, or is them."""
    path = save("qwen3", models / "qwen3")
    first = Case("qwen3", dtype=dtypes[0], dp=2, distributed_optimizer=True)
    wanted = gathered(pool.run(train_and_save, 2, first, path, tmp_path / "saved"))
    other = replace(first, dtype=dtypes[1], dp=1, tp=2)
    found = gathered(pool.run(load_and_train, 2, other, path, tmp_path / "saved"))
    master = "optimizer.state.fp32_param."
    for key, tensor in found.items():
        if key.startswith("optimizer.state.exp_avg"):
            assert torch.equal(tensor, wanted[key])
        elif dtypes[1] == "fp32":
            assert torch.equal(tensor, wanted[master + key])
        elif key.startswith(master):
            assert torch.equal(tensor, wanted[key.removeprefix(master)])
        else:
            assert torch.equal(tensor, wanted[key].bfloat16().float())
