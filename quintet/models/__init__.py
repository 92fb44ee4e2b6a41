"""Model families, torch-free: shapes, Hugging Face config <-> megatron-core config, and the weight naming tables."""

from quintet.models.family import Family, family_named, family_of, read_shape, register
from quintet.models.hf_config import read_end_ids
from quintet.models.shape import MlaShape, ModelShape, MoeShape
from quintet.models.weight import Weight
from quintet.models.weights_on_disk import check_weights, held_shape

__all__ = [
    "Family",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "Weight",
    "check_weights",
    "family_named",
    "family_of",
    "held_shape",
    "read_end_ids",
    "read_shape",
    "register",
]
