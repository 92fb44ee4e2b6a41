"""What GPUs need to be kept busy (copies that do not wait, and whether fused kernels can run), and bytes of memory."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_fused(x: Tensor) -> bool:
    """Return whether quintet's Triton kernels serve for a tensor. Each has a plain path beside it that computes the same."""
    return x.is_cuda and _HAS_TRITON


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device, without waiting for what the device has yet to do.

    A copy from pageable memory holds the host until all queued work is done; the GPU then idles until the host has
    queued more. torch keeps the pinned copy until it has been read.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to the CPU; what is returned waits for it and gives it, while the device goes on with what was queued in between."""
    copy = values.to("cpu", non_blocking=True)
    if not values.is_cuda:
        return lambda: copy
    done = torch.cuda.current_stream().record_event()

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait


def free_cached() -> None:
    """Give the device back what torch keeps of it for tensors to come.

    TransformerEngine 2.11 keeps an empty gradient of each shape of weight where activations were, a tenth of a GiB that held 4.7 (1.5B,
    rows of 16,384 tokens): they go first, and it makes new ones.
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()
    torch.cuda.empty_cache()


class CopyAside:
    """Copies (to, from) pairs between device and host, on a stream of their own, once what is queued is done; the device goes on meanwhile
    with what is queued after."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._began, self._done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.nbytes = 0
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._began.record()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                self.nbytes += target.nbytes
            self._done.record()

    def before_what_follows(self) -> None:
        """Have what is queued from now on wait until all is there."""
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> float:
        """Wait until all is there, and return the seconds that it took."""
        self._done.synchronize()
        return self._began.elapsed_time(self._done) / 1e3


def memory(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, for as long as the tensor lives.

    `x.numpy()` would end what offloading does to a parameter: torch never resizes a storage that numpy has seen.
    """
    assert x.device.type == "cpu"
    assert x.is_contiguous()
    return memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())).cast("B")
