"""The other side of the engine benchmark: megatron-core as its users write it, without quintet.

GPTModel with core's own spec, rotary embedding and loss; DistributedDataParallel with the distributed optimizer; core's
schedule. All fusions that this installation of core offers are on. Rows lie on the device before the step starts.
Core's local attention cannot do packed rows, so the portable spec gets the flash kernel that quintet uses too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.engine_work import Setup
from quintet.models import ModelShape
from quintet.recipe.recompute import recompute_modules
from quintet.recipe.schema import Optimizer


class VarlenAttention(torch.nn.Module):
    """Core attention for the local spec: torch's flash kernel on packed rows; on a CPU sequence by sequence."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        packed = kwargs["packed_seq_params"]
        if query.is_cuda:
            from torch.nn.attention.varlen import varlen_attn

            gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
            cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            out: Tensor = varlen_attn(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                cu,
                cu,
                longest,
                longest,
                scale=self.scale,
                window_size=(-1, 0),
                **gqa,
            )
            return out
        sizes = packed.cu_seqlens_q.diff().tolist()
        parts = [
            F.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in qkv), is_causal=True, scale=self.scale, enable_gqa=True
            )
            for qkv in zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts])


@dataclass
class PackedRow:
    """One packed row on the device. labels: [1, T] next tokens; mask: [T], 0 at the last token of each sequence."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    mask: Tensor
    trained: Tensor
    packed: PackedSeqParams


class RawLoop:
    """One rank. `step(k)` trains step k and returns this rank's share of the mean loss, and the gradient norm.

    fill: writes the initial weights into core's model.
    """

    def __init__(
        self,
        setup: Setup,
        optimizer: Optimizer,
        device: torch.device,
        fill: Callable[[torch.nn.Module], None],
    ) -> None:
        _refuse(setup)
        self.setup, self.device = setup, device
        parallel_state.initialize_model_parallel(
            setup.size("tp"),
            setup.size("pp"),
            expert_model_parallel_size=setup.size("ep"),
            expert_tensor_parallel_size=setup.layout.get("etp"),
        )
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.last = parallel_state.is_pipeline_last_stage()
        self.reports = self.last and parallel_state.get_tensor_model_parallel_rank() == 0
        self.model = _model(setup, device)
        fill(self.model.module)
        self.optimizer = _optimizer(optimizer, self.model)
        self.config = self.model.config
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.model.ddp_config.overlap_grad_reduce:
            self.config.no_sync_func = self.model.no_sync
            self.config.grad_sync_func = self.model.start_grad_sync
            self.config.param_sync_func = self.model.start_param_sync
        self.steps: dict[int, list[PackedRow]] = {}

    def prepare(self, step: int, tokens: list[list[Tensor]]) -> None:
        """tokens: the rank's rows as lists of sequences, on the CPU."""
        self.steps[step] = [_row(row, self.device) for row in tokens]

    def step(self, step: int) -> tuple[float, float]:
        rows = self.steps[step]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        shares = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(rows),
            model=[self.model],
            num_microbatches=len(rows),
            seq_length=self.setup.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        if not self.reports:
            return 0.0, float(norm)
        return float(torch.stack([s["loss"] for s in shares]).sum()) / self.setup.trained(step), float(norm)

    def _forward(self, rows: Iterator[PackedRow], model: Any) -> Any:
        row = next(rows)
        losses = model(row.input_ids, row.positions, None, labels=row.labels, packed_seq_params=row.packed)

        def loss(losses: Tensor) -> Any:
            total = (losses.view(-1).float() * row.mask).sum()
            return total, row.trained, {"loss": total.detach()}

        return losses, loss


def _refuse(setup: Setup) -> None:
    """SystemExit for what this loop does not know, or core cannot do without TransformerEngine."""
    portable = setup.backend == "portable"
    for unknown, what in (
        (setup.size("cp") > 1, "context parallelism"),
        (setup.size("vpp") > 1, "interleaved pipelines"),
        (portable and setup.layout.get("sp"), "sequence parallelism with portable layers"),
        (portable and setup.shape.moe, "grouped experts with portable layers"),
    ):
        if unknown:
            raise SystemExit(f"the raw megatron-core loop has no {what}: measure it with --only quintet")


def _row(sequences: list[Tensor], device: torch.device) -> PackedRow:
    lengths = torch.tensor([len(s) for s in sequences])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat(sequences)
    mask = torch.ones(len(ids))
    mask[ends[1:] - 1] = 0
    cu, longest = ends.to(device, torch.int32), int(lengths.max())
    return PackedRow(
        input_ids=ids[None].to(device),
        positions=torch.cat([torch.arange(len(s)) for s in sequences])[None].to(device),
        labels=ids.roll(-1)[None].to(device),
        mask=mask.to(device),
        trained=mask.sum().to(device, torch.int),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )


def _model(setup: Setup, device: torch.device) -> DistributedDataParallel:
    shape = setup.shape
    experts: dict[str, Any] = (
        {"num_experts": shape.moe.experts, "moe_grouped_gemm": True} if shape.moe else {}
    )
    if setup.backend == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm, **experts)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = VarlenAttention
    tp = setup.size("tp")
    model = GPTModel(
        _config(setup, shape, device),
        spec,
        vocab_size=-(-shape.vocab_size // tp) * tp,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope.theta),
    ).to(device)
    overlap = setup.dp > 1
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    return DistributedDataParallel(model.config, settings, model)


def _config(setup: Setup, shape: ModelShape, device: torch.device) -> TransformerConfig:
    te, on_gpu = setup.backend == "transformer_engine", device.type == "cuda"
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "tensor_model_parallel_size": setup.size("tp"),
        "pipeline_model_parallel_size": setup.size("pp"),
        "sequence_parallel": bool(setup.layout.get("sp")),
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not on_gpu,
        "deallocate_pipeline_outputs": True,
        # Everything core can fuse here; its fused accumulation of gradients needs Apex.
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": te,
        "cross_entropy_loss_fusion": on_gpu,
        "cross_entropy_fusion_impl": "te" if te else "native",
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if setup.layout.get("stage_layers"):
        stages = [["decoder"] * count for count in setup.layout["stage_layers"]]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        fields["pipeline_model_parallel_layout"] = stages
    if setup.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if setup.recompute == "selective":
        # Of an MLP's parts core knows none apart.
        modules = [
            "mlp" if one == "mlp_act" else one for one in recompute_modules(setup.engine_recipe, shape)
        ]
        fields |= {"recompute_granularity": "selective", "recompute_modules": modules}
    if shape.moe:
        fields |= {
            "num_moe_experts": shape.moe.experts,
            "moe_router_topk": shape.moe.top_k,
            "moe_ffn_hidden_size": shape.moe.ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": setup.size("ep"),
            "expert_tensor_parallel_size": setup.layout.get("etp") or setup.size("tp"),
        }
    return TransformerConfig(**fields)


def _optimizer(recipe: Optimizer, model: DistributedDataParallel) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        clip_grad=recipe.clip_grad_norm or 0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
    )
    if recipe.cpu_fraction:
        # As --optimizer-cpu-offload with --use-precision-aware-optimizer sets it; the constructor wants TransformerEngine for the latter.
        config.optimizer_cpu_offload = config.overlap_cpu_optimizer_d2h_h2d = True
        config.optimizer_offload_fraction = recipe.cpu_fraction
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    return get_megatron_optimizer(config, [model])
