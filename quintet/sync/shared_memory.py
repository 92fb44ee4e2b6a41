"""Memory that two processes of a node both see: of a GPU by CUDA's IPC handles, of the host by a file without a name (Linux).

The GPU's comes from the driver and not from torch's allocator, so that it is freed when it is closed, whether or not the
other side still lives, and whatever kind of segments the allocator uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes; what is shared of a GPU is whole pages of it, on which nothing else should be."""


class SharedBuffer:
    """A buffer of `nbytes` of the device's memory; `bytes` is the tensor of them, and by `handle` another process maps it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._on_gpu = nbytes, device.type == "cuda"
        if self._on_gpu:
            self._address = _allocate(nbytes)
            # Now: what cannot be shared is found before anyone waits for it.
            self.handle = _handle(self._address)
            self.bytes = _tensor_at(self._address, nbytes, device)
        else:
            self._file = os.memfd_create("quintet-sync")
            os.ftruncate(self._file, nbytes)
            self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode()
            self.bytes = _mapped(self._file, nbytes)

    def close(self) -> None:
        """Give the memory back. Host memory stays until nobody has a view of it; a GPU's must have no reader any more."""
        del self.bytes
        if self._on_gpu:
            _check(_driver().cuMemFree_v2(ctypes.c_uint64(self._address)), "free memory")
        else:
            os.close(self._file)


class MappedBuffer:
    """A buffer that another process sent the handle of. Good until `close`."""

    def __init__(self, handle: bytes, nbytes: int, device: torch.device) -> None:
        self._address: int | None = None
        if device.type == "cuda":
            self._address = _open(handle)
            self.bytes = _tensor_at(self._address, nbytes, device)
        else:
            file = os.open(handle, os.O_RDWR)
            self.bytes = _mapped(file, nbytes)
            os.close(file)

    def close(self) -> None:
        """Let go of the buffer: whoever has a view of a GPU's memory must not use it any more."""
        del self.bytes
        if self._address is not None:
            _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(self._address)), "unmap memory")


# the host's


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


# a GPU's


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Bytes:
    """Tells torch where bytes are (the CUDA array interface)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"the GPU could not {what}: {(text.value or b'unknown error').decode()}")


def _allocate(nbytes: int) -> int:
    nbytes = -(-nbytes // PAGE) * PAGE
    torch.cuda.current_stream().synchronize()  # makes the context this thread's
    found = ctypes.c_uint64()
    result = _driver().cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(nbytes))
    if result == 2:  # out of memory: what torch keeps for later may be enough
        torch.cuda.empty_cache()
        result = _driver().cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(nbytes))
    _check(result, f"give {nbytes >> 20} MiB for a bucket of weights")
    return found.value


def _handle(address: int) -> bytes:
    found = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(found), ctypes.c_uint64(address)), "share memory")
    return ctypes.string_at(ctypes.byref(found), ctypes.sizeof(found))


def _open(handle: bytes) -> int:
    torch.cuda.current_stream().synchronize()
    found = ctypes.c_uint64()
    lazily = 1  # with peer access, where the memory is another GPU's
    opened = _driver().cuIpcOpenMemHandle_v2(
        ctypes.byref(found), _Handle.from_buffer_copy(handle), ctypes.c_uint(lazily)
    )
    _check(opened, "map the trainer's memory; both processes must see the same GPU")
    return found.value


def _tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    found = torch.as_tensor(_Bytes(address, nbytes), device=device)
    if found.data_ptr() != address:  # torch has copied it from another GPU
        raise RuntimeError(
            "the trainer's memory is on another GPU: a colocated receiver must be on the same one"
        )
    return found
