"""How a worker takes weights and tells what it has, with a model and loaders in the manner of vLLM's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import fingerprints
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, whole_box
from quintet.rollout.base import Piece
from quintet.rollout.vllm.extension import Extension
from quintet.rollout.vllm.reload import models_of
from quintet.rollout.vllm.weights import Weights, check, combine
from quintet.rollout.vllm.worker_models import WorkerModels

HIDDEN, HEADS, VOCAB, EXPERTS = 8, 4, 10, 4


class Layer(nn.Module):
    """One worker's part of fused q, k and v (one KV head, which all workers hold), and of experts."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        rows = HEADS * 2 // tp + 4
        self.qkv_proj = nn.Linear(HIDDEN, rows, bias=False)
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.w13 = nn.Parameter(torch.empty(EXPERTS // tp, 6, HIDDEN))


class Fused(nn.Module):
    """Two layers and a vocabulary with two rows of padding."""

    def __init__(self, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp
        self.embed = nn.Embedding(VOCAB + 2, HIDDEN)
        self.layers = nn.ModuleList(Layer(tp) for _ in range(2))
        self.requires_grad_(False)
        for parameter in self.parameters():
            parameter.fill_(torch.nan)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's loaders: what is unknown is skipped, what does not come stays."""
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.weight[:VOCAB].copy_(tensor)
                self.embed.weight[VOCAB:].fill_(0)
            elif name.startswith("layers."):
                self._load_layer(self.layers[int(name.split(".")[1])], name, tensor)

    def _load_layer(self, layer: Any, name: str, tensor: Tensor) -> None:
        rows, mine = HEADS * 2 // self.tp, EXPERTS // self.tp
        part = name.split(".")[2]
        if part == "q":
            layer.qkv_proj.weight[:rows].copy_(tensor[self.rank * rows : (self.rank + 1) * rows])
        elif part in ("k", "v"):
            start = rows + 2 * (part == "v")
            layer.qkv_proj.weight[start : start + 2].copy_(tensor)
        elif part == "norm":
            layer.norm.weight.copy_(tensor)
        elif part == "experts":
            expert = int(name.split(".")[3]) - self.rank * mine
            if 0 <= expert < mine:
                start = 3 * name.endswith("up")
                layer.w13[expert, start : start + 3].copy_(tensor)


def weights_of(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    named = {"embed.weight": torch.randn(VOCAB, HIDDEN)}
    for i in range(2):
        named |= {
            f"layers.{i}.q": torch.randn(HEADS * 2, HIDDEN),
            f"layers.{i}.k": torch.randn(2, HIDDEN),
            f"layers.{i}.v": torch.randn(2, HIDDEN),
            f"layers.{i}.norm": torch.randn(HIDDEN),
        }
        for e in range(EXPERTS):
            named |= {f"layers.{i}.experts.{e}.{half}": torch.randn(3, HIDDEN) for half in ("gate", "up")}
    return named


def whole(shape: Iterable[int]) -> Box:
    return whole_box(shape)


def pieces(named: dict[str, Tensor], rows: int | None = None) -> Iterator[list[Piece]]:
    """As they travel, some at a time: they are gone when the next come. rows: tensors are cut into so many."""
    cut = []
    for name, tensor in named.items():
        for start in range(0, len(tensor), rows or len(tensor)):
            box = ((start, min(start + (rows or len(tensor)), len(tensor))), *whole(tensor.shape[1:]))
            cut.append((name, box))
    return travelling(named, cut)


def travelling(named: dict[str, Tensor], cut: list[tuple[str, Box]]) -> Iterator[list[Piece]]:
    for at in range(0, len(cut), 3):
        some = [
            Piece(
                name, tuple(named[name].shape), box, named[name][tuple(slice(*side) for side in box)].clone()
            )
            for name, box in cut[at : at + 3]
        ]
        yield some
        for one in some:
            one.tensor.fill_(torch.nan)


def torn(batches: Iterator[list[Piece]], *missing: tuple[str, int]) -> Iterator[list[Piece]]:
    """Without the parts of these names that begin at these rows."""
    for some in batches:
        yield [one for one in some if (one.name, one.box[0][0]) not in missing]


def make(rank: int = 0, tp: int = 1) -> tuple[Fused, Weights]:
    model = Fused(rank, tp)
    return model, Weights(WorkerModels(model), model.load, lambda name: name.startswith("mtp"))


def asked(held: Weights, named: dict[str, Tensor]) -> Iterator[list[Piece]]:
    """What a worker asks for, and no more."""
    wanted = held.wanted()
    assert wanted is not None
    return travelling(named, [(one.name, one.box) for one in wanted])


def differing(held: list[Weights], named: dict[str, Tensor]) -> list[str]:
    engine = fingerprints((n, tuple(t.shape), whole(t.shape), t) for n, t in named.items())
    found, unreadable = combine([w.read() for w in held])
    assert not unreadable
    return [d.name for d in compare([engine], [found], {n: tuple(t.shape) for n, t in named.items()})]


@pytest.mark.parametrize("rows", [None, 3])
def test_weights_arrive_in_whole_and_in_parts(rows: int | None) -> None:
    model, held = make()
    for seed in range(3):  # through the loaders, then straight to their places
        named = weights_of(seed)
        assert held.wanted() is None  # it reads all of them
        check([held.take(pieces(named, rows))])
        assert not differing([held], named)
        expected = Fused()
        expected.load(named.items())
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
        for parameter in model.parameters():  # forgotten in sleep, the vocabulary's padding as well
            parameter.fill_(torch.nan)


def test_a_loader_that_stops_early_is_found() -> None:
    model = Fused()
    held = Weights(
        WorkerModels(model), lambda weights: model.load(itertools.islice(weights, 3)), lambda name: False
    )
    with pytest.raises(RuntimeError, match="did not take all tensors"):
        held.take(pieces(weights_of(0)))


def test_workers_share_a_model() -> None:
    workers = [make(rank, 2) for rank in range(2)]
    for seed in range(2):
        named = weights_of(seed)
        check([held.take(pieces(named)) for _, held in workers])
        assert not differing([held for _, held in workers], named)
    wanted = workers[1][1].wanted()
    assert wanted is not None
    assert ("layers.1.q", ((4, 8), (0, 8))) in {(w.name, w.box) for w in wanted}
    assert "layers.1.experts.1.up" not in {w.name for w in wanted}
    named = weights_of(2)
    check([held.take(asked(held, named)) for _, held in workers])
    assert not differing([held for _, held in workers], named)
    workers[1][0].layers[0].qkv_proj.weight[-1, 0] += 1  # type: ignore[union-attr, operator, index]
    with pytest.raises(SyncMismatch, match=r"layers\.0\.v: two of vLLM's workers hold different weights"):
        combine([held.read() for _, held in workers])


class Repacked(Fused):
    """Its first layer adds k to v, and its second has its experts' kernel take them in a form that cannot be read back."""

    loads = 0

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = dict(weights)
        self.loads += 1
        self.w13_is_packed(False)
        super().load((n, t + named["layers.0.k"] if n == "layers.0.v" else t) for n, t in named.items())
        self.w13_is_packed(True)

    def w13_is_packed(self, packed: bool) -> None:
        layer: Any = self.layers[1]
        experts = layer.w13.data
        layer.w13 = nn.Parameter(
            experts.flip(0).repeat(1, 1, 2) if packed else experts.flip(0)[..., :HIDDEN].clone(),
            requires_grad=False,
        )


def test_what_loaders_pack_is_asked_for_in_the_parts_they_read() -> None:
    models = [Repacked(rank, 2) for rank in range(2)]
    for model in models:
        model.w13_is_packed(True)
    workers = [Weights(WorkerModels(model), model.load, lambda name: False) for model in models]
    named = weights_of(0)
    check([held.take(pieces(named)) for held in workers])
    everything = sum(t.nbytes for t in named.values())
    for seed in (1, 2):
        named = weights_of(seed)
        taken = [held.take(asked(held, named)) for held in workers]
        check(taken)
        assert all(0.4 * everything < one.bytes < 0.8 * everything for one in taken)
        found, unreadable = combine([held.read() for held in workers])
        computed = {"layers.0.k", "layers.0.v"}
        assert set(unreadable) == computed | {n for n in named if n.startswith("layers.1.experts")}
        engine = fingerprints((n, tuple(t.shape), whole(t.shape), t) for n, t in named.items())
        shapes = {n: tuple(t.shape) for n, t in named.items()}
        assert not compare([engine], [found], shapes, unreadable)
        for rank, model in enumerate(models):
            expected = Repacked(rank, 2)
            expected.w13_is_packed(True)
            expected.load(named.items())
            assert all(
                torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True)
            )
    assert [model.loads for model in models] == [3, 3]
    lacking = torn(asked(workers[0], named), ("layers.1.q", 0))
    with pytest.raises(SyncMismatch, match=r"did not get layers\.1\.q:"):
        check([workers[0].take(lacking)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["layers.1.k", "layers.0.experts.2.up", "embed.weight"])
def test_a_tensor_that_does_not_come_is_named(name: str, first: bool) -> None:
    _, held = make()
    if not first:
        check([held.take(pieces(weights_of(0)))])
    named = weights_of(1)
    del named[name]
    with pytest.raises(SyncMismatch, match=rf"vLLM did not get {name}: its weights"):
        check([held.take(pieces(named))])


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_that_the_model_does_not_know_is_named(first: bool) -> None:
    _, held = make()
    if not first:
        check([held.take(pieces(weights_of(0)))])
    with pytest.raises(SyncMismatch, match=r"no place for layers\.0\.bias"):
        check([held.take(pieces(weights_of(0) | {"layers.0.bias": torch.ones(2)}))])


def test_tensors_that_are_not_all_there_or_of_another_shape_are_named() -> None:
    _, held = make()
    with pytest.raises(SyncMismatch, match=r"layers\.0\.q \(24 of 64 elements\)"):
        check([held.take(torn(pieces(weights_of(0), 3), ("layers.0.q", 3)))])
    check([held.take(pieces(weights_of(0)))])
    with pytest.raises(SyncMismatch, match=r"layers\.0\.norm \[9\], before \[8\]"):
        check([held.take(pieces(weights_of(0) | {"layers.0.norm": torch.ones(9)}))])


def test_what_changes_after_loading_is_named() -> None:
    model, held = make()
    named = weights_of(0)
    check([held.take(pieces(named))])
    layer: Any = model.layers[1]
    layer.w13[[0, 1]] = layer.w13[[1, 0]]
    layer.norm.weight[3] += 1e-6
    assert differing([held], named) == [
        "layers.1.norm",
        *(f"layers.1.experts.{e}.{h}" for e in (0, 1) for h in ("gate", "up")),
    ]


def test_nothing_is_told_before_weights_came() -> None:
    with pytest.raises(SyncMismatch, match="has not taken any weights yet"):
        make()[1].read()


def test_what_would_draft_is_proved_to_have_come() -> None:
    workers = [make(rank, 2)[1] for rank in range(2)]
    for seed in range(2):
        named = weights_of(seed) | {"mtp.weight": torch.randn(2)}
        check([held.take(pieces(named)) for held in workers])
        assert not differing(workers, named)
    for held in workers:
        assert "mtp.weight" in {w.name for w in held.wanted() or []}


def test_a_wider_type_is_read_as_what_came() -> None:
    model, held = make()
    named = {name: tensor.bfloat16() for name, tensor in weights_of(0).items()}
    for _ in range(2):
        check([held.take(pieces(named))])
        assert not differing([held], named)
    model.layers[0].norm.weight[0] += 1e-6  # type: ignore[union-attr, operator, index]
    with pytest.raises(SyncMismatch, match=r"layers\.0\.norm: vLLM holds values that are no torch\.bfloat16"):
        held.read()


def test_a_narrower_type_cannot_be_read_and_what_arrived_is_told() -> None:
    model, held = make()
    model.bfloat16()
    named = weights_of(0)
    check([held.take(pieces(named))])
    found, unreadable = combine([held.read()])
    assert set(unreadable) == set(named)
    assert found == fingerprints((n, tuple(t.shape), whole(t.shape), t) for n, t in named.items())


class Drafter(nn.Module):
    """A layer of its own, behind the policy's embedding."""

    def __init__(self, policy: Fused) -> None:
        super().__init__()
        self.embed, self.layer = policy.embed, Layer(1)
        self.layer.requires_grad_(False)
        self.register_buffer("turns", torch.arange(8.0))


def draft_weights(seed: int) -> dict[str, Tensor]:
    """Of policy and drafter."""
    named = weights_of(seed)
    return named | {
        f"mtp.{name.removeprefix('layers.1.')}": t + 1
        for name, t in named.items()
        if name.startswith("layers.1.")
    }


def with_drafter(policy: type[Fused] = Fused) -> tuple[WorkerModels, Weights]:
    models = WorkerModels(policy := policy(), Drafter(policy))

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        drafts = {}
        for name, tensor in weights:
            if name.startswith("mtp."):
                drafts[name] = tensor
            else:
                models.policy.load([(name, tensor)])  # type: ignore[operator]
        for name, tensor in drafts.items():
            policy._load_layer(models.drafter.layer, f"layers.0.{name.removeprefix('mtp.')}", tensor)

    return models, Weights(models, load, lambda name: False)


@pytest.mark.parametrize("rows", [None, 3])
def test_weights_of_policy_and_drafter_arrive(rows: int | None) -> None:
    models, held = with_drafter()
    for seed in range(3):
        named = draft_weights(seed)
        check([held.take(pieces(named, rows))])
        assert not differing([held], named)
        drafter: Any = models.drafter
        assert torch.equal(drafter.layer.norm.weight, named["mtp.norm"])
        assert torch.equal(drafter.layer.w13[2, 3:], named["mtp.experts.2.up"])
        for _, parameter in models.named_tensors(buffers=False):
            parameter.fill_(torch.nan)


def test_what_a_drafter_shares_is_the_policys() -> None:
    models, _ = with_drafter()
    names = [name for name, _ in models.named_tensors()]
    assert "embed.weight" in names
    assert [n for n in names if n.startswith("draft:")] == [
        "draft:layer.w13",
        "draft:layer.qkv_proj.weight",
        "draft:layer.norm.weight",
        "draft:turns",
    ]
    assert models.owner("draft:layer.norm.weight") == (models.drafter.layer.norm, "weight")  # type: ignore[union-attr]
    assert models.owner("layers.0.norm.weight")[0] is models.policy.layers[0].norm  # type: ignore[index, union-attr]
    assert list(models.drafter_buffers()) == ["draft:turns"]
    assert WorkerModels(Fused()).drafter_buffers() == {}


@pytest.mark.parametrize("first", [True, False])
def test_what_a_drafter_does_not_get_is_named(first: bool) -> None:
    _, held = with_drafter()
    if not first:
        check([held.take(pieces(draft_weights(0)))])
    named = draft_weights(1)
    del named["mtp.norm"]
    with pytest.raises(SyncMismatch, match=r"did not get (mtp|draft:layer)\.norm"):
        check([held.take(pieces(named))])
    if first:
        with pytest.raises(SyncMismatch, match=r"did not get draft:layer\.norm"):
            check([held.take(pieces(weights_of(1)))])


def test_a_drafter_one_sync_behind_is_named() -> None:
    models, held = with_drafter()
    check([held.take(pieces(draft_weights(0)))])
    behind = copy.deepcopy(models.drafter.state_dict())  # type: ignore[union-attr]
    del behind["embed.weight"]
    named = draft_weights(1)
    check([held.take(pieces(named))])
    models.drafter.load_state_dict(behind, strict=False)  # type: ignore[union-attr]
    assert differing([held], named) == [name for name in named if name.startswith("mtp.")]


class Runner:
    """Of a worker of vLLM. model: what drafts in it."""

    def __init__(self, policy: nn.Module, model: nn.Module | None) -> None:
        self.get_model = lambda: policy
        self.kv_caches = [torch.ones(4)]
        self.drafter = SimpleNamespace() if model is None else SimpleNamespace(model=model)


MTP = SimpleNamespace(method="mtp", use_eagle=lambda: True)


def test_a_drafter_that_vllm_did_not_make_is_found() -> None:
    policy, no_model = Fused(), SimpleNamespace(method="ngram", use_eagle=lambda: False)
    for asked in (None, no_model):
        assert models_of(Runner(policy, None), asked).drafter is None
    drafter = Drafter(policy)
    assert models_of(Runner(policy, drafter), MTP).drafter is drafter
    with pytest.raises(SyncMismatch, match="was to draft with mtp, and a worker of it has no model"):
        models_of(Runner(policy, None), MTP)


@pytest.mark.parametrize("level", [1, 2])
def test_buffers_of_a_drafter_outlast_sleep(level: int) -> None:
    policy = Fused()
    drafter: Any = Drafter(policy)
    worker: Any = Extension()
    worker.device, worker.model_runner = torch.device("cpu"), Runner(policy, drafter)
    worker.vllm_config = SimpleNamespace(speculative_config=MTP)
    assert worker.fall_asleep(level) == 16
    drafter.turns.zero_()
    assert worker.wake_part("weights") == 0
    assert worker.wake_part("kv_cache") == 16
    assert drafter.turns.tolist() == list(range(8))
