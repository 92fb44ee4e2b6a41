"""The comparison of fingerprints names every tensor that is not the same on both sides, and no other."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import Fingerprints, fingerprints
from quintet.errors import SyncMismatch
from quintet.models import ModelShape, MoeShape, Names, decoder_weights
from quintet.models.mcore import Box, whole_box
from quintet.sync.proof import exported_weights_unchanged, mismatch, tensor_classes
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer

SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "model.norm.weight": (8,),
    "a.experts.up": (3, 4, 6),
    "model.mtp_layers.0.input_proj.weight": (4, 6),
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def whole(name: str) -> Box:
    return whole_box(SHAPES[name])


def held(boxes: dict[str, list[Box]], ranks: int = 1, values: Any = None) -> list[Fingerprints]:
    """Boxes dealt to ranks in turn."""
    values = values or tensors()
    items: list[list[Any]] = [[] for _ in range(ranks)]
    for name, parts in boxes.items():
        for i, box in enumerate(parts):
            part = values[name][tuple(slice(*r) for r in box)]
            items[i % ranks].append((name, tuple(values[name].shape), box, part))
    return [fingerprints(one) for one in items]


def cut(name: str, dim: int, parts: int) -> list[Box]:
    box = list(whole(name))
    step = SHAPES[name][dim] // parts
    return [(*box[:dim], (i * step, (i + 1) * step), *box[dim + 1 :]) for i in range(parts)]


WHOLE = {name: [whole(name)] for name in SHAPES}
CUT = {
    "model.embed_tokens.weight": cut("model.embed_tokens.weight", 0, 4),
    "model.norm.weight": [whole("model.norm.weight")] * 4,
    "model.mtp_layers.0.input_proj.weight": cut("model.mtp_layers.0.input_proj.weight", 1, 2),
    "a.experts.up": [
        (e, *inner[1:]) for e, inner in itertools.product([(0, 1), (1, 2), (2, 3)], cut("a.experts.up", 2, 2))
    ],
}


@pytest.mark.parametrize("engine", [WHOLE, CUT])
@pytest.mark.parametrize("rollout", [WHOLE, CUT])
def test_any_two_cuttings_of_the_same_weights_agree(engine, rollout):
    assert compare(held(engine, 4), held(rollout, 2), SHAPES) == []


@given(st.sampled_from(list(SHAPES)), st.integers(0, 71), st.booleans())
def test_one_changed_element_is_named(name, at, cut_engine):
    values = tensors()
    at %= values[name].numel()
    changed = {**values, name: values[name].clone()}
    changed[name].view(-1)[at] += 1
    engine, rollout = held(CUT if cut_engine else WHOLE, 4), held(CUT, 4, changed)
    (found,) = compare(engine, rollout, SHAPES)
    assert found.name == name
    assert "values" in found.what or "copies" in found.what


def test_the_part_is_told_where_both_sides_are_cut_alike():
    values = tensors()
    values["a.experts.up"][1, 2, 4] = 7
    (found,) = compare(held(CUT), held(CUT, 1, values), SHAPES)
    assert (found.kind, found.what) == ("expert", "other values at [1:2, 0:4, 3:6]")
    (found,) = compare(held(CUT), held(CUT, 2, values), SHAPES)
    assert found.what == "other values at [1:2, 0:4, 3:6], held by rank 1"


def test_two_experts_swapped_are_named():
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    values = {name: torch.randn(4, 6) for name in names}
    swapped = {**values, names[1]: values[names[3]], names[3]: values[names[1]]}
    shapes = dict.fromkeys(names, (4, 6))
    sides = [held({name: [((0, 4), (0, 6))] for name in names}, 2, side) for side in (values, swapped)]
    assert [d.name for d in compare(*sides, shapes)] == [names[1], names[3]]


def drop(ranks: list[Fingerprints], name: str) -> list[Fingerprints]:
    return [{key: value for key, value in rank.items() if key[0] != name} for rank in ranks]


def test_missing_and_left_over_tensors_are_named():
    name = "model.norm.weight"
    both = held(WHOLE)
    assert [(d.name, d.what) for d in compare(both, drop(both, name), SHAPES)] == [
        (name, "missing on the rollout")
    ]
    assert [d.what for d in compare(drop(both, name), both, SHAPES)] == ["missing on the trainer"]
    shapes = {other: shape for other, shape in SHAPES.items() if other != name}
    assert [(d.name, d.what) for d in compare(drop(both, name), both, shapes)] == [
        (name, "the trainer has no such tensor")
    ]


def test_what_cannot_be_read_back_is_left_out():
    name = "model.norm.weight"
    both = held(WHOLE)
    assert compare(both, drop(both, name), SHAPES, unreadable=[name]) == []
    # Of what arrived there may be fingerprints all the same.
    changed = [{key: value + (key[0] == name) for key, value in rank.items()} for rank in both]
    assert [d.name for d in compare(both, changed, SHAPES, unreadable=[name])] == [name]


@pytest.mark.parametrize("side", [0, 1])
def test_copies_that_differ_between_ranks_are_found(side):
    sides = [held(CUT, 4), held(CUT, 4)]
    key = ("model.norm.weight", whole("model.norm.weight"))
    sides[side][2][key] ^= 1
    (found,) = compare(*sides, SHAPES)
    who = ("trainer", "rollout")[side]
    assert found.what == f"the {who}'s ranks hold different copies of [0:8]: rank 2 other than ranks 0, 1, 3"


FAULTS = {
    "are 64 of its 96 elements": [((0, 8), (0, 8))],
    "are 48 of its 96 elements": [((0, 12), (0, 2)), ((0, 6), (2, 6))],
    "overlap": [((0, 8), (0, 8)), ((4, 8), (0, 8))],
    "parts overlap": [((0, 12), (0, 8)), ((4, 8), (0, 8))],
    "is not within its shape": [((0, 13), (0, 8))],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_cover_the_tensor_are_found(fault):
    name = "model.embed_tokens.weight"
    values = {**tensors(), name: torch.zeros(13, 8)}  # sums alone would show nothing
    engine = held(WHOLE, 1, {**tensors(), name: torch.zeros(12, 8)})
    (found,) = compare(engine, held({**WHOLE, name: FAULTS[fault]}, 1, values), SHAPES)
    assert found.name == name
    assert fault in found.what


def test_parts_on_no_grid_cover_too():
    name = "model.embed_tokens.weight"
    pinwheel = [((0, 8), (0, 4)), ((8, 12), (0, 8)), ((0, 4), (4, 8)), ((4, 8), (4, 8))]
    staggered = [((0, 3), (0, 8)), ((3, 9), (0, 4)), ((3, 12), (4, 8)), ((9, 12), (0, 4))]
    for boxes in (pinwheel, staggered):
        assert compare(held(WHOLE), held({**WHOLE, name: boxes}), SHAPES) == []


def test_the_message_names_ten_tensors_and_counts_the_classes():
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(12)]
    shapes = {**dict.fromkeys(names, (2, 2)), "model.norm.weight": (8,)}
    found = compare([{}], [{}], shapes)
    error = mismatch(found, "rollout-0")
    assert isinstance(error, SyncMismatch)
    said = str(error)
    assert "rollout-0" in said
    assert "13 tensors differ (12 dense, 1 norm)" in said
    assert names[9] in said
    assert names[10] not in said
    assert said.endswith("and 3 more")
    assert str(pickle.loads(pickle.dumps(error))) == said


def test_classes_of_a_familys_tensors():
    moe = MoeShape(4, 2, 8, shared_ffn_hidden_size=8, dense_layers=(0,), score="sigmoid", bias=True)
    shape = ModelShape("glm4_moe", 2, 16, 24, 4, 2, 4, 32, 32, False, 1e-6, True, True, moe=moe, mtp_layers=1)
    names = [name for w in decoder_weights(shape, Names()) for name in w.hf]
    kinds = tensor_classes([*names, "base_model.model.x.lora_A.weight", "a.weight_scale_inv"])
    told = {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "embedding",
        "model.norm.weight": "norm",
        "model.layers.0.input_layernorm.weight": "norm",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.0.self_attn.q_proj.bias": "bias",
        "model.layers.0.self_attn.q_proj.weight": "dense",
        "model.layers.0.mlp.gate_proj.weight": "dense",
        "model.layers.1.mlp.gate.weight": "router",
        "model.layers.1.mlp.gate.e_score_correction_bias": "router",
        "model.layers.1.mlp.experts.3.gate_proj.weight": "expert",
        "model.layers.1.mlp.shared_experts.up_proj.weight": "dense",
        "model.layers.2.self_attn.q_proj.weight": "mtp",
        "model.layers.2.eh_proj.weight": "mtp",
        "base_model.model.x.lora_A.weight": "adapter",
        "a.weight_scale_inv": "scale",
    }
    assert {name: kinds[name] for name in told} == told


def test_masters_that_change_alone_raise_an_alarm():
    def told(values: dict[str, torch.Tensor]) -> RankFingerprints:
        (prints,) = held(WHOLE, 1, values)
        return RankIndexer().tell(prints, SHAPES)

    one, other = told(tensors()), told(tensors(1))
    before = [one, one], [5, 7]
    assert exported_weights_unchanged(before, ([one, one], [5, 7])) is None
    assert exported_weights_unchanged(before, ([one, other], [5, 8])) is None
    assert exported_weights_unchanged(([one], [None]), ([one], [None])) is None
    said = exported_weights_unchanged(before, ([one, one], [5, 8]))
    assert said is not None
    assert "1 of 2 ranks" in said
