"""Matrices multiplied in 8 bits by TransformerEngine's layers (recipe key engine.fp8): what megatron-core is told, what is computed
again in backward, and the copies of weights that are there meanwhile.

Core enters TransformerEngine's FP8 context around each layer of the decoder. A layer multiplies by a copy of its weight in 8 bits,
which it makes where there is none, in the first micro-batch of a run, and keeps. A copy that outlived its run would be another
weight's after a step, a load, or a sync, and memory that no offload knows of: none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from quintet.engine.weights import fp8 as blocks
from quintet.errors import UserError

FORMATS = {"tensorwise": "hybrid", "blockwise": "e4m3"}
"""Recipe → format: hybrid has gradients in e5m2, which reaches further than e4m3; blocks are small enough to do without."""


def fields(fp8: str | None) -> dict[str, Any]:
    """Return the fields of TransformerConfig for a value of engine.fp8."""
    return {} if fp8 is None else {"fp8": FORMATS[fp8], "fp8_recipe": fp8}


def require(fp8: str, backend: str) -> None:
    """Raise UserError unless this rank's layers and device compute in FP8 as the recipe says. backend: of layers, as chosen.

    Without TransformerEngine megatron-core would train in bf16, and say nothing.
    """
    if backend != "transformer_engine":
        raise UserError(
            f"engine.fp8={fp8}: the layers are {backend} here, and TransformerEngine's alone multiply in 8 bits; install "
            "transformer-engine[pytorch] on machines with NVIDIA GPUs, or set engine.fp8=null"
        )
    from megatron.core.utils import is_te_min_version
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as State

    if not is_te_min_version("2.6.0"):
        raise UserError(
            f"engine.fp8={fp8} needs TransformerEngine 2.6 or later; upgrade it, or set engine.fp8=null"
        )
    can, why = State.is_fp8_block_scaling_available() if fp8 == "blockwise" else State.is_fp8_available()
    if not can:
        raise UserError(f"engine.fp8={fp8}: this GPU cannot: {why} Set engine.fp8=null")
    if fp8 == "blockwise" and not Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale:
        raise UserError(
            "engine.fp8=blockwise: NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 has TransformerEngine scale blocks by other numbers than powers of "
            "two, which rollouts are not sent; unset it"
        )


def checkpoint(function: Callable[..., Any], config: Any, group: Any, *tensors: Tensor) -> Any:
    """Return what a function makes of tensors, computed again in backward: in FP8 both times or neither.

    Backward runs outside the context of the forward pass, and core's own function would compute other numbers there. group: of tp.
    """
    if not config.fp8:
        return tensor_parallel.checkpoint(function, False, *tensors)
    from megatron.core.extensions.transformer_engine import te_checkpoint

    return te_checkpoint(function, False, tensor_parallel.random.get_cuda_rng_tracker, group, *tensors)


def drop_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Forget the copies of weights in 8 bits that TransformerEngine's layers have made."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


@torch.no_grad()
def other_blocks(chunks: Iterable[Any]) -> list[str]:
    """Return names of the decoder's weights that TransformerEngine has in other bytes or scales than `quintet.engine.weights.fp8`,
    by which rollouts are sent theirs; no more than three. No collective."""
    found: list[str] = []
    for chunk in chunks:
        for path, module in chunk.decoder.named_modules():
            if not hasattr(module, "_fp8_workspaces"):
                continue
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith("weight") and weight.dim() == 2 and not _same_blocks(weight.detach()):
                    found.append(f"decoder.{path}.{name}")
                    if len(found) == 3:
                        return found
    return found


def _same_blocks(weight: Tensor) -> bool:
    theirs, their_scales = transformer_engine_blocks(weight)
    down, across = blocks.scales_shape(tuple(weight.shape))
    ours = torch.empty_like(weight, dtype=blocks.DTYPE)
    scales = torch.empty(down, across, device=weight.device)
    blocks.quantize(weight, ours, scales)
    # Theirs has rows of scales that are multiples of four, for cuBLAS.
    same = torch.equal(their_scales[:down, :across], scales)
    return same and torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))


def transformer_engine_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what TransformerEngine's blockwise recipe makes of a weight [rows, columns]: bytes of the same shape, and scales."""
    import transformer_engine_torch
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch import Float8BlockQuantizer

    rule = Float8BlockScaling().fp8_quant_fwd_weight
    quantizer = Float8BlockQuantizer(
        transformer_engine_torch.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=rule.amax_epsilon,
        force_pow_2_scales=rule.power_2_scale,
        block_scaling_dim=2,
    )
    made = quantizer.quantize(weight)
    return made._rowwise_data, made._rowwise_scale_inv
