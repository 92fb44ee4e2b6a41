"""The layers of a model: which modules a back end gives, and one function that makes a layer of them.

`portable` needs torch and megatron-core alone. `transformer_engine` (quintet/engine/layers/te.py, imported when chosen) takes
NVIDIA's linear layers and norms, which fuse norms into the projections after them unless norms are computed again. Both have the same attention
around a kernel of their own, the same router, and parameters that `quintet.engine.weights.shards` names alike.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from quintet.engine.layers.attention import CoreAttention, PackedSelfAttention
from quintet.engine.layers.experts import GroupedExperts
from quintet.engine.layers.layer import PackedLayer, PackedMoELayer
from quintet.engine.layers.linear import ColumnLinear, RowLinear
from quintet.engine.layers.mla import LatentAttentionSubmodules, PackedLatentAttention, ReplicatedLinear
from quintet.engine.layers.mlp import GatedMLP, GatedSharedExperts
from quintet.engine.layers.norm import RMSNorm
from quintet.engine.layers.router import Router
from quintet.engine.mesh import Mesh
from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.rope import softmax_scale

log = logging.getLogger(__name__)


def choose_backend(name: str) -> str:
    """Return the back end of layers that engine.backend asks for: "auto" is TransformerEngine on GPUs where it imports.

    Raises UserError where TransformerEngine is asked for and cannot be had.
    """
    if name == "portable":
        return name
    if not torch.cuda.is_available():
        problem: str | None = "there is no GPU"
    elif importlib.util.find_spec("transformer_engine") is None:
        problem = "it is not installed"
    else:
        problem = _import_error()
    if problem is None:
        return _tell("transformer_engine", "it is installed")
    if name == "transformer_engine":
        raise UserError(
            f"engine.backend=transformer_engine: {problem}; install transformer-engine[pytorch] on a machine with "
            "an NVIDIA GPU (on all nodes, where the ranks have it), or set engine.backend=portable"
        )
    return _tell("portable", f"no TransformerEngine: {problem}")


@functools.cache
def _import_error() -> str | None:
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"it does not import ({error})"
    return None


@functools.cache
def _tell(backend: str, why: str) -> str:
    log.info("layers: %s (%s)", backend, why)
    return backend


class PortableProvider(LocalSpecProvider):
    """megatron-core's local layers, with a norm that knows of sequence parallelism and grouped experts."""

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return CoreAttention

    def linear(self) -> type:
        """Return the linear layer that is replicated over tp."""
        return ReplicatedLinear

    def experts(self) -> tuple[type, MLPSubmodules | None]:
        """Return the module of experts, and what it is made of."""
        return GroupedExperts, None


def provider_of(backend: str, experts: str, *, norms_apart: bool) -> Any:
    """Return the spec provider of a back end that `choose_backend` named. experts: engine.experts. norms_apart: none is part of a linear
    layer. Raises UserError for TransformerEngine's experts in portable layers."""
    if backend == "portable":
        if experts == "transformer_engine":
            raise UserError(
                "engine.experts=transformer_engine: the layers are portable here, and have torch's products alone; install "
                "transformer-engine[pytorch] on a machine with an NVIDIA GPU, or leave engine.experts at auto"
            )
        return PortableProvider()
    from quintet.engine.layers.te import TransformerEngineProvider, WithTorchExperts

    return (WithTorchExperts if experts == "torch" else TransformerEngineProvider)(norms_apart)


def block_spec(
    shape: ModelShape, config: TransformerConfig, mesh: Mesh, provider: Any, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage, or of one of its interleaved parts, and the final norm."""
    stage = mesh.at("pp")
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
    kinds = [(shape.is_moe(i), shape.window_of(i)) for i in range(first, first + count)]
    specs = {
        (moe, window): layer_spec(shape, provider, mesh.groups, moe=moe, window=window)
        for moe, window in kinds
    }
    layers = [specs[kind] for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True))


def layer_spec(
    shape: ModelShape, provider: Any, groups: ProcessGroupCollection, *, moe: bool, window: int | None
) -> ModuleSpec:
    """Return the spec of one layer. Where a provider fuses a norm into the linear layer after it, the norm's own place is empty."""
    norm = provider.layer_norm(rms_norm=True)
    fuses = provider.fuse_layernorm_and_linear()
    attention = _latent_attention(shape, provider) if shape.mla else _attention(shape, provider, window)
    parts = TransformerLayerSubmodules(
        input_layernorm=IdentityOp if fuses and not shape.mla else norm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp if fuses and not moe else norm,
        mlp=_experts(shape, provider, groups) if moe else _feed_forward(provider, fuses, groups),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=PackedLayer, submodules=parts)


def _feed_forward(provider: Any, fuses: bool, groups: ProcessGroupCollection) -> ModuleSpec:
    # Core's layer hands groups to its own MLP and experts alone.
    return ModuleSpec(module=GatedMLP, submodules=_mlp(provider, fuses), params={"tp_group": groups.tp})


def _mlp(provider: Any, fuses: bool) -> MLPSubmodules:
    first = provider.column_parallel_layer_norm_linear() if fuses else provider.column_parallel_linear()
    return MLPSubmodules(linear_fc1=first, linear_fc2=provider.row_parallel_linear())


def _experts(shape: ModelShape, provider: Any, groups: ProcessGroupCollection) -> ModuleSpec:
    assert shape.moe is not None
    experts, submodules = provider.experts()
    params: dict[str, Any] = {}
    if not shape.moe.plain:
        # Core's experts on TransformerEngine add the second bias once an etp rank.
        experts, submodules = GroupedExperts, None
        params = {"glu": shape.moe.glu, "biases": shape.moe.biases}
    parts = MoESubmodules(
        experts=ModuleSpec(module=experts, submodules=submodules, params=params),
        shared_experts=ModuleSpec(module=GatedSharedExperts, submodules=_mlp(provider, False)),
        router=partial(Router, bias=shape.moe.bias),
    )
    return ModuleSpec(module=PackedMoELayer, submodules=parts, params={"pg_collection": groups})


def _attention(shape: ModelShape, provider: Any, window: int | None) -> ModuleSpec:
    fused = provider.column_parallel_layer_norm_linear() if provider.fuse_layernorm_and_linear() else None
    norm = provider.layer_norm(rms_norm=True, for_qk=True) if shape.qk_norm else IdentityOp
    parts = SelfAttentionSubmodules(
        linear_qkv=fused or provider.column_parallel_linear(),
        core_attention=partial(provider.core_attention(), window=window, sinks=shape.sinks),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    mask = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=PackedSelfAttention, submodules=parts, params=mask)


def _latent_attention(shape: ModelShape, provider: Any) -> ModuleSpec:
    assert shape.mla is not None
    fused = provider.column_parallel_layer_norm_linear() if provider.fuse_layernorm_and_linear() else None
    parts = LatentAttentionSubmodules(
        linear=provider.linear(),
        column_parallel_linear=provider.column_parallel_linear(),
        up_proj=fused or provider.column_parallel_linear(),
        norm=None if fused else provider.layer_norm(rms_norm=True),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
    )
    params = {"softmax_scale": softmax_scale(shape), "interleaved": shape.mla.interleaved}
    return ModuleSpec(module=PackedLatentAttention, submodules=parts, params=params)
