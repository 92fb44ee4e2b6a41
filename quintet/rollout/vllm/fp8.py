"""vLLM with matrices in 8 bits and a scale for each block of 128 × 128, the format that `sync` sends."""

from __future__ import annotations

from typing import Any

from quintet.engine.weights.fp8 import quantized_names
from quintet.models import ModelShape, table_of


def fp8_config(shape: ModelShape) -> dict[str, Any]:
    """Return the quantization_config with which vLLM makes FP8 layers.

    Not quantised are embedding, head and routers, as in the FP8 models on the hub.
    """
    weights = table_of(shape)
    quantized = quantized_names(shape)
    others = {
        name.removesuffix(".weight")
        for weight in weights
        for name, size in zip(weight.hf, weight.shapes, strict=True)
        if len(size) == 2 and name not in quantized
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(others),
    }
