"""What an engine tells of its live weights, and of the masters behind them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import fingerprints
from quintet.engine.weights.master_fingerprint import COLUMNS, master_fingerprint
from quintet.models.lora import LoraShape, is_adapter
from quintet.models.mcore import whole_box
from tests.oracle.reference import save


def engine(path: Path, layout: dict[str, Any], lora: LoraShape | None = None, **how: Any) -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    distributed = how.pop("distributed", True)
    made = Engine(
        read_shape(path).without_mtp(),
        schema.Layout(**layout),
        engine=schema.Engine(distributed_optimizer=distributed),
        optimizer=schema.Optimizer(lr=0.01),
        lora=lora,
        **{"dtype": "fp32", **how},
    )
    made.load_hf(path)
    return made


def told(path: Path, layout: dict[str, Any], lora: LoraShape | None = None) -> Any:
    """On one rank."""
    made = engine(path, layout, lora)
    return made.fingerprints(), made.fingerprints(adapters=True), made.master_fingerprint()


LAYOUTS = {
    "qwen3-tied": {"pp": 2},
    "qwen2": {"tp": 2},
    "qwen3_moe": {"ep": 2},
    "deepseek_v3": {"tp": 2, "sp": True},
    "gpt_oss": {"tp": 2, "sp": True},
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_an_engines_fingerprints_are_those_of_the_files(pool, tmp_path, family):
    path = save(family, tmp_path)
    files = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in files.items()}
    whole = fingerprints(
        (name, shapes[name], whole_box(shapes[name]), tensor) for name, tensor in files.items()
    )
    ranks = pool.run(told, 2, path, LAYOUTS[family])
    assert compare([rank[0] for rank in ranks], [whole], shapes) == []
    assert [rank[2] for rank in ranks] == [None, None]  # fp32


def test_adapters_count_merged_or_alone(pool, tmp_path):
    path = save("qwen3", tmp_path)
    plain = pool.run(told, 1, path, {})[0][0]
    ((merged, alone, _),) = pool.run(told, 1, path, {}, LoraShape(rank=2, alpha=4.0))
    assert merged == plain  # B is zero
    assert alone
    assert all(is_adapter(name) for name, _ in alone)


def stepped(path: Path, distributed: bool) -> list[Any]:
    """On one rank: masters' numbers at first, again, after a step, and after one bit of one master has changed."""
    from quintet.engine.checkpoint.slots import slots

    made = engine(path, {}, dtype="bf16", distributed=distributed)
    found = [made.master_fingerprint(), made.master_fingerprint()]
    for shard in made.shard_map("main_grad"):
        shard.view.fill_(1.0)
    made.optimizer_step()
    found.append(made.master_fingerprint())
    before = made.fingerprints()
    held = slots(made._optimizer, [p for chunk in made.chunks for p in chunk.parameters()])
    masters = [slot.master for slot in held]
    masters[-1].view(torch.int32).view(-1)[-1] ^= 1
    found += [made.master_fingerprint(), before == made.fingerprints()]
    made.offload(optimizer=1.0)
    with pytest.raises(RuntimeError, match="offloaded"):
        made.master_fingerprint()
    return found


@pytest.mark.parametrize("distributed", [True, False])
def test_masters_tell_of_every_change(pool, tmp_path, distributed):
    path = save("qwen3", tmp_path)
    for first, again, step, bit, same in pool.run(stepped, 2, path, distributed):
        assert first == again
        assert len({first, step, bit}) == 3
        assert same


def test_every_element_of_every_master_counts_and_so_does_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = [torch.randn(size) for size in (3 * COLUMNS + 1, COLUMNS, 7, 7)]

    def number(held: list[torch.Tensor | None]) -> int | None:
        found = [SimpleNamespace(master=one) for one in held]
        monkeypatch.setattr(
            "quintet.engine.weights.master_fingerprint.slots", lambda optimizer, parameters: found
        )
        return master_fingerprint(None, [])

    first = number([*masters])
    assert first is not None
    assert first >> 32  # all 64 bits
    assert number([*masters, None]) == first
    assert number([None]) is None
    for one in masters:
        for at in (0, len(one) // 2, len(one) - 1):
            one.view(torch.int32)[at] ^= 1
            assert number([*masters]) != first
            one.view(torch.int32)[at] ^= 1
    assert number([*masters[:2], masters[3], masters[2]]) != first
    masters[0][[0, -1]] = masters[0][[-1, 0]]
    assert number([*masters]) != first
    masters[0][[0, -1]] = masters[0][[-1, 0]]
    assert number([*masters]) == first
