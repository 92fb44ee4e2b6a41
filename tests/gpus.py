"""What tests need of GPUs, where there are some."""

from __future__ import annotations

import pytest
import torch


def a_gpu_each(ranks: int) -> None:
    """Skip the test where there are GPUs and fewer than ranks, each of which has one of its own."""
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
