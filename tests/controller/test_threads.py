"""Threads of a rank on a GPU: one, as Ray sets it, unless its optimizer is on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quintet.cluster.worker import Place, Worker
from quintet.controller import worker
from quintet.recipe.schema import Optimizer, Recipe


class Enough(Exception):
    """What is wanted of the worker's setup is done."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("fraction", "threads"), [(0.0, 1), (0.5, 3)])
def test_an_optimizer_on_the_cpu_has_the_ranks_share_of_cores(
    monkeypatch: pytest.MonkeyPatch, fraction: float, threads: int
) -> None:
    def enough(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(Worker, "setup", lambda _: None)
    monkeypatch.setattr(worker, "load_tokenizer", enough)
    place = Place(0, 1, 0, 1, "cuda:0", "localhost", 1, 60.0, threads=3)
    rank = worker.PolicyWorker(place, Recipe(optimizer=Optimizer(cpu_fraction=fraction)), Path())
    with pytest.raises(Enough):
        rank.setup()
    assert torch.get_num_threads() == threads
