"""Kernels that runs take where they were measured faster: which, what is said of them, and what goes before."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

from benchmarks import expert_kernels
from benchmarks.engine_work import MODELS
from quintet.controller.worker import PolicyWorker
from quintet.engine.config import fused_kernels, transformer_config
from quintet.engine.mesh import Sizes
from quintet.plan import describe
from quintet.plan.kernels import MeasuredKernel, experts_of, read_kernels, with_kernels, write_kernel
from quintet.recipe import schema
from quintet.recipe.megatron import EXPERT_KERNELS, FUSED_EXPERTS, TORCH_EXPERTS
from tests.oracle.pool import PoolError

DENSE, MOE = MODELS["qwen3-8b"].shape, MODELS["qwen3-30b-a3b"].shape
PERMUTE, ROUTER = FUSED_EXPERTS
H200 = "NVIDIA H200"


def row(kernel: str, speedup: float = 1.05, least: float = 1.02, **changes) -> MeasuredKernel:
    made = MeasuredKernel(H200, kernel, experts_of(MOE), speedup, least, "a command", "abc", "2026-11-24")
    return replace(made, **changes)


def recipe(**sections) -> schema.Recipe:
    return schema.Recipe.model_validate(sections)


BOTH = [row(PERMUTE), row(ROUTER, 1.2)]


def test_what_was_measured_faster_is_taken_and_told():
    found, told = with_kernels(recipe(), replace(MOE, layers=4), H200, FUSED_EXPERTS, BOTH)
    assert found.engine.megatron == {PERMUTE: True, ROUTER: True}
    assert told == (
        "kernels of experts: moe_permute_fusion, measured 1.050 times as fast on NVIDIA H200 (a command, 2026-11-24); "
        "moe_router_fusion, measured 1.200 times as fast on NVIDIA H200 (a command, 2026-11-24)"
    )


def test_torchs_experts_are_taken_where_they_were_faster():
    table = [*BOTH, row(TORCH_EXPERTS, 2.0, 1.9)]
    found, told = with_kernels(recipe(), MOE, H200, [PERMUTE, TORCH_EXPERTS], table)
    assert found.engine.experts == "torch"
    assert found.engine.megatron == {PERMUTE: True}
    assert "torch_experts, measured 2.000 times as fast" in told
    found, told = with_kernels(recipe(), MOE, H200, [TORCH_EXPERTS], [row(TORCH_EXPERTS, 1.1, 0.9)])
    assert found.engine.experts == "auto"
    assert "no torch_experts, measured" in told


@pytest.mark.parametrize(
    ("engine", "moe"),
    [
        ({"experts": "transformer_engine"}, MOE.moe),
        ({"experts": "torch"}, MOE.moe),
        ({"fp8": "blockwise"}, MOE.moe),
        ("fp32", MOE.moe),
        ({}, replace(MOE.moe, biases=True)),
    ],
)
def test_nothing_is_chosen_where_there_is_no_choice_of_experts(engine, moe):
    sections = {"model": {"dtype": engine}} if isinstance(engine, str) else {"engine": engine}
    said, shape = recipe(**sections), replace(MOE, moe=moe)
    table = [row(TORCH_EXPERTS, experts=experts_of(shape))]
    assert with_kernels(said, shape, H200, [TORCH_EXPERTS], table) == (said, "")


@pytest.mark.parametrize(
    ("shape", "device", "table"),
    [
        (MOE, H200, []),
        (MOE, "NVIDIA A100", BOTH),
        (MOE, None, BOTH),
        (replace(MOE, hidden_size=4096), H200, BOTH),
        (replace(MOE, moe=replace(MOE.moe, top_k=4)), H200, BOTH),
    ],
)
def test_what_was_not_measured_is_not_taken_and_that_is_told(shape, device, table):
    before = recipe()
    found, told = with_kernels(before, shape, device, [ROUTER, TORCH_EXPERTS], table)
    assert found == before
    assert told.count(f"was not measured for these experts on {device or 'unlike devices'}") == 2
    assert told.endswith("(python -m benchmarks.expert_kernels --write --ep 1)")


def test_what_measures_the_experts_of_a_rank_is_told():
    """What follows the hint is a row that is then found. Parts of experts are not measured."""
    spread = recipe(layout={"ep": 8})
    told = with_kernels(spread, MOE, H200, [ROUTER], BOTH)[1]
    words = re.search(r"\(python -m benchmarks.expert_kernels (--write .*)\)", told)[1].split()
    measured = expert_kernels.setups(expert_kernels.arguments(words), ROUTER)[0][1].shape
    assert experts_of(measured) == experts_of(MOE, spread)
    cut = recipe(layout={"ep": 8, "tp": 2, "sp": True})
    assert with_kernels(cut, MOE, H200, [ROUTER], BOTH)[1].endswith("for these experts on NVIDIA H200")


def test_a_permutation_that_repeats_to_the_bit_is_taken_unless_it_was_measured_slower():
    found, told = with_kernels(recipe(), MOE, H200, FUSED_EXPERTS, [])
    assert found.engine.megatron == {PERMUTE: True}
    assert told.startswith(
        "kernels of experts: moe_permute_fusion, with which log-probs of the same weights repeat to the bit; no moe_r"
    )
    for speedup in (1.0, 0.99):
        chosen, _ = with_kernels(recipe(), MOE, H200, [PERMUTE], [row(PERMUTE, speedup, 0.9)])
        assert chosen.engine.megatron == ({PERMUTE: True} if speedup >= 1 else {})


def test_experts_are_those_that_a_rank_holds():
    spread = recipe(layout={"ep": 4, "tp": 2, "etp": 1})
    held = {"hidden_size": 2048, "experts": 32, "top_k": 8, "ffn_hidden_size": 768}
    assert experts_of(MOE, spread) == held
    assert experts_of(MOE, recipe(layout={"ep": 4, "tp": 2}))["ffn_hidden_size"] == 384
    assert with_kernels(spread, MOE, H200, [ROUTER], BOTH)[0] == spread
    assert with_kernels(spread, MOE, H200, [ROUTER], [row(ROUTER, experts=held)])[0] != spread


@pytest.mark.parametrize(("speedup", "least"), [(0.97, 0.9), (1.05, 0.999), (1.004, 1.001)])
def test_what_was_slower_in_a_turn_or_faster_by_a_breath_is_not_taken(speedup, least):
    found, told = with_kernels(recipe(), MOE, H200, [ROUTER], [row(ROUTER, speedup, least)])
    assert found.engine.megatron == {}
    assert f"no moe_router_fusion, measured {speedup:.3f} times as fast" in told


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"engine": {"replay_routes": "old"}}, "engine.replay_routes=old"),
        ({"rollout": {"return_routes": True}}, "rollout.return_routes=true of a native rollout"),
    ],
)
def test_a_router_that_is_asked_for_routes_is_not_fused(sections, why):
    found, told = with_kernels(recipe(**sections), MOE, H200, FUSED_EXPERTS, BOTH)
    assert found.engine.megatron == {PERMUTE: True}
    assert f"no moe_router_fusion, which does not go with {why}" in told


def test_routes_of_a_rollout_with_a_router_of_its_own_ask_nothing_of_the_trainers():
    other = recipe(rollout={"return_routes": True, "backend": "vllm"})
    assert with_kernels(other, MOE, H200, FUSED_EXPERTS, BOTH)[0].engine.megatron[ROUTER] is True


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_recipe_says_goes_before(asked):
    said = recipe(engine={"megatron": {PERMUTE: asked, "deterministic_mode": False}})
    found, told = with_kernels(said, MOE, H200, FUSED_EXPERTS, BOTH)
    assert found.engine.megatron == {PERMUTE: asked, "deterministic_mode": False, ROUTER: True}
    assert PERMUTE not in told
    assert said.engine.megatron == {PERMUTE: asked, "deterministic_mode": False}


@pytest.mark.parametrize(("shape", "installed"), [(DENSE, FUSED_EXPERTS), (MOE, [])])
def test_without_experts_or_kernels_there_is_no_choice(shape, installed):
    assert with_kernels(recipe(), shape, H200, installed, BOTH) == (recipe(), "")


def test_check_tells_what_is_known(monkeypatch):
    monkeypatch.setattr(describe, "shape_of", lambda recipe: MOE)
    monkeypatch.setattr(describe, "read_kernels", lambda: BOTH)

    def told(**engine):
        return describe.looks(recipe(engine=engine), "sft")["the kernels"]()

    said = told(backend="transformer_engine", megatron={ROUTER: False})
    assert said == (
        "Kernels of experts: moe_permute_fusion, measured 1.050 times as fast on NVIDIA H200 (a command, 2026-11-24); no torch_experts, "
        "which was not measured for these experts on NVIDIA H200 (python -m benchmarks.expert_kernels --write --ep 1)."
    )
    assert told(backend="portable") is None
    monkeypatch.setattr(describe, "read_kernels", list)
    assert told(backend="transformer_engine") is None


def test_a_row_takes_the_place_of_the_older_one(tmp_path):
    table = tmp_path / "kernels.json"
    table.write_text("[]")
    other = row(PERMUTE, device="NVIDIA H100")
    for one in (row(PERMUTE), other, row(ROUTER), row(PERMUTE, 0.9, 0.8)):
        write_kernel(one, table)
    assert read_kernels(table) == [other, row(PERMUTE, 0.9, 0.8), row(ROUTER)]


def test_committed_rows_can_be_read():
    assert all(one.kernel in EXPERT_KERNELS and one.least <= one.speedup for one in read_kernels())


def test_what_can_be_had_is_what_the_models_configuration_takes(monkeypatch):
    """That TransformerEngine's kernels are there is all that is pretended."""
    names = ["fused_permute", "fused_permute_with_probs", "fused_unpermute", "fused_sort_chunks_by_index"]
    names += ["fused_sort_chunks_by_index_with_probs", "fused_topk_with_score_function"]
    for name in names:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)
    assert fused_kernels("portable") == []
    installed = fused_kernels("transformer_engine")
    assert installed == list(EXPERT_KERNELS)
    found, _ = with_kernels(recipe(), MOE, H200, installed, BOTH)
    mesh = SimpleNamespace(sizes=Sizes(tp=1, cp=1, dp=1, pp=1, ep=1, etp=1))
    config = transformer_config(MOE, schema.Layout(), mesh, found.engine, dtype=torch.bfloat16)
    assert config.moe_permute_fusion
    assert config.moe_router_fusion
    monkeypatch.setattr(moe_utils, names[-1], None)
    assert fused_kernels("transformer_engine") == [PERMUTE, TORCH_EXPERTS]
    monkeypatch.setattr(moe_utils, names[2], None)
    assert fused_kernels("transformer_engine") == [TORCH_EXPERTS]


class OnADevice(PolicyWorker):
    """A worker as far as it knows its device."""

    def __init__(self, name: str) -> None:
        self.device, self._name = "cpu", name

    def device_name(self) -> str:
        return self._name


def devices_of(names: list[str]) -> tuple[int | None, str | None]:
    return OnADevice(names[dist.get_rank()])._devices()


@pytest.mark.parametrize("names", [[H200, H200], [H200, "NVIDIA H100"], ["NVIDIA H100", H200]])
def test_ranks_on_unlike_devices_choose_alike(pool, names):
    alike = names[0] if names[0] == names[1] else None
    assert pool.run(devices_of, 2, names) == [(None, alike)] * 2


def layers_of(kernels: list[list[str]]) -> list[str]:
    worker = OnADevice("cpu")
    worker.recipe = recipe()
    here = kernels[dist.get_rank()]
    with mock.patch("quintet.controller.worker.fused_kernels", return_value=here):
        return worker._layers()


def test_ranks_that_can_have_unlike_kernels_are_refused_together(pool):
    assert pool.run(layers_of, 2, [[PERMUTE], [PERMUTE]]) == [["portable", PERMUTE]] * 2
    for one, other in ((PERMUTE, ROUTER), (ROUTER, PERMUTE)):
        with pytest.raises(
            PoolError, match=f"UserError.* rank 0 portable, {one}; rank 1 portable, {other}. Install"
        ):
            pool.run(layers_of, 2, [[one], [other]])
