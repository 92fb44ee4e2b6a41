"""Weights of vLLM's workers: new ones arrive, are generated with, and are read back; what is wrong with them is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import fingerprints
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, volume, whole_box
from quintet.rollout.base import Piece, Wanted
from quintet.sync.logprob_probe import check, limits, sequences
from tests.oracle.models import hub_names
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import greedy, greedy_by_transformers, made
from tests.rollout.vllm.models import model, save
from tests.rollout.vllm.sent import update

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


@dataclass
class Source:
    """Weights on their way, in parts of so many rows."""

    named: dict[str, Tensor]
    rows: int | None = None
    dropped: list[str] = field(default_factory=list)
    wanted: list[list[Wanted] | None] | None = None
    """What each receiver asks for; nobody is asked where there is none."""

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        return ([one] for one in self.pieces(receiver))

    def pieces(self, receiver: int) -> Iterator[Piece]:
        asked = self.wanted[receiver] if self.wanted else None
        if asked is not None:
            for one in asked:
                tensor = self.named[one.name]
                part = tensor[tuple(slice(*side) for side in one.box)].to(DEVICE, copy=True)
                yield Piece(one.name, tuple(tensor.shape), one.box, part)
                part.zero_()
            return
        for name, tensor in self.named.items():
            if name in self.dropped:
                continue
            step = self.rows or len(tensor)
            for start in range(0, len(tensor), step):
                part = tensor[start : start + step].to(DEVICE, copy=True)
                box = ((start, start + len(part)), *whole(tensor)[1:])
                yield Piece(name, tuple(tensor.shape), box, part)
                part.zero_()


def flip(tensor: Tensor, at: int) -> None:
    """Change the last bit of one element."""
    bits = tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)
    bits.view(-1)[at] ^= 1


def whole(tensor: Tensor) -> Box:
    return whole_box(tensor.shape)


def named_weights(one: Any) -> dict[str, Tensor]:
    """What an engine sends of a transformers model."""
    buffers = (b for b in one.named_buffers() if b[0].endswith("correction_bias"))
    named = hub_names([*one.named_parameters(), *buffers], one.config.model_type)
    return {n: t.detach().to(t.dtype if n.endswith("_bias") else DTYPE) for n, t in named.items()}


def differing(rollout: Any, named: dict[str, Tensor]) -> list[str]:
    """The tensors that the proof names by fingerprints: on CPU, of what kernels pack, those of what arrived."""
    engine = fingerprints((n, tuple(t.shape), whole(t), t) for n, t in named.items())
    found, unreadable = rollout.fingerprints()
    assert DEVICE == "cpu" or unreadable == []
    shapes = {n: tuple(t.shape) for n, t in named.items()}
    return [d.name for d in compare([engine], [found], shapes, unreadable)]


@pytest.fixture(scope="module", autouse=True)
def functions_travel() -> Iterator[None]:
    """These tests have workers in other processes run what changes weights under quintet; it runs without that itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield


@pytest.fixture(scope="module", params=[("glm4_moe", 2), ("qwen2-tied", 1)])
def case(request: pytest.FixtureRequest, start: Any) -> tuple[str, Any]:
    """On two devices, dense layers, experts, a shared one and a router's bias; and tied embeddings and biases."""
    name, tp = request.param
    return name, start(name, layout={"tp": min(tp, torch.cuda.device_count()) if DEVICE == "cuda" else tp})


def test_new_weights(case: tuple[str, Any]) -> None:
    name, rollout = case
    for seed, rows in ((1, None), (2, 40)):
        named = named_weights(made(name, seed))
        update(rollout, Source(named, rows))
        assert differing(rollout, named) == []
        if DEVICE == "cpu":  # in bf16, tokens that are nearly as likely change places
            assert greedy(rollout) == greedy_by_transformers(name, 8, seed)


def test_workers_ask_for_the_parts_that_they_read(case: tuple[str, Any]) -> None:
    """Half of a model on each of two devices, and some more: norms and routers are on both. On one device it is all."""
    name, rollout = case
    update(rollout, Source(named_weights(made(name, 1))))
    for seed in (2, 3):
        named = named_weights(made(name, seed))
        wanted = rollout.receivers()
        update(rollout, Source(named, wanted=wanted))
        assert differing(rollout, named) == []
        if DEVICE == "cpu":
            assert greedy(rollout) == greedy_by_transformers(name, 8, seed)
    everything = sum(t.numel() for t in named.values())
    for asked in wanted:
        assert (asked is None) == (len(wanted) == 1)
        if asked is not None:
            assert 0.5 <= sum(volume(one.box) for one in asked) / everything < 0.55


def test_a_tensor_lost_on_the_way_is_named(case: tuple[str, Any]) -> None:
    name, rollout = case
    named = named_weights(made(name, 3))
    lost = (
        "model.layers.2.mlp.experts.5.down_proj.weight"
        if "moe" in name
        else "model.layers.2.mlp.up_proj.weight"
    )
    with pytest.raises(SyncMismatch, match=f"did not get {lost}:"):
        update(rollout, Source(named, dropped=[lost]))
    with pytest.raises(SyncMismatch, match=r"no place for model\.layers\.0\.extra\.weight:"):
        update(rollout, Source(named | {"model.layers.0.extra.weight": torch.ones(3)}))


def test_what_changes_on_the_way_is_named(case: tuple[str, Any]) -> None:
    name, rollout = case
    named = named_weights(made(name, 4))
    sent = dict(named)
    flipped = [n for n in named if n.endswith("layers.1.self_attn.k_proj.weight") or n == "model.norm.weight"]
    for one in flipped:
        sent[one] = sent[one].clone()
        flip(sent[one], 5)
    swapped = [f"model.layers.2.mlp.experts.{e}.up_proj.weight" for e in (1, 2)] if "moe" in name else []
    if swapped:
        sent |= dict(zip(swapped, [named[n] for n in reversed(swapped)], strict=True))
    update(rollout, Source(sent))
    assert sorted(differing(rollout, named)) == sorted(flipped + swapped)


def flip_norm(worker: Any) -> None:
    flip(worker.model_runner.get_model().model.norm.weight.data, 3)


def swap_experts(worker: Any) -> None:
    """In the first layer that has any."""
    experts = next(m for m in worker.model_runner.get_model().modules() if hasattr(m, "w2_weight"))
    experts.w2_weight.data[[4, 6]] = experts.w2_weight.data[[6, 4]]


def change_a_kernel(worker: Any) -> None:
    """The linear layer's kernel has the rows of its matrix exchanged."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = worker.model_runner.get_model().model.layers[1].self_attn.qkv_proj
    matrix = layer.cpu_linear(torch.eye(layer.input_size), layer.weight, None).T.flip(0).contiguous()
    layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def forget_the_head(worker: Any) -> None:
    """The head's kernel has other weights than the parameter, which is the embedding's where they are tied."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = worker.model_runner.get_model().lm_head
    kept = head.weight
    head.weight = torch.nn.Parameter(kept * 1.5, requires_grad=False)
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    head.weight = kept


def test_what_changes_after_loading_is_named(case: tuple[str, Any]) -> None:
    name, rollout = case
    named = named_weights(made(name, 5))
    update(rollout, Source(named))
    changes = {flip_norm: ["model.norm.weight"]}
    if "moe" in name and DEVICE != "cpu":
        changes[swap_experts] = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (4, 6)]
    for change, names in changes.items():
        rollout._engine._engine.collective_rpc(change)
        assert differing(rollout, named) == names
        update(rollout, Source(named))
        assert differing(rollout, named) == []


@pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs these weights are read back")
def test_what_changes_in_kernels_on_the_cpu_is_found_by_log_probs(case: tuple[str, Any]) -> None:
    """What they pack is told to be unreadable, all of it and no more: then a sync is proved by the probe as well."""
    name, rollout = case
    named = named_weights(made(name, 5))
    update(rollout, Source(named))
    _, unreadable = rollout.fingerprints()
    matrices = {n for n, t in named.items() if t.dim() > 1}
    unpacked = {n for n in matrices if n.endswith("mlp.gate.weight")}
    assert matrices - unpacked <= set(unreadable) <= matrices
    asked = sequences(made(name).config.vocab_size, 32, experts=False)
    right = rollout.score(asked)
    within = limits(None, "fp32", experts="moe" in name, quantized=False)
    check(right, rollout.score(asked), asked, within, "rollout-0")
    changes = {
        change_a_kernel: "model.layers.1.self_attn.q_proj.weight",
        forget_the_head: "model.embed_tokens.weight" if "tied" in name else "lm_head.weight",
    }
    if "moe" in name:
        changes[swap_experts] = "model.layers.1.mlp.experts.4.down_proj.weight"
    for change, tensor in changes.items():
        assert tensor in unreadable
        rollout._engine._engine.collective_rpc(change)
        with pytest.raises(SyncMismatch, match="does not compute what the trainer computes"):
            check(right, rollout.score(asked), asked, within, "rollout-0")
        update(rollout, Source(named))
        check(right, rollout.score(asked), asked, within, "rollout-0")


def test_a_kv_head_that_two_workers_hold(start: Any, tmp_path: Path) -> None:
    changed = {"num_key_value_heads": 1}
    tp = 2 if DEVICE == "cpu" else min(2, torch.cuda.device_count())
    rollout = start("qwen3", save("qwen3", tmp_path / "model", **changed), layout={"tp": tp})
    for seed in (1, 2):  # by vLLM's loaders, then in place
        named = named_weights(model("qwen3", seed=seed, **changed))
        update(rollout, Source(named))
        assert differing(rollout, named) == []
