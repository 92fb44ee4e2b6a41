"""Adapters besides their gradients: what is frozen, what is saved and read again, and what the model is without them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.models.lora import LoraShape
from quintet.packing.plan import RankCell
from tests.oracle.models import save
from tests.oracle.reference import PROMPT, token_ids

MODELS = {
    "qwen3": LoraShape(rank=4, alpha=12.0),
    "qwen3_moe": LoraShape(rank=4, alpha=12.0, rslora=True),
    "deepseek_v3": LoraShape(
        rank=3, alpha=9.0, targets=("kv_b_proj", "o_proj", "gate_proj", "up_proj", "layers.*.down_proj")
    ),
    "mixtral": LoraShape(rank=2, alpha=2.0, targets=("q_proj", "w1", "w2", "w3")),
    "glm4_moe": LoraShape(rank=4, alpha=12.0),
}
QUICK = ("qwen3", "deepseek_v3")
LAYOUT = {"tp": 2, "sp": True}


def made(path: Path, lora: LoraShape | None, layout: dict[str, Any], *, trained: bool = True) -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    optimizer = schema.Optimizer(lr=0.03) if trained else None
    how: dict[str, Any] = {"engine": schema.Engine(), "optimizer": optimizer, "dtype": "fp32"}
    return Engine(read_shape(path), schema.Layout(**layout), **how, lora=lora)


def batch() -> Any:
    from quintet.data.batch import make_batch

    return make_batch(token_ids(), [PROMPT] * len(token_ids()))


def nll(outputs: Any, fields: dict[str, Any]) -> Any:
    return -(outputs.logprobs * fields["loss_mask"]).sum() / 50, {}


def logprobs(engine: Any) -> Any:
    return engine.forward(batch(), [RankCell(list(range(len(token_ids()))))]).logprobs


def step(engine: Any) -> None:
    engine.forward_backward(batch(), [RankCell(list(range(len(token_ids()))))], nll)
    engine.optimizer_step()


def content(engine: Any) -> dict[str, Any]:
    return {f"{s.name}{s.box}": s.read().clone() for s in engine.shard_map()}


def life(path: Path, out: Path, lora: LoraShape) -> dict[str, Any]:
    """On one rank: adapters are drawn, trained, saved in every form, and read again; what to compare of it."""
    from quintet.engine.reference import AdapterReference
    from tests.engine.storage import held

    plain, engine = made(path, None, LAYOUT, trained=False), made(path, lora, LAYOUT)
    plain.load_hf(path)
    engine.load_hf(path, seed=7)
    start, base = content(engine), logprobs(plain)
    found: dict[str, Any] = {"fresh": torch.equal(logprobs(engine), base), "start": start}
    reference = AdapterReference(engine)
    reference.copy_weights_from(engine)
    step(engine)
    step(engine)
    found["learned"] = (logprobs(engine) - base).abs().max().item()
    with engine.without_adapters():
        found["without"] = torch.equal(logprobs(engine), base)
    again = reference.forward(batch(), [RankCell(list(range(len(token_ids()))))]).logprobs
    found["reference"] = torch.equal(again, base)
    after = content(engine)
    found["changed"] = [name for name, value in after.items() if not torch.equal(value, start[name])]
    found["bytes"], found["adapters"] = (
        held(engine),
        sum(p.numel() for c in engine.chunks for p in c.parameters() if p.requires_grad),
    )
    reference.copy_weights_from(engine)
    apart = AdapterReference(engine)
    if engine.mesh.rank == 1:  # as a stage without a layer that has adapters
        apart._present = list  # type: ignore[method-assign]
    apart.copy_weights_from(engine)
    found["apart"] = apart._kept is not None
    trained = logprobs(engine)
    engine.save_hf(out / "merged", path)
    engine.save_adapters(out / "adapter", path)
    engine.save(out / "state")
    step(engine)
    moved = content(engine)
    found["kept"] = torch.equal(
        reference.forward(batch(), [RankCell(list(range(len(token_ids()))))]).logprobs, trained
    )
    found["given_back"] = all(torch.equal(value, moved[name]) for name, value in content(engine).items())
    engine.load(out / "state")
    found["resumed"] = [
        name for name, value in content(engine).items() if not torch.equal(value, after[name])
    ]
    other = made(path, lora, LAYOUT, trained=False)
    other.load_hf(path, adapters=out / "adapter")
    found["read"] = [name for name, value in content(other).items() if not torch.equal(value, after[name])]
    found["logprobs"] = trained
    return found


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def lived(
    request: Any, pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path, list[Any]]:
    """A model's name, its directory, what was written, and what each of two ranks found."""
    root = tmp_path_factory.mktemp("lora")
    path = save(request.param, root / "model")
    return request.param, path, root, pool.run(life, 2, path, root, MODELS[request.param], timeout_s=300)


def test_fresh_adapters_do_nothing_and_trained_ones_go_away(lived: Any) -> None:
    for found in lived[3]:
        assert found["fresh"]
        assert found["learned"] > 0.01
        assert found["without"]
        assert found["reference"]


def test_the_base_is_frozen_and_has_no_training_memory(lived: Any) -> None:
    for found in lived[3]:
        assert all(".lora_" in name for name in found["changed"])
        assert any(".lora_A." in name for name in found["changed"])
        assert any(".lora_B." in name for name in found["changed"])
        numel = found["adapters"]
        padding = 1024 * 64  # buffers begin each parameter at a multiple of 64 elements
        assert 4 * numel <= found["bytes"]["grads"] <= 4 * numel + padding
        assert found["bytes"]["optimizer"] <= 8 * numel + 2 * padding
        assert found["bytes"]["grads"] < found["bytes"]["params"] / 4


def test_adapters_come_back_from_checkpoints_and_from_peft(lived: Any) -> None:
    for found in lived[3]:
        assert found["resumed"] == []
        assert found["read"] == []
        assert found["kept"]
        assert found["apart"]
        assert found["given_back"]


def test_start_is_peft_s(lived: Any) -> None:
    """A uniform within 1/√in, B zero."""
    for found in lived[3]:
        a = {name: t for name, t in found["start"].items() if ".lora_A." in name}
        b = [t for name, t in found["start"].items() if ".lora_B." in name]
        assert a
        assert not any(t.any() for t in b)
        for name, t in a.items():
            bound = int(name.rpartition(", ")[2].rstrip(")")) ** -0.5  # the width, but for cut columns
            assert t.abs().max() <= bound * 1.42, name
            assert t.std() > 0.3 * bound


def logits_of(model: Any) -> torch.Tensor:
    """Log-probs of the samples' tokens, flat, 0 where untrained."""
    columns = []
    for ids in token_ids():
        x = torch.tensor(ids)
        with torch.no_grad():
            log_p = model(input_ids=x[None]).logits[0].log_softmax(-1)
        of_next = log_p[:-1].gather(1, x[1:, None])[:, 0]
        column = torch.cat((of_next.new_zeros(1), of_next))
        column[:PROMPT] = 0
        columns.append(column)
    return torch.cat(columns)


def test_merged_directory_is_the_trained_model(lived: Any) -> None:
    from transformers import AutoModelForCausalLM

    _, _, root, ranks = lived
    merged = AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), ranks[0]["logprobs"], rtol=1e-4, atol=1e-4)


def test_peft_loads_the_adapters(lived: Any) -> None:
    """Through its own PeftModel, onto transformers' model: every tensor finds its place, and the numbers are the engine's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, path, root, ranks = lived
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, root / "adapter")
    texts = [str(one.message) for one in said]
    assert not [text for text in texts if "missing" in text.lower() or "unexpected" in text.lower()], texts
    torch.testing.assert_close(logits_of(model), ranks[0]["logprobs"], rtol=1e-4, atol=1e-4)


def drawn(path: Path, layout: dict[str, Any], lora: LoraShape) -> dict[str, Any]:
    engine = made(path, lora, layout, trained=False)
    engine.load_hf(path, seed=3)
    from quintet.engine.lora import split_adapters

    return {f"{s.name}": (s.box, s.read().clone()) for s in split_adapters(engine.shard_map())[1]}


def test_fresh_adapters_are_the_same_in_every_layout(pool: Any, tmp_path: Path) -> None:
    path, lora = save("qwen3_moe", tmp_path / "model"), MODELS["qwen3_moe"]
    (whole,) = pool.run(drawn, 1, path, {}, lora)
    for rank in pool.run(drawn, 2, path, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, lora):
        for name, (box, piece) in rank.items():
            assert torch.equal(whole[name][1][tuple(slice(*ends) for ends in box)], piece), name


def refused(path: Path, root: Path, lora: LoraShape) -> list[str]:
    """Why neither peft's directory nor the checkpoint is loaded."""
    from quintet.errors import UserError

    engine = made(path, lora, {}, trained=False)
    said = []
    for load in (
        lambda: engine.load_hf(path, adapters=root / "adapter"),
        lambda: engine.load(root / "state"),
    ):
        with pytest.raises(UserError) as error:
            load()
        said.append(str(error.value))
        engine.load_hf(path)
    return said


@pytest.mark.parametrize("lived", ["qwen3"], indirect=True)
def test_other_adapters_are_refused(pool: Any, lived: Any) -> None:
    name, path, root, _ = lived
    ((of_peft, of_state),) = pool.run(refused, 1, path, root, replace(MODELS[name], rank=8))
    assert "holds other adapters" in of_peft
    assert "was saved with adapters of rank 4, this engine's have 8" in of_state


def test_scaled_adapters_have_the_scale_in_b() -> None:
    from quintet.engine.lora import scaled
    from quintet.engine.weights.shards import Shard

    a = Shard("base_model.model.x.lora_A.weight", (2, 4), ((0, 2), (0, 4)), torch.randn(2, 4))
    b = Shard("base_model.model.x.lora_B.weight", (6, 2), ((2, 5), (0, 2)), torch.randn(3, 2).bfloat16())
    first, second = scaled([a, b], 1.3)
    assert first is a
    assert (second.name, second.shape, second.box, second.unit()) == (b.name, b.shape, b.box, b.unit())
    expected = (b.view.float() * 1.3).bfloat16()
    assert torch.equal(second.view, expected)
    assert torch.equal(second.part(((3, 5), (1, 2))), expected[1:, 1:])
    b.view.zero_()
    assert not second.read().any()
