"""Ranks whose memory does not suffice, of which only part is there yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.cluster.worker import Place
from quintet.controller.worker import PolicyWorker
from quintet.errors import OutOfMemory
from quintet.recipe.schema import Recipe


def test_a_device_without_room_for_cuda_is_told_before_the_model_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setattr(torch.cuda, "set_device", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    rank = PolicyWorker(Place(0, 1, 0, 1, "cuda:0", "localhost", 1, 60.0), Recipe(), Path())
    with (
        pytest.raises(OutOfMemory, match=r"^out of memory in setup \(CUDA error: out of memory\)\.$"),
        rank.at_work("setup"),
    ):
        rank.setup()
