"""What megatron-core saved of its own model is read, under either of its ways to name tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoint.core_model import SINGLE, core_model
from tests.oracle.models import save


def save_and_read(path: Path, where: Path, metadata: dict[str, Any], ranks: int) -> tuple[int, int]:
    """On each rank: core saves its model; how many blocks were read back as this rank's parameters, and how many there
    are."""
    from megatron.core import dist_checkpointing

    from quintet.engine.checkpoint.reader import Reader
    from quintet.models import read_shape, table_of
    from quintet.models.mcore import CheckpointMap, stacked
    from quintet.recipe import schema

    shape = read_shape(path)
    torch.manual_seed(0)  # routers are drawn on each rank by itself, and are the same
    model, mesh = core_model(shape, schema.Layout(tp=ranks))
    state = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": mesh.groups.dp_cp})
    where.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(where), validate_access_integrity=False)
    reader = Reader(where)
    table = CheckpointMap(table_of(shape))
    count = 0
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        entry = name.replace("experts.local_experts", "experts")
        if entry not in table.weights:
            assert "expert_bias" not in name
            continue
        flat = parameter.detach().reshape(-1)
        for block in table.blocks(entry, tp=(mesh.rank, ranks), etp=(mesh.rank, ranks)):
            if not metadata:
                experts = shape.moe.experts if shape.moe else 0
                block = stacked(block, experts=experts, layers=None if shape.moe else shape.layers)
            read = reader.read_box(block.key, block.box)
            assert torch.equal(read.reshape(-1), flat[block.start : block.stop]), name
            count += 1
    everything = sum(
        len(table.blocks(n, tp=(mesh.rank, ranks), etp=(mesh.rank, ranks))) for n in table.weights
    )
    return count, everything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen2", 2), ("qwen3_moe", 2), ("deepseek_v3", 1)],  # core's local layers cut the latents over tp
)
@pytest.mark.parametrize("metadata", [SINGLE, {}], ids=["apart", "stacked"])
def test_core_saves(pool, models, tmp_path, name, ranks, metadata):
    path = save(name, models / name)
    told = pool.run(save_and_read, ranks, path, tmp_path / "saved", metadata, ranks, timeout_s=600)
    assert all(count == everything for count, everything in told)
