"""Ranks whose memory does not suffice, of which only part is there yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.cluster.worker import Place
from quintet.controller import rollout_worker
from quintet.controller.rollout_worker import RolloutWorker
from quintet.controller.worker import PolicyWorker
from quintet.errors import OutOfMemory
from quintet.models import trained_shape
from quintet.recipe.schema import Recipe, Rollout
from tests.plan.test_memory import CONFIGS

PLACE = Place(0, 1, 0, 1, "cuda:0", "localhost", 1, 60.0)


def test_a_device_without_room_for_cuda_is_told_before_the_model_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setattr(torch.cuda, "set_device", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    rank = PolicyWorker(PLACE, Recipe(), Path())
    with (
        pytest.raises(OutOfMemory, match=r"^out of memory in setup \(CUDA error: out of memory\)\.$"),
        rank.at_work("setup"),
    ):
        rank.setup()


@pytest.mark.parametrize("name", ["models/named-elsewhere", "nobody/named-elsewhere"])
@pytest.mark.parametrize("worker", [PolicyWorker, RolloutWorker])
def test_settings_are_judged_where_the_model_has_another_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker: Any, name: str
) -> None:
    """A path of the controller's directory, or a name of the hub: the files are where this node has them. Of experts on two ranks ep=4 is none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    given = {
        "model": {"path": name},
        "cluster": {"ranks": 2},
        "layout": {"ep": 2},
        "data": {"task": "addition"},
    }
    rank = worker(PLACE, Recipe.model_validate(given), tmp_path)
    rank.shape = trained_shape(tmp_path)
    named = [key for key, _ in rank.memory_needed(80 << 30).settings]
    assert named
    assert not any("layout.ep" in key for key in named)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("native", r"KV cache 1\.1.*rollout\.sequences_per_rank=128 \("),
        ("vllm", r"KV cache 40\.0.*rollout\.memory_fraction=0\.37 \(29\.6 GiB\)"),
    ],
)
def test_a_rollout_that_starts_tells_what_a_rollout_needs_less_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: Any, said: str
) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    monkeypatch.setattr(rollout_worker.Worker, "setup", lambda _: None)
    monkeypatch.setattr(rollout_worker, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(rollout_worker, "decoder", lambda _: None)
    monkeypatch.setattr(rollout_worker, "make_rollout", too_large)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 50 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 52 << 30)
    recipe = Recipe(rollout=Rollout(backend=backend, own_processes=True))
    rank = RolloutWorker(PLACE, recipe, tmp_path)
    with (
        pytest.raises(OutOfMemory, match=rf"(?s)^out of GPU memory in setup \(.*generates.*{said}") as caught,
        rank.at_work("setup"),
    ):
        rank.setup()
    assert "engine.recompute" not in str(caught.value)
    assert str(caught.value).endswith(
        "engine.offload_params, engine.offload_grads and engine.offload_optimizer at 1."
    )
