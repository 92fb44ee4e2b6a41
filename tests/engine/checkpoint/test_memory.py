"""Host memory: loading takes what the rank holds and one chunk, saving what the rank writes, once and for all saves."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.engine.checkpoint.loader import READERS, Load
from quintet.engine.checkpoint.parts import PIECE_BYTES
from quintet.engine.checkpoint.saver import WRITERS, _Staging
from quintet.engine.checkpoint.slots import Slot
from quintet.models import ModelShape
from quintet.plan.memory import rank_memory
from quintet.plan.phases import READ_AT_ONCE, WRITTEN_AT_ONCE
from quintet.plan.setup import Setup
from quintet.recipe import schema
from tests.engine.checkpoint.ranks import bare_engine, held, release, step
from tests.oracle.cases import Case
from tests.oracle.models import save
from tests.patience import held_bytes, status_bytes

MIB = 1 << 20


def peak_of(call: Any) -> float:
    """MiB of resident memory that a call takes beyond what there was before. Not counted are pages of programs that a kernel took before,
    as nobody used them, and that the call brings again."""
    before = held_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    files = status_bytes("RssFile")
    call()
    return (status_bytes("VmHWM") - before - max(files, status_bytes("RssFile"))) / MIB


SHAPE = ModelShape(
    family="qwen2",
    layers=4,
    hidden_size=512,
    ffn_hidden_size=2048,
    heads=8,
    kv_heads=8,
    head_dim=64,
    vocab_size=64000,
    max_positions=64,
    tied_embeddings=True,
    norm_eps=1e-6,
    qkv_bias=True,
)


def measured(where: Path) -> dict[str, float]:
    """On one rank, a model of 50 M weights: MiB at the peak of saves and a load, of the state, and seconds."""
    from quintet.engine.engine import Engine

    torch.manual_seed(0)
    engine = Engine(
        SHAPE, schema.Layout(), engine=schema.Engine(), optimizer=schema.Optimizer(), dtype="fp32"
    )
    engine.start_optimizer(schema.Optimizer(), 10)
    for chunk in engine.chunks:
        for p in chunk.parameters():
            p.main_grad.normal_()
    engine.optimizer_step()
    found = {"state": sum(t.nbytes for _, _, t in held(engine)) / MIB}
    found["first save"] = peak_of(lambda: engine.save(where / "1"))
    start = time.perf_counter()
    engine.save(where / "2", wait=False)
    found["blocked_s"] = time.perf_counter() - start
    engine.save_finished(wait=True)
    found["saved_s"] = time.perf_counter() - start
    found["third save"] = peak_of(lambda: engine.save(where / "3"))
    found["in place"] = peak_of(lambda: engine.save(where / "4", aside=False))
    found["load"] = peak_of(lambda: engine.load(where / "3"))
    release(engine)
    return found


def begun(where: Path) -> list[tuple[int, int]]:
    """On one rank, of a load by a new engine: bytes of moments made so far, and of what was read and is still there, as each slot's begin."""
    from quintet.engine.checkpoint import checkpoints

    engine = bare_engine(Case("qwen2"), where / "model")
    engine.load_hf(where / "model")
    step(engine, Case("qwen2"))
    engine.save(where / "saved")
    release(engine)
    found, made, commit, begin = [], 0, Load.commit, Slot.begin
    other = bare_engine(Case("qwen2"), where / "model")

    def told(load: Load, *args: Any) -> None:
        def counted(slot: Slot, *how: Any) -> None:
            nonlocal made
            begin(slot, *how)
            made += sum(
                moment.nbytes
                for moment in slot.tensors(checkpoints.moment_names(schema.Optimizer())).values()
            )
            found.append((made, sum(one.read.nbytes for one in load._wanted if one.read is not None)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slot, "begin", counted)
            commit(load, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Load, "commit", told)
        other.load(where / "saved")
    release(other)
    return found


def test_moments_take_the_place_of_what_was_read(pool, tmp_path):
    save("qwen2", tmp_path / "model")
    (found,) = pool.run(begun, 1, tmp_path)
    at_first = found[0][1]
    largest = max(after - before for (before, _), (after, _) in pairwise([(0, 0), *found]))
    assert len(found) > 8
    assert max(made + read for made, read in found) <= at_first + largest < found[-1][0] + at_first


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="reads Linux's count of host memory"
)
def test_host_memory(pool, tmp_path):
    (found,) = pool.run(measured, 1, tmp_path, timeout_s=600)
    print(found)
    plan = rank_memory(Setup(SHAPE, schema.Layout(), 1, dtype="fp32", device="cpu"))
    saved, read = plan.saved / MIB, plan.read / MIB
    assert saved == read == pytest.approx(found["state"])
    assert saved - 32 < found["first save"] < saved + 128 + 32  # its last buffer need not be full
    assert found["third save"] < 32
    assert found["in place"] < WRITTEN_AT_ONCE / MIB + 32
    assert read - 32 < found["load"] < read + READ_AT_ONCE / MIB + 32


def test_what_is_read_at_once_is_planned():
    """The bytes of a piece as they were read, and the tensor made of them, of each reader."""
    assert READ_AT_ONCE == 2 * READERS * PIECE_BYTES
    assert WRITTEN_AT_ONCE == WRITERS * PIECE_BYTES


@pytest.mark.parametrize("mib", [1, 28, 56, 64])
def test_buffers_are_filled(mib):
    """56: an expert's matrix of DeepSeek-V3 in fp32, of which two leave 16 MiB of 128."""
    staging, tensors = _Staging(), [torch.empty(mib * MIB, dtype=torch.uint8, device="meta")] * 43
    copies = staging._room(tensors)
    assert sum(map(len, staging._buffers)) < 1.06 * 43 * mib * MIB + 128 * MIB
    assert [staging._room(tensors)[n].data_ptr() for n in (0, 42)] == [copies[n].data_ptr() for n in (0, 42)]
    assert all(len(one) & (len(one) - 1) == 0 for one in staging._buffers)
