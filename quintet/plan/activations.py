"""What one micro-batch keeps between its forward and its backward pass, counted tensor by tensor.

The method is that of Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4): go through a layer, list
what each operation's backward pass needs, divide by tp what tensor parallelism cuts, and by tp what sequence
parallelism cuts between the blocks. Their layer (sbh · 34 bytes and 5 a s² b of attention scores) becomes, for packed
rows of T tokens on a rank, S of them between blocks (S = T / tp under sequence parallelism), w bytes an element:

    norms           x of each of the two: 2 S H w, and a number a token
    projections in  the norms' outputs: 2 S H w
    attention       q, k, v and the output, no scores (flash attention): T (2 q + 2 kv) w / tp, and 4 bytes a head;
                    norms of q and k: their inputs, and with k's all of the projection's output, of which it is a view
                    but for TransformerEngine's norm, which copies it
    SwiGLU          gate and up, and their product: 3 T F w / tp
    experts         the same of each token's top-k, after the tokens themselves: T k (H + 3 f) w
    latent          (MLA) each latent before and after its norm; q and k as wide as they are, with their rotary part

There is no dropout, so there are no masks. Context parallelism by all-gather makes k and v (cp + 1/2) times as long.
On a CPU attention repeats k and v for every query head, SwiGLU keeps what one kernel does not and, in bf16, norms compute
in fp32 copies. Recomputed parts keep their inputs only. Attention sinks widen what a CPU's kernel sees (`quintet.engine.layers.attention_sinks`);
its masks of sinks and windows, one of the longest sequence's length squared each, are not counted. Biases of experts keep
each row's expert.
"""

from __future__ import annotations

from collections.abc import Iterable

from quintet.models import MlaShape, MoeShape
from quintet.models.lora import LoraShape, adapted, linears
from quintet.models.shape import SWIGLU, Glu
from quintet.plan.parameters import sorted_weights
from quintet.plan.setup import Setup
from quintet.recipe import schema
from quintet.recipe.recompute import recompute_modules

SINK_DIMS = 8
"""As `quintet.engine.layers.attention_sinks.SPARE` has it."""


class _Sizes:
    """Sizes on one rank. t: tokens; s: tokens between blocks; w: bytes an element. recomputed: modules that are."""

    def __init__(self, setup: Setup, recomputed: Iterable[str] = ()) -> None:
        self.setup, self.recomputed = setup, frozenset(recomputed)
        self.t, self.s, self.w = setup.tokens, setup.tokens_between_blocks, setup.width
        shape, tp = setup.shape, setup.layout.tp
        self.hidden, self.heads, self.kv_heads = shape.hidden_size, shape.heads // tp, shape.kv_heads // tp
        self.on_gpu = setup.device == "cuda"


def of_chunk(setup: Setup, layers: range, *, ends: bool) -> int:
    """Return the bytes that a micro-batch keeps in one chunk of the model. ends: the chunk has the final norm."""
    sizes = _Sizes(setup)
    kept = sum(kept_in_layer(setup, layer) for layer in layers)
    if setup.lora is not None and setup.engine.recompute != "full":
        kept += _low_rank(setup, setup.lora, layers)
    return kept + (_norm(sizes, sizes.s, sizes.hidden) + _ahead(setup) if ends else 0)


def _ahead(setup: Setup) -> int:
    """What layers for multi-token prediction keep: each has two norms and a projection before it, whose input they put side by side,
    and a norm after it."""
    sizes = _Sizes(setup)
    around = 3 * _norm(sizes, sizes.s, sizes.hidden) + 2 * sizes.s * sizes.hidden * sizes.w
    first = setup.shape.layers
    return sum(around + kept_in_layer(setup, first + depth) for depth in range(setup.depths))


def kept_in_layer(setup: Setup, layer: int, *, whole: bool = False) -> int:
    """Return the bytes that a micro-batch keeps in a layer. whole: as if nothing were recomputed."""
    engine = setup.engine
    names = [] if whole else recompute_modules(engine, setup.shape)
    sizes = _Sizes(setup, names)
    if engine.recompute == "full" and not whole:
        return sizes.s * sizes.hidden * sizes.w
    attention = _latent(sizes, setup.shape.mla) if setup.shape.mla else _attention(sizes)
    moe = setup.shape.moe
    feed_forward = _experts(sizes, moe) if moe and moe.is_moe(layer) else _dense(sizes)
    return attention + feed_forward


def _low_rank(setup: Setup, lora: LoraShape, layers: range) -> int:
    """What adapters keep besides: A x of each row, as wide as the ranks of a layer's parts, and the copies of A and B in which
    the parts lie beside each other. Their input is what the layer would keep if it were trained."""
    sizes = _Sizes(setup, recompute_modules(setup.engine, setup.shape))
    moe, kept = setup.shape.moe, 0
    weights = sorted_weights(setup.shape).layers
    for linear in linears(weight for number in layers for weight in weights.get(number, ())):
        parts = adapted(linear, lora)
        if not parts or _again(linear.name, sizes.recomputed):
            continue
        ranks, inside, out = len(parts) * lora.rank, parts[0].in_, sum(p.out for p in linear.parts)
        if linear.split.startswith("expert_") and moe is not None:
            across, down = (1, setup.etp) if linear.split == "expert_gate_up" else (setup.etp, 1)
            # One expert after the other comes by: rows are spread over all, copies are of those on this rank.
            kept += _expert_rows(sizes, moe) * ranks // moe.experts
            kept += (inside // across + out // down) * ranks // setup.layout.ep
            continue
        across = setup.layout.tp if linear.split == "columns" else 1
        down = setup.layout.tp if linear.split not in ("columns", "replicated") else 1
        rows = sizes.s if linear.split in ("columns", "replicated") else sizes.t
        kept += ranks * (rows + inside // across + out // down)
    return kept * sizes.w


def _again(name: str, recomputed: frozenset[str]) -> bool:
    """Whether a linear layer is part of what is computed again."""
    places = {
        "mlp": (".mlp.linear_fc",),
        "moe": (".mlp.experts.", ".mlp.shared_experts."),
        "shared_experts": (".mlp.shared_experts.",),
        "mla_up_proj": ("_up_proj", ".linear_q_proj"),
    }
    return any(place in name for module in recomputed for place in places.get(module, ()))


def workspace(setup: Setup) -> int:
    """Return an estimate of what the backward pass of one layer has alive besides: gradients of its widest activations, of the
    residual stream, and of one weight (which TransformerEngine adds to the buffer at once, and adapters leave frozen); after full recompute, all that
    the layer keeps."""
    sizes, moe = _Sizes(setup), setup.shape.moe
    width = setup.shape.ffn_hidden_size // setup.layout.tp
    rows, weight = sizes.t, 2 * width * sizes.hidden
    if moe:
        width = max(width, moe.ffn_hidden_size // setup.etp)
        rows = max(rows, _expert_rows(sizes, moe))
        here = moe.experts // setup.layout.ep
        # Of rows in halves the first half's gradients of both weights wait for the second's.
        weight = max(
            weight,
            (2 + 3 * setup.engine.overlap_dispatch) * moe.ffn_hidden_size // setup.etp * sizes.hidden * here,
        )
    torch_experts = moe is not None and (setup.engine.experts == "torch" or not moe.plain)
    if (setup.backend == "transformer_engine" and not torch_experts) or setup.lora is not None:
        weight = 0  # added to the gradients within the product, or never computed
    gradients = (rows * 3 * width + (2 * sizes.s + sizes.t) * sizes.hidden + weight) * sizes.w
    again = 0
    if setup.engine.recompute == "full":
        again = max(kept_in_layer(setup, layer, whole=True) for layer in range(setup.shape.layers))
    return gradients + again


def _norm(sizes: _Sizes, tokens: int, width: int, per_token: int = 1) -> int:
    """RMSNorm over vectors, `per_token` of them a token (heads): its input, and their scales in fp32."""
    if not sizes.on_gpu and sizes.w == 2:
        return tokens * (8 * width + 4 * per_token)  # two copies in fp32
    return tokens * (sizes.w * width + 4 * per_token)


def _before_block(sizes: _Sizes, discarded: bool) -> int:
    """The norm before attention or the feed-forward part, and its output, which the projections keep."""
    output = 0 if discarded else sizes.s * sizes.hidden * sizes.w
    return _norm(sizes, sizes.s, sizes.hidden) + output


def _discards(sizes: _Sizes, own_norm: bool) -> bool:
    """Whether a norm's output is computed again. With latent attention TransformerEngine's norms are mostly part of the linear layer after
    them, which keeps their output in any case. own_norm: this one is not."""
    apart = own_norm or sizes.setup.backend == "portable" or sizes.setup.shape.mla is None
    return apart and "layernorm" in sizes.recomputed


def _attention(sizes: _Sizes) -> int:
    shape, t = sizes.setup.shape, sizes.t
    d, heads, kv_heads = shape.head_dim, sizes.heads, sizes.kv_heads
    kept = _before_block(sizes, _discards(sizes, own_norm=False))
    projected = t * (heads + 2 * kv_heads) * d * sizes.w
    in_fp32 = not sizes.on_gpu and sizes.w == 2
    alone = in_fp32 or sizes.setup.backend == "transformer_engine"  # which copies k for its norm
    if shape.qk_norm:
        copied = kv_heads > 1 or alone  # of one group, q is a view of the projection's output too
        kept += _norm(sizes, t, heads * d if copied else 0, heads)
        kept += _norm(sizes, t, kv_heads * d, kv_heads) if alone else projected + 4 * t * kv_heads
    if "core_attn" in sizes.recomputed:
        views = 0 if shape.qk_norm and not alone else projected  # v is one
        return kept + t * (2 * heads + kv_heads) * d * sizes.w + views
    return kept + _core(sizes, heads * d, kv_heads * d, kv_heads * d, heads * d)


def _core(sizes: _Sizes, q: int, k: int, v: int, out: int) -> int:
    """Flash attention: q, k, v, the output, and a log-sum-exp a head. Widths are of all heads of a rank."""
    if sizes.on_gpu:
        keys: float = sizes.t
        layout = sizes.setup.layout
        if layout.cp > 1 and sizes.setup.engine.cp_comm == "all_gather":
            keys *= layout.cp + 0.5  # each of a rank's two chunks sees its sequence up to its end
        return int(sizes.w * (sizes.t * (q + out) + keys * (k + v))) + 4 * sizes.t * sizes.heads
    if sizes.setup.shape.sinks:  # as wider heads, out of which the output is cut
        wide = q + sizes.heads * SINK_DIMS
        return sizes.t * ((4 * wide + out) * sizes.w + 4 * sizes.heads)
    # Keys and values of every query head, as wide as queries.
    return sizes.t * (4 * q * sizes.w + 4 * sizes.heads)


def _latent(sizes: _Sizes, mla: MlaShape) -> int:
    kept = _before_block(sizes, _discards(sizes, own_norm=True))
    up_again = "mla_up_proj" in sizes.recomputed
    # The projection's output, of which the norm's input is a view.
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    for latent, held in ((mla.q_lora_rank or 0, mla.q_lora_rank or 0), (mla.kv_lora_rank, down)):
        if latent:
            kept += _norm(sizes, sizes.s, latent if not sizes.on_gpu and sizes.w == 2 else held)
            kept += 0 if up_again else sizes.s * latent * sizes.w
    q, v = sizes.heads * mla.qk_head_dim, sizes.heads * mla.v_head_dim
    context = sizes.t * v * sizes.w
    if "core_attn" in sizes.recomputed:
        return kept + context + (0 if up_again else sizes.t * (2 * q + v) * sizes.w)
    if sizes.on_gpu and sizes.setup.backend == "transformer_engine":
        return kept + _core(sizes, q, q, v, v) - (sizes.t * (2 * q + v) * sizes.w if up_again else 0)
    # Other kernels want values as wide as keys: padded copies, and the output cut out of theirs.
    core = _core(sizes, q, q, q, q) + (context if mla.v_head_dim < mla.qk_head_dim else 0)
    return kept + core - (sizes.t * 2 * q * sizes.w if up_again else 0)


def _gated(sizes: _Sizes, rows: int, width: int, glu: Glu = SWIGLU, *, weighted: bool = False) -> int:
    """Gate and up, and their product; of SwiGLU on a CPU silu's output too, and where it is weighted the product before
    that."""
    wide = 3 if sizes.on_gpu or glu != SWIGLU else 4 + weighted
    return rows * (wide * width * sizes.w + (4 if weighted else 0))


def _dense(sizes: _Sizes) -> int:
    apart = _discards(sizes, own_norm=False)
    if "mlp" in sizes.recomputed and sizes.setup.backend == "transformer_engine" and not apart:
        return sizes.s * sizes.hidden * sizes.w  # the norm is part of what is computed again
    kept = _before_block(sizes, apart)
    if "mlp" in sizes.recomputed:
        return kept
    if "mlp_act" in sizes.recomputed:
        return kept + 2 * sizes.t * sizes.setup.shape.ffn_hidden_size // sizes.setup.layout.tp * sizes.w
    return kept + _gated(sizes, sizes.t, sizes.setup.shape.ffn_hidden_size // sizes.setup.layout.tp)


def _experts(sizes: _Sizes, moe: MoeShape) -> int:
    kept = _before_block(sizes, _discards(sizes, own_norm=True))
    if "moe" in sizes.recomputed:
        return kept
    rows, width = _expert_rows(sizes, moe), moe.ffn_hidden_size // sizes.setup.etp
    kept += sizes.s * _routing(moe, sizes.setup.engine) + rows * sizes.hidden * sizes.w
    kept += 8 * rows if moe.biases else 0
    if "moe_act" in sizes.recomputed:
        kept += rows * (2 * width * sizes.w + 4)
    else:
        kept += _gated(sizes, rows, width, moe.glu, weighted=True)
    if moe.shared_ffn_hidden_size and "shared_experts" not in sizes.recomputed:
        kept += _gated(sizes, sizes.t, moe.shared_ffn_hidden_size // sizes.setup.layout.tp)
    return kept


def _expert_rows(sizes: _Sizes, moe: MoeShape) -> int:
    """Rows of a rank's experts: what the ranks of its expert group send, spread evenly."""
    return sizes.s * moe.top_k * sizes.setup.etp


def _routing(moe: MoeShape, engine: schema.Engine) -> int:
    """Bytes a token: fp32 weights of all experts, int64 choices, a map of who goes where; for losses of routers the probabilities and
    what they are multiplied with, and the logits."""
    scores = 4 * moe.experts if moe.score == "sigmoid" or not moe.normalize else 0
    losses = (8 * (engine.aux_loss is not None) + 4 * (engine.z_loss > 0)) * moe.experts
    return 5 * moe.experts + 20 * moe.top_k + scores + losses
