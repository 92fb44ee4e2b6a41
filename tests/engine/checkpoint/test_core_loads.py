"""megatron-core loads what an engine saved into its own model, which then says what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.core_model import SINGLE, core_model
from tests.oracle.models import model, save

IDS = [5, 9, 13, 2, 7, 44, 3, 1]


def logits_of_core(path: Path, name: str, where: Path) -> torch.Tensor:
    """Save an engine; then core's model, drawn at random, filled from that by core's own loader."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    shape = read_shape(path)
    engine = Engine(
        shape, schema.Layout(), engine=schema.Engine(), optimizer=schema.Optimizer(), dtype="fp32"
    )
    engine.load_hf(path)
    engine.save(where)
    made, mesh = core_model(shape, schema.Layout())
    from megatron.core import dist_checkpointing

    asked = made.sharded_state_dict(metadata={**SINGLE, "dp_cp_group": mesh.groups.dp_cp})
    # FP8 states, which core's layers ask for and a checkpoint in fp32 or bf16 does not have, come back as missing.
    found, missing, _ = dist_checkpointing.load(asked, str(where), strict="return_all")
    assert all("_extra_state" in key for key in missing)
    assert found["content_metadata"]["singleton_local_shards"]
    made.load_state_dict({key: one for key, one in found.items() if key in made.state_dict()})
    ids = torch.tensor([IDS])
    made.eval()
    with torch.no_grad():
        return made(ids, torch.arange(len(IDS))[None], torch.ones(1, 1, len(IDS), len(IDS)).triu(1).bool())


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_core_loads(pool, models, tmp_path, name):
    path = save(name, models / name)
    (logits,) = pool.run(logits_of_core, 1, path, name, tmp_path / "saved")
    with torch.no_grad():
        expected = model(name)(torch.tensor([IDS])).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
