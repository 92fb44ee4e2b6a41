"""Layers for multi-token prediction: computed as the families' released code does, moved bit for bit, never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.engine.weights.hf import check_hf
from quintet.errors import UserError
from quintet.models import check_weights, held_shape, read_shape
from quintet.packing.plan import RankCell
from tests.engine.moe_models import save as save_trunk
from tests.engine.moe_models import stored
from tests.engine.mtp_models import KINDS, LAYERS, VOCAB, model, save
from tests.engine.test_reshard import reshard

LENGTHS = [9, 6, 17, 4, 12, 8]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2-vpp2-tp2-sp": (4, {"pp": 2, "vpp": 2, "tp": 2, "sp": True}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")

    return lambda family: save(family, root / family)


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def states(path: Path, layout: dict[str, Any]) -> dict[tuple[int, int], list[Tensor]]:
    """On one rank: what each layer says of the tokens that this rank holds, by sample and position."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    settings: Any = {"engine": schema.Engine(), "optimizer": None, "dtype": "fp32"}
    engine = Engine(read_shape(path), schema.Layout(**layout), **settings)
    engine.load_hf(path)
    found: dict[tuple[int, int], list[Tensor]] = {}
    dp, size = engine.mesh.at("dp"), engine.mesh.sizes.dp
    with torch.no_grad():
        _run(engine, [i for i in range(len(LENGTHS)) if i % size == dp], found)
    return found


def _run(engine: Any, mine: list[int], found: dict[tuple[int, int], list[Tensor]]) -> None:
    from quintet.data.batch import make_batch, offsets
    from quintet.engine.ahead import ahead_losses
    from quintet.engine.row import pack
    from quintet.packing.align import alignment_of
    from quintet.recipe import schema

    sizes, rank = engine.mesh.sizes, engine.mesh.at("cp")
    align = alignment_of(engine.layout, sizes.cp, engine.recipe)
    ids = [samples()[i] for i in mine]
    places = [(i, t) for i, one in zip(mine, ids, strict=True) for t in range(len(one))]
    batch = make_batch(ids, [2] * len(ids))
    ends, none = offsets(batch), torch.zeros(len(places), dtype=torch.bool)

    def packed(values: list[int]) -> Tensor:
        """Values of the tokens, where this rank's row has the tokens."""
        row = pack(torch.tensor(values), ends, none, range(len(ids)), align, sizes.cp, rank)
        return row.input_ids

    def look(outputs: Any, micro: Any) -> tuple[Tensor, dict[str, Any]]:
        return torch.zeros(()), {}

    def outputs(out: Any, micro: Any, row: Any, *rest: Any) -> None:
        last = engine.chunks[-1]
        made = [last.for_head(state) for state in last.look_ahead(out, micro, row, detach=True)]
        numbers = packed([n + 1 for n in range(len(places))])[0].tolist()  # 0 is padding
        for at, number in enumerate(numbers):
            if number:
                found[places[number - 1]] = [one[at] for one in made]

    engine._pipeline._outputs = outputs
    cell = RankCell(list(range(len(ids))), sizes.cp, rank)
    ahead = ahead_losses(schema.Mtp(), [1] * (1 + LAYERS))
    engine._pipeline.run(batch, [cell] * sizes.pp, look, 1.0, forward_only=True, ahead=ahead)


def check(family: str, ranks: list[dict[tuple[int, int], list[Tensor]]]) -> None:
    made, seen = model(family), set()
    wanted = [made.states(ids) for ids in samples()]
    for found in ranks:
        for (sample, at), of_layers in found.items():
            for state, want in zip(of_layers, wanted[sample], strict=True):
                torch.testing.assert_close(state, want[at], rtol=1e-4, atol=1e-4)
            seen.add((sample, at))
    assert len(seen) == sum(LENGTHS)


FAST = [
    ("mimo", "tp2-sp"),
    ("mimo", "pp2"),
    ("deepseek_v3", "ep2"),
    ("deepseek_v3", "cp2"),
    ("glm4_moe", "tp2-sp"),
]
ALL = [(family, layout) for family in KINDS for layout in LAYOUTS if (family, layout) != ("mimo", "ep2")]


@pytest.mark.parametrize(("family", "layout"), FAST)
def test_states_are_those_of_the_reference(pool, directory, family, layout):
    world, sizes = LAYOUTS[layout]
    check(family, pool.run(states, world, directory(family), sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [case for case in ALL if case not in FAST])
def test_states_are_those_of_the_reference_everywhere(pool, directory, family, layout):
    world, sizes = LAYOUTS[layout]
    check(family, pool.run(states, world, directory(family), sizes))


def round_trip(path: Path, out: Path, layout: dict[str, Any], trained: bool) -> None:
    """On one rank: load, and save again. trained: without the layers, with other weights than those that were loaded."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    shape = read_shape(path).without_mtp() if trained else read_shape(path)
    engine = Engine(shape, schema.Layout(**layout), engine=schema.Engine(), optimizer=None, dtype="fp32")
    engine.load_hf(path)
    if trained:
        for shard in engine.shard_map():
            shard.write(shard.read() + 1)
    engine.save_hf(out, path)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", pytest.param("pp2-vpp2-tp2-sp", marks=pytest.mark.slow)])
def test_saved_equals_loaded(pool, directory, tmp_path, family, layout):
    world, sizes = LAYOUTS[layout]
    pool.run(round_trip, world, directory(family), tmp_path / "out", sizes, False)
    before, after = stored(directory(family)), stored(tmp_path / "out")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_shape(tmp_path / "out").mtp_layers == LAYERS


@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        ("mimo", {"tp": 2, "sp": True}, {"pp": 2}),
        ("deepseek_v3", {"ep": 2}, {"tp": 2, "sp": True}),
        ("glm4_moe", {"pp": 2}, {"etp": 2}),
    ],
)
def test_they_arrive_in_another_layout_bit_for_bit(pool, directory, family, source, target):
    for same in pool.run(reshard, 2, directory(family), source, target):
        assert [name for name, equal in same if not equal] == []


@pytest.mark.parametrize("family", KINDS)
def test_a_trained_model_takes_the_layers_of_its_source_along(pool, directory, tmp_path, family):
    source = in_two_files(directory(family), tmp_path / "source")
    pool.run(round_trip, 2, source, tmp_path / "out", {"tp": 2, "sp": True}, True)
    before, after = stored(source), stored(tmp_path / "out")
    assert set(before) == set(after)
    shape = read_shape(source)
    trained = set(names(shape.without_mtp()))
    copies = {n for n in before if n.endswith((".embed_tokens.weight", ".shared_head.head.weight"))} - trained
    for name in before:
        if name in copies:  # still those of the embedding and the head that were saved
            of = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
            assert torch.equal(after[name], after[of])
        elif name in trained:
            assert torch.equal(after[name], before[name] + 1)
        else:
            assert torch.equal(after[name], before[name])
    assert len(trained) < len(before)
    check_weights(tmp_path / "out", shape)


def names(shape: Any) -> list[str]:
    from quintet.models import table_of

    return [name for weight in table_of(shape) for name in weight.hf]


def in_two_files(path: Path, out: Path) -> Path:
    """The same model in two safetensors files."""
    out.mkdir()
    (out / "config.json").write_text((path / "config.json").read_text())
    tensors = sorted(stored(path).items())
    half = len(tensors) // 2
    weight_map = {}
    for file, part in (("a.safetensors", tensors[:half]), ("b.safetensors", tensors[half:])):
        save_file(dict(part), str(out / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys((name for name, _ in part), file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return out


def rewrite(source: Path, out: Path, change: Any) -> Path:
    """A copy of a directory with other tensors."""
    out.mkdir()
    (out / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mimo", "model.mtp_layers.1.input_proj.weight"),
        ("deepseek_v3", "model.layers.5.shared_head.norm.weight"),
        ("glm4_moe", "model.layers.4.mlp.experts.7.down_proj.weight"),
    ],
)
def test_a_layer_with_a_tensor_missing_or_left_over_is_refused(directory, tmp_path, family, missing):
    stray = missing.rsplit(".", 2)[0] + ".stray"
    path = rewrite(
        directory(family), tmp_path / "m", lambda t: t.pop(missing) is t.update({stray: torch.ones(1)})
    )
    for shape in (read_shape(path), read_shape(path).without_mtp()):
        with pytest.raises(UserError) as caught:
            check_weights(path, shape)
        assert f"missing: {missing}; left over: {stray}" in str(caught.value)


def test_a_directory_may_hold_none_of_the_layers_that_its_config_speaks_of(directory, tmp_path):
    path = save_trunk("deepseek_v3", tmp_path / "m")
    config = json.loads(
        (path / "config.json").read_text()
    )  # as transformers writes it for a model that was read
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert read_shape(path).mtp_layers == 1
    assert held_shape(path).mtp_layers == 0
    check_weights(path, read_shape(path).without_mtp())
    with pytest.raises(UserError, match=r"missing: model\.layers\.4\."):
        check_weights(path, read_shape(path))
    assert held_shape(directory("deepseek_v3")).mtp_layers == LAYERS


def test_a_shared_tensor_that_is_not_the_same_is_refused_where_the_layers_are_used(pool, directory, tmp_path):
    copy = "model.layers.5.shared_head.head.weight"
    path = rewrite(directory("glm4_moe"), tmp_path / "m", lambda t: t[copy].add_(1))
    with pytest.raises(UserError, match=rf"{copy} differs from lm_head\.weight"):
        check_hf(read_shape(path), path)
    pool.run(round_trip, 1, path, tmp_path / "out", {}, True)
    assert torch.equal(stored(tmp_path / "out")[copy], stored(path)[copy])


def test_they_are_not_trained_unless_that_is_said(pool, directory):
    assert "nothing says whether they are trained" in pool.run(trained, 1, directory("mimo"))[0]


def trained(path: Path) -> str:
    """What is said to someone who would train them."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    settings = {"engine": schema.Engine(), "optimizer": schema.Optimizer(), "dtype": "fp32"}
    with pytest.raises(UserError) as caught:
        Engine(read_shape(path), schema.Layout(), **settings)
    return str(caught.value)
