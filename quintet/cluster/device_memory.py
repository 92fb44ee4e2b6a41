"""What holds a device's memory."""

from __future__ import annotations

import sys

from quintet.plan.out_of_memory import Held


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
