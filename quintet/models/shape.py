"""The sizes of a model, and what follows from them: parameters, parameters a token meets, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

LARGEST = 2**31 - 1
"""Of a whole number that has no smaller limit of its own: 32 bits hold it, and it is more than anyone asks for."""

MOST_LAYERS = 1024
MOST_EXPERT_LAYERS = 1 << 16
"""Layers times experts. Each is a weight by itself, and what is known of a model is known of every weight."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base, the scaling dictionary of the Hugging Face config if any, and the share of a
    head's dims that are turned, the first ones."""

    theta: float = 10000.0
    scaling: dict[str, Any] | None = field(default=None, hash=False)
    share: float = 1.0


@dataclass(frozen=True)
class Glu:
    """A gated activation: (up + offset) · gate · sigmoid(alpha · gate), with a limit of min(gate, limit) and of up cut to
    ±limit. The defaults are SwiGLU."""

    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None


SWIGLU = Glu()


@dataclass(frozen=True)
class MoeShape:
    """Routed experts in place of the feed-forward part of every layer that is not in `dense_layers`.

    score: what turns router logits into the experts' weights. normalize: the chosen experts' weights sum to one
    before `scaling_factor`. groups, group_top_k: only the best group_top_k of `groups` equal groups of experts are
    open to a token; a group counts by the sum of its best two. bias: a value an expert, stored and not trained,
    that is added to the scores where experts are chosen and nowhere else (DeepSeek-V3,
    https://arxiv.org/abs/2412.19437). biases: the router and both matrices of every expert have trained ones. glu: the
    activation between an expert's matrices.
    """

    experts: int
    top_k: int
    ffn_hidden_size: int
    """Of one expert."""
    shared_ffn_hidden_size: int = 0
    """Of the experts every token takes, together; 0 is none."""
    dense_layers: tuple[int, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    bias: bool = False
    biases: bool = False
    glu: Glu = SWIGLU

    @property
    def plain(self) -> bool:
        """Whether experts are SwiGLU without biases, which is all that TransformerEngine's compute."""
        return self.glu == SWIGLU and not self.biases

    def is_moe(self, layer: int) -> bool:
        """Return whether layer number `layer` (from 0) has experts."""
        return layer not in self.dense_layers


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    Queries and keys have a part without position (nope) and a rotary part; the latter is one head for all keys.
    interleaved: the rotary part's pairs lie side by side, (x0, x1), (x2, x3), …, instead of as two halves.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model, as its family reads them from config.json.

    With `mla`, head_dim is that of queries and keys and kv_heads is heads. mtp_layers: layers for multi-token
    prediction after the others, each with a projection and norms of its own; those that a recipe has no use for are taken off
    (`without_mtp`). head: what stands on top, a language model's rows of the vocabulary or a value model's one number a
    token. proj_bias: the projection out of attention has a bias. sinks: each head has a logit of its own in the softmax
    over keys. window: in `window_layers` a token sees that many tokens, itself among them, in the other layers all before
    it.
    """

    family: str
    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    norm_eps: float
    qk_norm: bool = False
    qkv_bias: bool = False
    rope: Rope = field(default_factory=Rope)
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    mtp_layers: int = 0
    head: Literal["lm", "value"] = "lm"
    proj_bias: bool = False
    sinks: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()

    def as_value_model(self) -> ModelShape:
        """Return the same trunk with a scalar head in place of the LM head. Tied embeddings have nothing left to be tied to."""
        return replace(self, head="value", tied_embeddings=False, mtp_layers=0)

    def without_mtp(self) -> ModelShape:
        """Return the same model without its layers for multi-token prediction."""
        return replace(self, mtp_layers=0)

    def is_moe(self, layer: int) -> bool:
        """Return whether layer number `layer` (from 0; layers for multi-token prediction number on) has experts."""
        return self.moe is not None and self.moe.is_moe(layer)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts, from 0, those for multi-token prediction left out."""
        return tuple(layer for layer in range(self.layers) if self.is_moe(layer))

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token sees in layer number `layer` (from 0), itself among them; None is all."""
        return self.window if layer in self.window_layers else None

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rotary embedding turns."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.head_dim * self.rope.share)

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def parameter_count(self) -> int:
        """Number of trained weights, tied embeddings counted once."""
        return self._counts[0]

    @property
    def active_parameter_count(self) -> int:
        """Number of trained weights that one token meets: of the routed experts, only its top-k."""
        return self._counts[1]

    @property
    def _counts(self) -> tuple[int, int]:
        from quintet.models.family import trained_elements  # whose tables are made from shapes

        return trained_elements(self)

    def flops_per_token(self, context: float) -> float:
        """Return the training FLOPs of one token: 6 per weight that multiplies, plus causal attention over `context` tokens.

        `context` is the mean number of keys a query sees (half the length of a causal sequence). Of the routed
        experts, a token's top-k count.
        """
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        weights = self.active_parameter_count - embedding
        seen = sum(min(context, self.window_of(layer) or context) for layer in range(self.layers))
        attention = self.heads * (self.head_dim + self.v_head_dim) * seen
        return 6.0 * weights + 6.0 * attention

    @property
    def quadratic(self) -> float:
        """Attention's cost beside the rest, per token of length, by FLOPs."""
        rest = self.flops_per_token(0.0)
        return (self.flops_per_token(1.0) - rest) / (2 * rest)


def route_bytes(experts: int) -> int:
    """Return the bytes that hold the number of one of so many experts."""
    return 1 if experts <= 256 else 2
