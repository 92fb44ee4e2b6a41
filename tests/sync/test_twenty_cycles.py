"""Twenty syncs leave memory, files and threads of both sides as two did. On a GPU machine the device's memory too, which nothing
else may use meanwhile (a rollout of its own device needs a second GPU there)."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from quintet.engine.weights.shards import Shard
from quintet.rollout.base import Wanted
from quintet.sync import source
from quintet.sync.server import ReceiverSpec, WeightServer
from quintet.sync.shared_memory import SharedBuffer
from tests.patience import held_bytes
from tests.sync.one_rank import server_of
from tests.sync.receivers import LoraSlots, get, put

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]
CYCLES = 20
BUCKET_MIB = 2
BUCKET = BUCKET_MIB << 20
SHAPE = (1024, 1024)  # of 4 MiB each: every tensor is cut in two
COUNT = 4
KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate")]

Measured = dict[str, int]


def measure() -> Measured:
    """What this process holds now; bytes and counts."""
    gc.collect()
    found = {
        "host bytes": held_bytes(),
        "files": psutil.Process().num_fds(),
        "threads": threading.active_count(),
        "mapped": sum("memfd:quintet" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["device bytes"] = total - free
        found["allocated bytes"], found["reserved bytes"] = (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
        )
    return found


def check(cycles: list[Measured]) -> None:
    """After cycle 20 there is what was after cycle 2: of a device's memory within a bucket, of the host's within a quarter of
    what a bucket that leaks each cycle would come to."""
    leak = (len(cycles) - 2) * BUCKET
    second, last = cycles[1], cycles[-1]
    for name, before in second.items():
        more = last[name] - before
        allowed = leak // 4 if name == "host bytes" else BUCKET if "bytes" in name else 0
        assert more <= allowed, f"{name}: {before} after cycle 2, {last[name]} after cycle {len(cycles)}"


def take(root: Path, gpu: int | None, leaks: bool) -> None:
    """The receiver's side: every cycle into the same memory, as a rollout does."""
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    held = {str(n): torch.empty(SHAPE, device=device) for n in range(COUNT)}
    cycles: list[Measured] = []
    kept = []
    for number in range(CYCLES + 1):
        ticket = get(root / f"ticket-{number}-r")
        if number:
            cycles.append(measure())  # the other side rests
        if number == CYCLES:
            put(root / "cycles", cycles)
            return
        for batch in source.ChannelSource([ticket]).batches(0):
            for piece in batch:
                held[piece.name][tuple(slice(*ends) for ends in piece.box)] = piece.tensor
            if leaks:
                kept.append(batch[0].tensor.clone())
                leaks = False
        leaks = bool(kept)
        put(root / f"took-{number}-r", [float(one.mean()) for one in held.values()])


def run(beside: LoraSlots, colocated: bool, leaks: bool = False) -> tuple[list[Measured], list[Measured]]:
    """Twenty cycles with weights that change; what the trainer's and the receiver's process measured."""
    gpus = torch.cuda.device_count()
    on_gpu = gpus > 0 and (colocated or gpus > 1)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    box = tuple((0, n) for n in SHAPE)
    held = [Shard(str(n), SHAPE, box, torch.full(SHAPE, float(n), device=device)) for n in range(COUNT)]
    server: WeightServer = server_of(held, BUCKET_MIB, timeout_s=60.0, device=device)
    beside.run(take, beside.root, (0 if colocated else 1) if on_gpu else None, leaks)
    wanted = [Wanted(one.name, one.box) for one in held]
    tickets = server.plan([ReceiverSpec("r", wanted, colocated)])
    cycles = []
    for number in range(CYCLES):
        beside.hand(number, tickets)
        assert server.serve().lost == {}
        assert beside.took(number, "r") == [float(n + number) for n in range(COUNT)]
        for shard in held:
            shard.view.add_(1)
        cycles.append(measure())
    beside.hand(CYCLES, tickets)
    found = get(beside.root / "cycles")
    server.close()
    return cycles, found


@pytest.mark.parametrize("colocated", KINDS)
def test_twenty_cycles_leave_both_sides_as_they_were(beside: LoraSlots, colocated):
    for cycles in run(beside, colocated):
        assert len(cycles) == CYCLES
        check(cycles)


@pytest.mark.parametrize("colocated", KINDS)
def test_a_bucket_that_leaks_each_cycle_is_seen(
    beside: LoraSlots, colocated, monkeypatch: pytest.MonkeyPatch
):
    """The test before this one can fail, on either side."""
    kept: list[Any] = []
    close = SharedBuffer.close

    def forget(shared: SharedBuffer) -> None:
        kept.append(shared.bytes)  # and with it its memory
        close(shared)

    monkeypatch.setattr(SharedBuffer, "close", forget)
    for cycles in run(beside, colocated, leaks=True):
        with pytest.raises(AssertionError, match=r"host bytes|mapped|device bytes"):
            check(cycles)
