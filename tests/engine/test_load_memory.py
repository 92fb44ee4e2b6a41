"""Host memory of reading and converting: what is held, and a few tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quintet.engine.convert import hf_to_mcore, mcore_to_hf
from quintet.engine.weights.hf import fill_hf
from quintet.engine.weights.hf_write import Planned, hf_writer
from quintet.engine.weights.shards import Shard
from quintet.models import check_weights, read_shape
from tests.engine.checkpoint.test_memory import MIB, peak_of
from tests.models.directory import QWEN3, shapes_of

CONFIG = QWEN3 | {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 64000,
}
SHAPES = shapes_of(CONFIG)
LARGEST_MIB = 64000 * 1024 * 2 / MIB
SLACK_MIB = 24  # threads, headers, and what the allocator keeps


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """250 MB in bf16."""
    path = tmp_path_factory.mktemp("memory") / "model"
    with hf_writer(path, [Planned(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]) as writer:
        for name, shape in SHAPES.items():
            writer.add(name, torch.randn(shape).to(torch.bfloat16))
        (writer.directory / "config.json").write_text(json.dumps(CONFIG))
    return path


def shards(dtype: torch.dtype, parts: int, dim: int) -> list[Shard]:
    """The last of so many ranks' boxes along a dim, in memory that is there already."""
    found = []
    for name, shape in SHAPES.items():
        box = [(0, n) for n in shape]
        if len(shape) == 2:
            box[dim] = (shape[dim] - shape[dim] // parts, shape[dim])
        view = torch.ones([stop - start for start, stop in box], dtype=dtype)
        found.append(Shard(name, shape, tuple(box), view))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("parts", "dim"), [(1, 0), (2, 0), (2, 1)])
def test_a_load_takes_no_more_than_the_shards_and_one_tensor(path, dtype, parts, dim):
    held = shards(dtype, parts, dim)
    weights = check_weights(path, read_shape(path))
    assert peak_of(lambda: fill_hf(held, weights)) < LARGEST_MIB + SLACK_MIB


@pytest.mark.slow
def test_a_conversion_takes_a_few_tensors(path, tmp_path):
    """There the largest one and a piece of it; back what is read of it too. At times a process keeps more, so the least of three counts."""

    def there(n: int) -> float:
        return peak_of(lambda: hf_to_mcore(path, tmp_path / f"mcore{n}", tp=2, pp=2))

    def back(n: int) -> float:
        return peak_of(lambda: mcore_to_hf(tmp_path / f"mcore{n}", tmp_path / f"again{n}"))

    hf_to_mcore(path, tmp_path / "imports")
    assert min(map(there, range(3))) < 2 * LARGEST_MIB + SLACK_MIB
    assert min(map(back, range(3))) < 3 * LARGEST_MIB + SLACK_MIB  # the last one is still being written
