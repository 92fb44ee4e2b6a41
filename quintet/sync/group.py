"""Process groups that weights take to other devices: one sender, and the receivers of the same buckets.

They are built directly, over a store of the sender's, and leave torch's default group alone: the two sides are no ranks of
one program, and receivers come and go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from quintet.sync.wire import Group

POLL_S = 0.0002


class BulkGroup:
    """One member of a group; its sender has rank 0. Building it waits for all members.

    Raises RuntimeError, as do the methods, when another member does not come within the time limit, or goes.
    """

    def __init__(self, group: Group, timeout_s: float, store: Any = None) -> None:
        self.group, self.timeout_s = group, timeout_s
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(group.host, group.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        store = dist.PrefixStore(group.name, store)  # type: ignore[attr-defined]
        if group.backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, group.rank, group.size, timeout)
        else:
            self._group = _nccl(store, group.rank, group.size, timeout)

    def give(self, data: Tensor) -> Any:
        """Begin to send to every receiver; what comes back is to be waited for."""
        if self.group.size == 2:
            return self._group.send([data], 1, 0)
        return self._broadcast(data)

    def take(self, data: Tensor) -> Any:
        """Begin to receive what the sender gives next."""
        if self.group.size == 2:
            return self._group.recv([data], 0, 0)
        return self._broadcast(data)

    def _broadcast(self, data: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([data], options)

    def wait(self, work: Any, alive: Callable[[], bool]) -> None:
        """Until it is done. alive: asked meanwhile, whether the other side still is; NCCL would not notice."""
        if self.group.backend == "gloo":
            work.wait(timedelta(seconds=self.timeout_s))
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
        """Leave, whatever the others do."""
        self._group.abort()
        self._group = None


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Read when the group is made: 0 leaves the process alive when a collective fails. It is for the caller to go on.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
