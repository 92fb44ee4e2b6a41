"""Process groups of NCCL between processes of their own: what gloo's tests show of the others (test_deaths.py) on two GPUs."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quintet.cluster.environment import LOOPBACK, listen
from quintet.sync.group import TransferGroup
from quintet.sync.senders import Store
from quintet.sync.wire import Group

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(240),
]
NUMBERS, TIMEOUT_S, HEARTBEAT_S = 1 << 28, 5.0, 10
"""A GiB: of less all may lie in NCCL's buffers, and the sender be done."""


def _default_group(rank: int) -> None:
    """NCCL's, of this process alone, whose monitor ends the process where torch's watchdog has heard of an error anywhere in it."""
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT_S)
    torch.cuda.set_device(rank)
    listener = listen(LOOPBACK)
    at: dict[str, Any] = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
    store = dist.TCPStore(LOOPBACK, is_master=True, **at)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))


def _receive(port: int, told: Any, silent: bool) -> None:
    _default_group(1)
    group = TransferGroup(Group("test", LOOPBACK, port, 1, 2, "nccl"), 60.0, lambda: True)
    got = torch.empty(NUMBERS, device="cuda")
    group.wait(group.broadcast(got), lambda: True)
    told.send(got.double().sum().item())
    if silent:
        time.sleep(600)
    group.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Any:
    """A sender's group in this process, which has sent once, and the process of its receiver."""
    spawn, store = get_context("spawn"), Store(LOOPBACK, 60.0)
    if not dist.is_initialized():
        _default_group(0)
    ours, theirs = spawn.Pipe()
    receiver = spawn.Process(target=_receive, args=(store.port, theirs, request.param))
    receiver.start()
    group = TransferGroup(Group("test", LOOPBACK, store.port, 0, 2, "nccl"), 60.0, receiver.is_alive)
    numbers = torch.arange(NUMBERS, dtype=torch.float32, device="cuda") % 7
    group.wait(group.broadcast(numbers), receiver.is_alive)
    assert ours.recv() == numbers.double().sum().item()
    yield group, receiver, numbers
    receiver.kill()
    receiver.join()


@pytest.mark.parametrize("pair", [False], indirect=True)
def test_what_is_sent_arrives(pair: Any) -> None:
    group, receiver, _ = pair
    receiver.join(60)
    assert receiver.exitcode == 0
    group.close()


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_a_receiver_that_is_silent_is_left_and_the_sender_lives_on(pair: Any) -> None:
    group, receiver, numbers = pair
    group.timeout_s = TIMEOUT_S
    with pytest.raises(RuntimeError, match="nothing moved for 5 s"):
        group.wait(group.broadcast(numbers), receiver.is_alive)
    group.close()
    time.sleep(3 * HEARTBEAT_S)
    assert (numbers + 1).max().item() == 7


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_a_receiver_that_dies_is_left_and_the_sender_lives_on(pair: Any) -> None:
    group, receiver, numbers = pair
    receiver.kill()
    with pytest.raises(RuntimeError):
        group.wait(group.broadcast(numbers), receiver.is_alive)
    group.close()
    time.sleep(3 * HEARTBEAT_S)
    assert (numbers + 1).max().item() == 7
