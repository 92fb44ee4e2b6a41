"""The model, how it lies on ranks, and adapters beside it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from quintet.models import MoeShape
from quintet.models.shape import MOST_LAYERS
from quintet.recipe.hub import is_hub_id, keep_path, shape_alone, snapshot
from quintet.recipe.sections.fields import (
    NonNegativeInt,
    Pattern,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Section,
    UserCode,
    UserPath,
)


class BuildModel(Section):
    """A model made from nothing, for laptops and speed tests: a small decoder with random weights."""

    family: Literal["qwen3", "qwen3_moe", "mimo"] = "qwen3"
    """Whose shape it has; of a mimo, `mtp.init_layers` are layers for multi-token prediction. A qwen3_moe has 8 experts a layer, of
    which a token takes 2, each half as wide as ffn_hidden_size."""
    layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 4
    hidden_size: Annotated[int, Field(gt=0, le=1 << 18)] = 128
    ffn_hidden_size: Annotated[int, Field(gt=0, le=1 << 20)] = 384
    heads: Annotated[int, Field(gt=0, le=1 << 12)] = 4
    kv_heads: Annotated[int, Field(gt=0, le=1 << 12)] = 2
    head_dim: Annotated[int, Field(gt=0, le=1 << 12)] = 32
    tied_embeddings: bool = True
    max_position_embeddings: PositiveInt = 4096

    @property
    def moe(self) -> MoeShape | None:
        """The experts of a family that has some: a token takes as many units as in a dense model."""
        return MoeShape(8, 2, -(-self.ffn_hidden_size // 2)) if self.family == "qwen3_moe" else None


class Model(Section):
    path: Annotated[UserPath | None, BeforeValidator(keep_path)] = None
    """Hugging Face directory: config.json, *.safetensors, tokenizer files; or a model of the hub as owner/name, downloaded to the
    cache of HF_HOME where it is not there yet. A directory that exists comes first."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub; null is main. The resolved recipe has the commit."""
    family: UserCode | None = None
    """A model family of your own, module:Class or file.py:Class, that config.json's architecture names (docs/models.md)."""
    build: BuildModel | None = None
    """Make a model and a character tokenizer from nothing instead of reading `path`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Compute and parameter type; null is bf16 on GPU (fp32 master weights) and fp32 on CPU."""
    chat_template: str | None = None
    """Jinja text or a file; null takes the tokenizer's own. Saved models have what was used, and chat_template.jinja of the run
    directory."""
    trust_remote_code: bool = False
    """Run code that `path` brings along (auto_map in its JSON files), in every process of the run. Read it first."""

    def dtype_on(self, device: str) -> Literal["fp32", "bf16"]:
        """Return the compute and parameter type on a device; "auto" counts as a GPU."""
        return self.dtype or ("fp32" if device == "cpu" else "bf16")

    @property
    def of_hub(self) -> bool:
        """Whether `path` names a model of the hub, and no directory."""
        return self.path is not None and is_hub_id(self.path)

    @property
    def directory(self) -> Path | None:
        """Where the files of `path` are on this machine: of a model of the hub, its snapshot, which may be downloaded first; while
        `shapes_alone`, where its config.json is. Raises UserError where it cannot be had."""
        if self.path is not None and (shape := shape_alone(self.path)) is not None:
            return shape
        return snapshot(str(self.path), self.revision) if self.of_hub else self.path

    def pin(self) -> None:
        """Make `revision` the commit that a model of the hub is at, so that it stays the same one."""
        if self.of_hub and self.directory is not None:
            self.revision = self.directory.name


class Layout(Section):
    """Sizes of the mesh axes. dp is what is left: ranks / (tp * pp * cp). Experts have axes of their own over the
    same ranks of a stage: etp, ep, and expert dp, which is what is left: ranks / (etp * ep * pp)."""

    tp: Ranks = 1
    """Tensor parallel: every matrix is cut, between heads and across the MLP. Divides heads, KV heads and MLP width."""
    sp: bool = False
    """Sequence parallel: activations between the matrices are cut over the tp ranks. Needs tp > 1; experts need it then."""
    pp: Ranks = 1
    """Pipeline parallel: stages of equally many layers, or of as many as stage_layers says."""
    vpp: Ranks = 1
    """Virtual pipeline stages (model chunks) a rank: the interleaved schedule. Needs pp > 1; pp * vpp divides the layers, or
    stage_layers says how many each has."""
    stage_layers: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=MOST_LAYERS)] | None = None
    """Layers of each of the pp pipeline stages (with vpp of each of the pp * vpp chunks), in the model's order; null is equally many.
    The first and the last may have none, and hold the embedding and the head alone (docs/layouts.md)."""
    cp: Ranks = 1
    """Context parallel: each sample's tokens are spread over cp ranks, which share a micro-batch of cp times the budget."""
    dynamic_cp: bool = False
    """Give each micro-batch as many ranks as its samples need, 1, 2, 4 and so on up to cp, a power of two (docs/dynamic_cp.md)."""
    ep: Ranks = 1
    """Expert parallel: the experts of a layer are spread over ep of the stage's ranks. Divides the experts."""
    etp: Ranks | None = None
    """Expert tensor parallel: each expert is cut over etp ranks; null is tp. 1 keeps experts whole; needs ep > 1 to differ
    from tp."""

    @property
    def expert_tp(self) -> int:
        """The size of the experts' tensor-parallel axis."""
        return self.tp if self.etp is None else self.etp

    def holds(self, layers: int) -> bool:
        """Return whether the stages have so many layers together."""
        parts, counts = self.pp * self.vpp, self.stage_layers
        return layers % parts == 0 if counts is None else (len(counts), sum(counts)) == (parts, layers)

    def layers_of(self, layers: int, stage: int) -> list[range]:
        """Return the numbers, from 0, of the layers in each of the vpp chunks of a pipeline stage. Chunks go round the stages, so that
        a stage's own are not neighbours. layers: of the model, which `holds`."""
        parts = self.pp * self.vpp
        ends = [0, *accumulate(self.stage_layers or [layers // parts] * parts)]
        return [range(ends[part], ends[part + 1]) for part in range(stage, parts, self.pp)]


class Lora(Section):
    """Low-rank adapters: the model is frozen, and what is trained is a pair of small matrices beside each chosen linear
    layer (https://arxiv.org/abs/2106.09685)."""

    rank: Annotated[int, Field(gt=0, le=1 << 16)] | None = None
    """Of A and B; null is that of lora.path, otherwise 16."""
    alpha: PositiveFloat | None = None
    """Adapters are scaled by alpha / rank; null is that of lora.path, otherwise twice the rank."""
    targets: Literal["all-linear"] | Annotated[list[Pattern], Field(min_length=1, max_length=100)] | None = (
        None
    )
    """Linear layers with adapters: ends of Hugging Face module names such as q_proj, "*" being any text. all-linear is every one
    but embedding, router and head; null is those of lora.path, otherwise all-linear."""
    rslora: bool | None = None
    """Scale by alpha / √rank instead (https://arxiv.org/abs/2312.03732); null is as in lora.path, otherwise false."""
    path: UserPath | None = None
    """Adapters to start from: a directory that peft, or a run's adapter/, wrote for this model. null draws fresh ones."""


class Mtp(Section):
    """Layers for multi-token prediction are loaded, kept, saved and sent to rollouts: DeepSeek-V3, GLM-4.5 and MiMo have them
    (https://arxiv.org/abs/2412.19437, section 2.2). Without this section they stay on the disk, and are saved as found."""

    train: bool = True
    """Train them beside the policy, in SFT and RL."""
    loss_weight: PositiveFloat = 0.1
    """Weight of their loss, each depth's a mean over its own targets."""
    detach: bool = True
    """Train these layers alone: neither the policy's layers nor its embedding nor its head get gradient from their loss."""
    loss: Literal["cross_entropy", "self_distill"] = "cross_entropy"
    """What they are trained towards: the token that came, or the policy's own distribution of it at temperature 1."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Their gradients are scaled down to this norm, by themselves; null leaves them."""
    init_layers: Annotated[int, Field(gt=0, le=8)] | None = None
    """Give a model that has none so many new ones, with random weights."""
