"""Errors that say that there is no memory left, from whichever library, and what holds a device's memory then."""

from __future__ import annotations

import re
import sys

from quintet.plan.out_of_memory import Held

_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
"""What torch, NCCL, cuBLAS and the system say. NCCL's wording reads like the end of a connection otherwise."""
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMG]iB|\d+ bytes)")


def says_no_memory(error: BaseException) -> str | None:
    """Return what was asked for in vain, or the line that says so; None for an error of another kind."""
    text = str(error)
    if not isinstance(error, MemoryError) and not _NO_MEMORY.search(text):
        return None
    if asked := _ASKED.search(text):
        return f"{asked[1]} more were asked for"
    line = next((one for one in text.splitlines() if _NO_MEMORY.search(one)), "")
    return line.strip()[:200] or type(error).__name__


def device_held(device: str) -> Held | None:
    """Return what holds the memory of a CUDA device; None for a CPU, and where a device has no room for CUDA itself."""
    torch = sys.modules.get("torch")
    if device == "cpu" or torch is None:
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Held(total, tensors, reserved - tensors, total - free - reserved)
