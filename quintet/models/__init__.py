"""Model families, torch-free: shapes, Hugging Face config <-> megatron-core config, and the weight naming tables."""

from quintet.models.dense import dense_shape
from quintet.models.family import Family, family_of, read_shape, register, table_of, trained_shape
from quintet.models.hf_config import HfConfig, read_end_ids
from quintet.models.shape import MlaShape, ModelShape, MoeShape
from quintet.models.table import MtpNames, Names, decoder_weights
from quintet.models.weight import Weight
from quintet.models.weights_on_disk import check_weights, held_shape

__all__ = [
    "Family",
    "HfConfig",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "MtpNames",
    "Names",
    "Weight",
    "check_weights",
    "decoder_weights",
    "dense_shape",
    "family_of",
    "held_shape",
    "read_end_ids",
    "read_shape",
    "register",
    "table_of",
    "trained_shape",
]
