"""Hugging Face directories to megatron-core checkpoints and back, by one process, without a GPU.

    from quintet.engine.convert import hf_to_mcore, mcore_to_hf

Both go through a model's table one parameter at a time, with memory for about two of the largest tensors to a checkpoint and three back.
"""

from quintet.engine.convert.to_hf import mcore_to_hf
from quintet.engine.convert.to_mcore import hf_to_mcore

__all__ = ["hf_to_mcore", "mcore_to_hf"]
