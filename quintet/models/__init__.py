"""Model families, torch-free: shapes, Hugging Face config <-> megatron-core config, and the weight naming tables."""

from quintet.models.family import Family, ModelShape, Weight, family_named, family_of, read_shape

__all__ = ["Family", "ModelShape", "Weight", "family_named", "family_of", "read_shape"]
