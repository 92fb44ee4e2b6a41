"""What vLLM's layers keep of their weights in another form than they were loaded in, and how it is read back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Of the identity that is multiplied at once."""


def sure(layer: Any) -> bool:
    """Whether a layer is known to keep its parameters as they were loaded, on GPUs."""
    return quantisation(layer) in (None, "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def quantisation(layer: Any) -> str | None:
    """What vLLM calls the way in which a layer keeps its weights."""
    method = getattr(layer, "quant_method", None)
    return None if method is None else type(method).__name__


def linear(layers: Sequence[Any], shape: tuple[int, ...]) -> Callable[[], Tensor] | None:
    """Reads the matrix [outputs, inputs] of layers whose kernels on the CPU have their own copies of one parameter, by multiplying
    with the identity: each output is a weight times one plus zeros, so it is exact but for the sign of a zero. None for
    other layers.

    Where there are several copies, or the parameter is there as well (of embeddings), one that differs from the first is read.
    """
    layers = [layer for layer in layers if _packs(layer)]
    if not layers or len(shape) != 2:
        return None

    def read() -> Tensor:
        weight = layers[0].weight.data
        matrices = [_times_identity(layer, shape) for layer in layers]
        first = weight if weight.numel() else matrices[0]
        return next((matrix for matrix in matrices if not torch.equal(matrix, first)), first)

    return read


def _packs(layer: Any) -> bool:
    linear = torch.nn.functional.linear
    return (
        vars(layer).get("cpu_linear", linear) is not linear
    )  # its own: what wraps a layer shows the layer's


def _times_identity(layer: Any, shape: tuple[int, ...]) -> Tensor:
    matrix = torch.empty(shape, dtype=layer.weight.dtype)
    for start in range(0, shape[1], ROWS):
        stop = min(start + ROWS, shape[1])
        rows = torch.zeros(stop - start, shape[1], dtype=matrix.dtype)
        rows[:, start:stop].fill_diagonal_(1)
        matrix[:, start:stop] = layer.cpu_linear(rows, layer.weight, None).T
    return matrix


def experts(layer: Any, attribute: str, shape: tuple[int, ...]) -> Callable[[], Tensor] | None:
    """Reads the experts' matrices [experts, outputs, inputs] where the CPU's kernel has them reordered (and with zeros added):
    numbers that are reordered likewise say what is where. None for layers that do not."""
    kernel: Any = getattr(
        getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None
    )
    kernel = getattr(kernel, "fused_experts", kernel)
    if getattr(kernel, "isa", None) is None or kernel._use_zentorch or len(shape) != 3:
        return None

    def read() -> Tensor:
        held = getattr(layer, attribute).data
        order = _order(held[:1], kernel.isa)
        whole = torch.empty_like(held).flatten(1)
        whole[:, order] = held.flatten(1)
        whole = whole.view(held.shape)
        count, outputs, inputs = shape
        if attribute == "w13_weight":  # gate and up are padded each
            return whole.unflatten(1, (2, -1))[:, :, : outputs // 2, :inputs].reshape(shape)
        return whole[:count, :outputs, :inputs]

    return read


def _order(one: Tensor, isa: str) -> Tensor:
    """Where each element of one packed expert [1, outputs, inputs] was before, flattened."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(one.numel(), dtype=torch.int32)
    parts = numbers.view(torch.int16).view(-1, 4 // one.itemsize) if one.itemsize == 2 else numbers[:, None]
    packed = [
        cpu_prepack_moe_weight(parts[:, i].contiguous().view(one.dtype).view(one.shape), isa)
        for i in range(parts.shape[1])
    ]
    bits = [p.flatten().view(torch.int16 if one.itemsize == 2 else torch.int32) for p in packed]
    return torch.stack(bits, 1).view(torch.int32).flatten().long()


def absorbed(model: torch.nn.Module) -> Iterator[tuple[Any, list[tuple[Tensor, Tensor]] | None]]:
    """Layers of latent attention that work with their own copies of kv_b_proj: that layer, and the copies, each with what it
    is to be: None where that takes arithmetic (quantised weights)."""
    module: Any
    for module in model.modules():
        up = getattr(module, "W_UV", None)
        if up is None or getattr(module, "W_UK_T", None) is None:
            continue
        weight = module.kv_b_proj.weight
        if not sure(module.kv_b_proj) or weight.dtype != up.dtype:
            yield module.kv_b_proj, None
            continue
        by_head = weight.detach().T.unflatten(1, (module.num_heads, -1))
        keys, values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
        yield (
            module.kv_b_proj,
            [(module.W_UV.detach(), values.transpose(0, 1)), (module.W_UK_T.detach(), keys.permute(1, 2, 0))],
        )
