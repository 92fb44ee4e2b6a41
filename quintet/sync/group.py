"""Process groups that weights take to other devices: one sender, and the receivers of the same buckets.

They are built directly, over a store of the sender's, and leave torch's default group alone: the two sides are no ranks of
one program, and receivers come and go.

Nothing in gloo or NCCL can be left while it waits for a member that does not come, and NCCL has no time limit of its own for
the making of a communicator. So what may wait is done in a thread, and whoever waits for that goes its way when another member
is gone. (With NCCL this was not run on GPUs.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.sync.wire import Group, address_toward

POLL_S = 0.0002
LOOK_S = 0.05
"""How often it is looked whether the others are still there."""


class TransferGroup:
    """One member of a group; its sender has rank 0. Building it waits for all members.

    alive: asked meanwhile, whether the others still are. Raises RuntimeError, as do the methods, when another member does not
    come within the time limit, or goes; and what `alive` raises.
    """

    def __init__(self, group: Group, timeout_s: float, alive: Callable[[], bool]) -> None:
        self.group, self.timeout_s = group, timeout_s
        self._group: Any = None
        gpu = torch.cuda.current_device() if group.backend == "nccl" else None
        try:
            self._group = _watched(lambda: self._made(gpu), timeout_s, alive)
        except BaseException:
            self._drop_aside()  # it may take as long as those who do not come
            raise

    def _made(self, gpu: int | None) -> Any:
        group, timeout = self.group, timedelta(seconds=self.timeout_s)
        # A connection of its own, also the sender's: one that waits for somebody keeps all others who share it waiting.
        store: Any = dist.TCPStore(group.host, group.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        store = dist.PrefixStore(group.name, store)  # type: ignore[attr-defined]
        if gpu is None:
            return _gloo(store, group, timeout)
        torch.cuda.set_device(gpu)
        self._group = _nccl(store, group.rank, group.size, timeout)
        # NCCL's members meet at what they first send, and not before.
        token = torch.zeros(1, dtype=torch.uint8, device="cuda")
        self.broadcast(token).wait()
        torch.cuda.current_stream().synchronize()
        return self._group

    def broadcast(self, data: Tensor) -> Any:
        """Begin to send to every receiver, or to receive what the sender gives next; what comes back is to be waited for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([data], options)

    def wait(self, work: Any, alive: Callable[[], bool]) -> None:
        """Wait until a transfer is done, or the others are not `alive`: what goes by way of a third member would not notice."""
        if self.group.backend == "gloo":
            _watched(lambda: work.wait(timedelta(seconds=self.timeout_s)), self.timeout_s, alive)
            return
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing moved for {self.timeout_s:g} s")
            if not alive():
                raise RuntimeError("the other side went away")
            time.sleep(POLL_S)
        work.wait()  # what the device does next comes after it

    def close(self) -> None:
        """Leave the group, whatever the others do. NCCL lets go of the memory of what is under way; with gloo that ends by
        itself, within the time limit, and holds its memory until then."""
        if self.group.backend == "gloo":
            self._drop_aside()
        else:
            group, self._group = self._group, None
            with suppress(RuntimeError):  # it takes longer than the time limit, and goes on in torch's thread
                group.abort()

    def _drop_aside(self) -> None:
        """Leave in a thread: a group of gloo, when it is dropped, waits for what is under way."""
        last, self._group = [self._group], None

        def drop() -> None:
            group = last.pop()
            if group is not None:
                group.abort()

        threading.Thread(target=drop, name="quintet-sync", daemon=True).start()


def _watched(act: Callable[[], Any], timeout_s: float, alive: Callable[[], bool]) -> Any:
    """What `act` returns or raises; it is left to itself, in its thread, when it takes too long or the others are gone."""
    found: list[tuple[Any, BaseException | None]] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append((act(), None))
        except BaseException as error:
            found.append((None, error.with_traceback(None)))
        done.set()

    threading.Thread(target=run, name="quintet-sync", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not done.wait(LOOK_S):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing moved for {timeout_s:g} s")
        if not alive():
            raise RuntimeError("the other side went away")
    value, error = found.pop()
    try:
        if error is not None:
            raise error
        return value
    finally:
        del error  # it holds this frame, which would hold it, and the data


def _gloo(store: Any, group: Group, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # It listens where its sender can reach it, and not on what the machine's name stands for.
    options._devices = [gloo.create_device(hostname=address_toward(group.host))]
    return gloo(store, group.rank, group.size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Read when the group is made: it is for the caller to go on when a collective fails. Without this torch's watchdog would look after it as
    # well, and have the monitor of the default group end the process minutes later.
    name, told = "TORCH_NCCL_BLOCKING_WAIT", os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ[name] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if told is None:
            del os.environ[name]
        else:
            os.environ[name] = told
