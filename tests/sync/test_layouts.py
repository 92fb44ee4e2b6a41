"""Weights arrive bit for bit, from any training layout in any rollout's, through channels between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.models import save
from tests.sync import layouts

PAIRS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2-pp2-to-tp1": ("qwen3", 4, {"tp": 2, "pp": 2}, {}),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "separate"])
def test_boxes_arrive_bit_for_bit(pool, tmp_path_factory, pair, colocated):
    family, world, train, rollout = PAIRS[pair]
    path = save(family, tmp_path_factory.getbasetemp() / f"sync-{family}")
    for result in pool.run(layouts.reshard, world, path, train, rollout, colocated):
        assert result
        assert [name for name, same in result if not same] == []


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "separate"])
def test_whole_tensors_are_those_of_the_export(pool, tmp_path_factory, pair, colocated):
    family, world, train, _ = PAIRS[pair]
    path = save(family, tmp_path_factory.getbasetemp() / f"sync-{family}")
    found, served = pool.run(layouts.whole, world, path, train, colocated)[0]
    expected = load_file(path / "model.safetensors")
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert served.bytes >= sum(one.nbytes for one in expected.values())
    assert not served.lost
