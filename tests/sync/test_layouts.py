"""Weights arrive bit for bit, from any training layout in any rollout's, through channels between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.models import read_shape, table_of
from tests.engine import mtp_models
from tests.oracle.models import save
from tests.sync import layouts

PAIRS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2-pp2-to-tp1": ("qwen3", 4, {"tp": 2, "pp": 2}, {}),
    "pp2-vpp2-to-dp2": ("qwen2-tied", 2, {"pp": 2, "vpp": 2}, {}),
    "cp2-to-tp2": ("qwen3-tied", 2, {"cp": 2}, {"tp": 2}),
    "ep2-to-tp2": ("qwen3_moe", 2, {"ep": 2}, {"tp": 2, "sp": True}),
    "latent-ep2-to-dp2": ("deepseek_v3", 2, {"ep": 2}, {}),
    "uneven-pp2-to-pp2": ("deepseek_v3-tied", 2, {"pp": 2, "stage_layers": [4, 0]}, {"pp": 2}),
    "latent-tp2-to-pp2": ("deepseek_v3-tied", 2, {"tp": 2, "sp": True}, {"pp": 2}),
    "stacked-etp2-to-ep2": ("gpt_oss", 2, {"etp": 2}, {"ep": 2}),
    "mtp-pp2-to-tp2": ("mimo", 2, {"pp": 2}, {"tp": 2}),
}
KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate")]


def directory(family: str, root: Path) -> Path:
    path = root / f"sync-{family}"
    return save(family, path) if family != "mimo" else mtp_models.save(family, path)


@pytest.mark.parametrize("colocated", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_boxes_arrive_bit_for_bit(pool, tmp_path_factory, pair, colocated):
    family, world, train, rollout = PAIRS[pair]
    path = directory(family, tmp_path_factory.getbasetemp())
    for result in pool.run(layouts.reshard, world, path, train, rollout, colocated):
        assert result
        assert [name for name, same in result if not same] == []


@pytest.mark.parametrize("pair", PAIRS)
def test_whole_tensors_are_those_of_the_export(pool, tmp_path_factory, pair):
    family, world, train, _ = PAIRS[pair]
    path = directory(family, tmp_path_factory.getbasetemp())
    found, served = pool.run(layouts.whole, world, path, train, "cp" in train)[0]
    expected = {
        name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    shape = read_shape(path)
    again = {name for weight in table_of(shape) for name in weight.copies}
    assert set(expected) - again <= set(found) <= set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert served.bytes >= sum(one.nbytes for one in found.values())
    assert served.buckets > 3
