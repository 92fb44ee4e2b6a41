"""What several files of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.sync.receivers import LoraSlots


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def beside(tmp_path) -> Iterator[LoraSlots]:
    made = LoraSlots(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.join()
