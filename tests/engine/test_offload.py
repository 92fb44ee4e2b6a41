"""Offloading frees storage for real, by the asked share, and training goes on bit by bit as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintet.packing.plan import RankCell
from tests.engine import moe_models
from tests.engine.storage import held, tensors
from tests.gpus import a_gpu_each
from tests.oracle.reference import save

CUT = 512
LENGTHS = [7, 12, 5, 20, 9, 16, 4, 11]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "one-fp32": ("qwen3", 1, {}, {"distributed": False}),
    "one-bf16": ("qwen3", 1, {}, {"distributed": False, "dtype": "bf16"}),
    "one-sgd": ("qwen3", 1, {}, {"distributed": False, "dtype": "bf16", "name": "sgd"}),
    "distopt-fp32": ("qwen3-tied", 1, {}, {}),
    "dp2-bf16": ("qwen3", 2, {}, {"dtype": "bf16"}),
    "tp2-bf16": ("qwen3-tied", 2, {"tp": 2, "sp": True}, {"dtype": "bf16"}),
    "pp2-vpp2": ("qwen3", 2, {"pp": 2, "vpp": 2}, {}),
    "ep2-bf16": ("qwen3_moe", 2, {"ep": 2}, {"dtype": "bf16"}),
}
if torch.cuda.is_available():
    LAYOUTS["one-hybrid"] = ("qwen3", 1, {}, {"dtype": "bf16", "cpu_fraction": 0.5})
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class MeanNll:
    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs.logprobs.sum() / sum(LENGTHS), {}


def make(path: Path, layout: dict[str, Any], **how: Any) -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    torch.manual_seed(0)  # rows of the padded vocabulary are not loaded
    trained = how.get("trained", True)
    keys = {key: how[key] for key in ("name", "cpu_fraction") if key in how}
    optimizer = schema.Optimizer(lr=1e-2, weight_decay=0.1, **keys)
    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(distributed_optimizer=how.get("distributed", True)),
        optimizer=optimizer if trained else None,
        dtype=how.get("dtype", "fp32"),
    )
    engine.load_hf(path)
    return engine


@cache
def work() -> Any:
    from quintet.data.batch import make_batch

    ids = [[(7 * i + 13 * t) % 61 for t in range(n)] for i, n in enumerate(LENGTHS)]
    return make_batch(ids, [3] * len(LENGTHS))


def step(engine: Any) -> tuple[float, float]:
    """One training step on the same samples on every dp rank: loss and gradient norm."""
    half = len(LENGTHS) // 2
    cells = [RankCell(list(range(half))), RankCell(list(range(half, len(LENGTHS))))]
    result = engine.forward_backward(work(), cells, MeanNll())
    return result.loss if result else 0.0, engine.optimizer_step()["grad_norm"]


def copies(engine: Any) -> dict[str, list[Tensor]]:
    return {kind: [t.detach().clone() for t in found] for kind, found in tensors(engine).items()}


def same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]], *kinds: str) -> bool:
    return all(torch.equal(x, y) for kind in kinds for x, y in zip(a[kind], b[kind], strict=True))


def train_with_and_without(path: Path, layout: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """On one rank: three steps plainly, and three steps with an offload after each, by a different share."""
    plain = make(path, layout, **how)
    figures = [step(plain) for _ in range(3)]
    engine = make(path, layout, **how)
    again, bytes_ = [], []
    for share in (1.0, 0.5, 0.0):
        again.append(step(engine))
        before = held(engine)
        left = engine.offload(params=share, grads=share, optimizer=share)
        after = held(engine)  # gradients leave without a copy
        assert left == sum(before[kind] - after[kind] for kind in ("params", "optimizer"))
        assert engine.offload(params=share, grads=share, optimizer=share) == 0
        bytes_.append((share, before, after))
        assert (engine.reload(), engine.reload()) == (left, 0)
        assert held(engine) == before
    # Kernels on GPUs add in no fixed order.
    exact = same(copies(plain), copies(engine), "params", "optimizer")
    return {"figures": (figures, again), "tensors": exact or torch.cuda.is_available(), "bytes": bytes_}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_as_if_nothing_had_happened(pool, tmp_path, layout):
    family, world, sizes, how = LAYOUTS[layout]
    a_gpu_each(world)
    path = (moe_models.save if "moe" in family else save)(family, tmp_path / "model")
    exact = 1e-3 if torch.cuda.is_available() else 0.0
    for result in pool.run(train_with_and_without, world, path, sizes, how):
        for plain, offloaded in zip(*result["figures"], strict=True):
            assert offloaded == pytest.approx(plain, rel=exact, abs=0)
        assert result["tensors"]
        for share, before, after in result["bytes"]:
            for kind, size in before.items():
                assert size > 0
                assert int((1 - share) * size) - CUT <= after[kind] <= (1 - share) * size + 1


class Late:
    """Copies that are made at the last moment: when somebody waits for them."""

    made: ClassVar[list[Late]] = []

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._pairs = list(pairs)
        self.nbytes = sum(target.nbytes for target, _ in self._pairs)
        self.made.append(self)

    def before_what_follows(self) -> None:
        while self._pairs:
            target, source = self._pairs.pop()
            target.copy_(source)

    def wait(self) -> float:
        self.before_what_follows()
        return 1.0


def train_while_it_comes(path: Path, layout: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """As `train_with_and_without`; what is away comes beside what follows, which waits for what it uses, and for that alone."""
    from quintet.engine import offload

    plain = make(path, layout, **how)
    figures = [step(plain) for _ in range(4)]
    engine = make(path, layout, **how)
    cells = [RankCell(list(range(len(LENGTHS))))]
    again, coming, moved = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "CopyAside", Late)
        for saves in (False, False, True):
            again.append(step(engine))
            left = engine.offload(params=1.0, grads=1.0, optimizer=1.0)
            Late.made.clear()
            parameters = engine.reload("params", "grads")
            moved.append((parameters + engine.begin_reload(), left))
            optimizer = Late.made[-1]
            engine.forward(work(), cells)
            engine.forward_backward(work(), cells, MeanNll())
            coming.append(bool(optimizer._pairs))
            if saves:
                engine.master_fingerprint()
                coming.append(not optimizer._pairs)
                assert engine.came("optimizer") == (optimizer.nbytes, 1.0)
                assert engine.came("optimizer") == (0, 0.0)
            elif len(again) == 1:  # it leaves before it is there
                engine.offload(optimizer=1.0)
                engine.begin_reload()
        again.append(step(engine))
    return {
        "figures": (figures, again),
        "tensors": same(copies(plain), copies(engine), "params", "optimizer"),
        "coming": coming,
        "moved": moved,
    }


@pytest.mark.parametrize("layout", ["one-bf16", "dp2-bf16", "pp2-vpp2"])
def test_what_comes_beside_something_else_is_waited_for_by_who_uses_it(pool, tmp_path, layout):
    family, world, sizes, how = LAYOUTS[layout]
    if torch.cuda.is_available():
        pytest.skip("the copies are held back on the host")
    for result in pool.run(train_while_it_comes, world, save(family, tmp_path / "model"), sizes, how):
        assert result["figures"][0] == result["figures"][1]
        assert result["tensors"]
        assert result["coming"] == [True] * 4
        for came, left in result["moved"]:
            assert came == left


def any_shares(path: Path, dtype: str) -> None:
    engine = make(path, {}, dtype=dtype)
    step(engine)
    before, wanted = held(engine), copies(engine)
    share = st.one_of(st.sampled_from([0.0, 1.0, 1e-9]), st.floats(0, 1))

    @settings(max_examples=30, deadline=None, database=None)
    @given(st.fixed_dictionaries(dict.fromkeys(before, share)))
    def check(shares: dict[str, float]) -> None:
        engine.offload(**shares)
        for kind, size in held(engine).items():
            gone = before[kind] - size
            assert int(shares[kind] * before[kind]) <= gone < shares[kind] * before[kind] + CUT
        engine.reload()
        assert held(engine) == before
        assert same(wanted, copies(engine), "params", "optimizer")
        gone = int(shares["grads"] * before["grads"]) > 0
        assert not gone or all(not t.any() for t in tensors(engine)["grads"])

    check()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_share_goes_and_comes_back(pool, tmp_path, dtype):
    pool.run(any_shares, 1, save("qwen3", tmp_path / "model"), dtype)


def misuse(path: Path) -> dict[str, str]:
    engine = make(path, {})
    micro = [RankCell(list(range(len(LENGTHS))))]
    calls: dict[str, tuple[dict[str, float], Any]] = {
        "forward": ({"params": 1.0}, lambda: engine.forward(work(), micro)),
        "module": ({"params": 0.1}, lambda: engine.model(torch.zeros(1, 4, dtype=torch.int64), None)),
        "shard_map": ({"params": 0.5}, engine.shard_map),
        "gradients": ({"grads": 1.0}, lambda: engine.shard_map("main_grad")),
        "forward_backward": ({"grads": 1.0}, lambda: step(engine)),
        "optimizer_step": ({"optimizer": 1.0}, engine.optimizer_step),
        "optimizer_step without gradients": ({"grads": 1.0}, engine.optimizer_step),
    }
    step(engine)
    found = {}
    for name, (shares, call) in calls.items():
        engine.offload(**shares)
        try:
            call()
        except RuntimeError as error:
            found[name] = str(error)
        engine.reload()
        step(engine)
    return found


def test_use_of_what_is_away_is_an_error(pool, tmp_path):
    (found,) = pool.run(misuse, 1, save("qwen3", tmp_path / "model"))
    assert len(found) == 7
    for name, message in found.items():
        assert "call reload()" in message, name
    assert "parameters are offloaded" in found["forward"]
    assert "gradients are offloaded" in found["forward_backward"]
    assert "optimizer state are offloaded" in found["optimizer_step"]


def out_of_memory_on_the_way(path: Path) -> bool:
    engine = make(path, {}, dtype="bf16")
    first = step(engine)
    again = make(path, {}, dtype="bf16")
    assert step(again) == first
    left = again.offload(params=1.0, grads=1.0, optimizer=1.0)
    last, resize = again._offloader._away["optimizer"][-1], torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata == last.storage._cdata:
            raise torch.OutOfMemoryError
        resize(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", full), pytest.raises(torch.OutOfMemoryError):
        again.reload()
    again.reload()
    return left > 0 and step(again) == step(engine)


def test_what_found_no_memory_comes_when_there_is_some(pool, tmp_path):
    assert pool.run(out_of_memory_on_the_way, 1, save("qwen3", tmp_path / "model")) == [True]


def restarted(path: Path) -> bool:
    engine = make(path, {})
    first = step(engine)
    engine.offload(params=1.0, grads=1.0, optimizer=1.0)
    engine.start_optimizer(engine._optimizer_recipe, 1)
    engine.load_hf(path)
    return step(engine) == first


def test_a_new_optimizer_brings_everything_back(pool, tmp_path):
    assert pool.run(restarted, 1, save("qwen3", tmp_path / "model")) == [True]


def reference_policy(path: Path) -> dict[str, Any]:
    engine = make(path, {}, trained=False)
    micro = [RankCell(list(range(len(LENGTHS))))]
    before, first = held(engine), engine.forward(work(), micro)
    engine.offload(params=1.0, grads=1.0, optimizer=1.0)
    away = held(engine)
    engine.reload()
    again = engine.forward(work(), micro)
    return {"before": before, "away": away, "same": torch.equal(first.logprobs, again.logprobs)}


def test_a_model_without_optimizer(pool, tmp_path):
    (result,) = pool.run(reference_policy, 1, save("qwen3", tmp_path / "model"))
    assert result["before"]["params"] > 0
    assert result["before"]["grads"] == result["before"]["optimizer"] == 0
    assert result["away"]["params"] == 0
    assert result["same"]


def on_device(path: Path) -> dict[str, Any]:
    engine = make(path, {}, dtype="bf16")
    step(engine)
    total = sum(held(engine).values())
    hosts, drops, peaks = [], [], []
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.offload(params=1.0, grads=1.0, optimizer=1.0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        drops.append(before - torch.cuda.memory_allocated())
        chunks = [c for host in engine._offloader._host.values() for c in host.chunks]
        hosts.append([(c.data_ptr(), c.is_pinned()) for c in chunks])
        engine.reload()
        step(engine)
    return {"total": total, "drops": drops, "peaks": peaks, "hosts": hosts}


@on_gpu
def test_device_memory_is_free_and_host_memory_is_used_again(pool, tmp_path):
    (result,) = pool.run(on_device, 1, save("qwen3", tmp_path / "model"))
    for drop, peak in zip(result["drops"], result["peaks"], strict=True):
        assert drop >= 0.99 * result["total"]
        assert peak <= 1 << 20  # nothing of size is allocated on the way
    first, second = result["hosts"]
    assert first == second
    assert first
    assert all(pinned for _, pinned in first)


@on_gpu
def test_copies_and_kernels_run_at_once():
    from quintet.engine.device import CopyAside

    host = torch.full((1 << 31,), 3, dtype=torch.uint8, pin_memory=True)  # some 40 ms of a link
    here, a = torch.zeros_like(host, device="cuda"), torch.randn(4096, 4096, device="cuda")
    a @ a  # loads the kernel
    copying, computed = CopyAside([(here, host)]), torch.cuda.Event()
    a @ a
    computed.record()
    computed.synchronize()
    assert not copying._done.query()
    copying.before_what_follows()
    assert int(here[-1]) == 3
    assert 0.01 < copying.wait() < 1


def unused_gradients(path: Path) -> list[int]:
    from transformer_engine.pytorch.module import base

    engine = make(path, {}, dtype="bf16")
    step(engine)
    kept = [len(base._dummy_wgrads)]
    engine.offload(params=1.0, grads=1.0, optimizer=1.0)
    return [*kept, len(base._dummy_wgrads)]


@on_gpu
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="they are TransformerEngine's")
def test_gradients_that_nobody_reads_hold_no_memory_of_activations(pool, tmp_path):
    ((kept, after),) = pool.run(unused_gradients, 1, save("qwen3", tmp_path / "model"))
    assert kept > 0
    assert after == 0
