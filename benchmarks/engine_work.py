"""The work both sides of the engine benchmark do: model shapes, packed rows of a stated length distribution, its FLOPs.

Imports without torch: the parent process plans with it, the workers build tensors from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.options import layout_name
from quintet.errors import UserError
from quintet.models import ModelShape, family_of
from quintet.plan.cards import card_of
from quintet.recipe import schema
from quintet.recipe.yaml_text import read_yaml

MICROBATCHES = 4
"""Of a step on a rank, unless options say otherwise."""
LEAST = 0.7
"""Of a full row, what the shortest ragged one has."""
TRAINED_FROM = 1
"""The first token of a sequence has no predecessor; all others are trained."""


@dataclass(frozen=True)
class Lengths:
    """Log-normal sequence lengths, clipped to [shortest, longest]."""

    median: int
    sigma: float
    shortest: int
    longest: int

    def one(self, generator: random.Random) -> int:
        """One length."""
        drawn = round(generator.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.shortest), self.longest)

    def row(self, tokens: int, generator: random.Random) -> list[int]:
        """Lengths that fill a row of `tokens` exactly: the last one is cut to what is left, and when that would be
        below `shortest`, what is left goes to the shortest sequence."""
        lengths: list[int] = []
        left = tokens
        while left >= self.shortest or not lengths:
            lengths.append(min(self.one(generator), left))
            left -= lengths[-1]
        lengths[lengths.index(min(lengths))] += left
        return lengths


REAL = Lengths(median=768, sigma=0.8, shortest=64, longest=4096)
SMALL = Lengths(median=24, sigma=0.8, shortest=4, longest=64)


@dataclass(frozen=True)
class Model:
    """A Hugging Face config, and what is trained on it unless options say otherwise."""

    config: dict[str, Any]
    lengths: Lengths = REAL
    tokens: int = 16384

    @property
    def shape(self) -> ModelShape:
        return family_of(self.config).shape_of(self.config)


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu"}
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, **_COMMON}
MODELS = {
    "qwen2.5-1.5b": Model(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            **_COMMON,
        }
    ),
    "qwen3-8b": Model(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            **_QWEN3,
        }
    ),
    "qwen3-30b-a3b": Model(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
            **_QWEN3,
        }
    ),
    "tiny": Model(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            **_COMMON,
        },
        lengths=SMALL,
        tokens=128,
    ),
    "tiny-moe": Model(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            **_COMMON,
        },
        lengths=SMALL,
        tokens=128,
    ),
}
TINY = ("tiny", "tiny-moe")
"""For dry runs."""


def peak_flops(device: str) -> float | None:
    """Dense bf16 peak of a device by its name, None when it is not known."""
    card = card_of(device)
    return card and card.flops


@dataclass(frozen=True)
class Setup:
    """One measurement: what is trained, where, and how. Travels to the workers as JSON.

    layers: of the model, where it is cut; None is all. balance: "forced" deals tokens to experts in turn instead of asking the router.
    ragged: rows of random lengths up to `tokens`, as a run has them, and not full ones. busy: processes that keep the CPUs busy meanwhile.
    cpu_fraction: share of the optimizer on the CPU.
    vocab_size, experts: in place of the model's own. engine: further keys of a recipe's section `engine`, of quintet's side alone.
    """

    model: str
    backend: str
    gpus: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    recompute_modules: list[str] | None = None
    layers: int | None = None
    balance: str = "natural"
    ragged: bool = False
    busy: int = 0
    cpu_fraction: float = 0.0
    vocab_size: int | None = None
    experts: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    tokens: int = 16384
    microbatches: int = MICROBATCHES
    steps: int = 3
    seed: int = 0

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def size(self, axis: str) -> int:
        """Size of a mesh axis."""
        return int(self.layout.get(axis) or 1)

    @property
    def dp(self) -> int:
        return self.gpus // (self.size("tp") * self.size("pp") * self.size("cp"))

    @property
    def config(self) -> dict[str, Any]:
        """The model's, cut."""
        cut = {
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab_size,
            "num_experts": self.experts,
        }
        return MODELS[self.model].config | {key: size for key, size in cut.items() if size}

    @property
    def shape(self) -> ModelShape:
        return family_of(self.config).shape_of(self.config)

    @property
    def engine_recipe(self) -> schema.Engine:
        """The section `engine` of a recipe that says the same."""
        return schema.Engine.model_validate(
            {
                "tokens_per_microbatch_per_rank": self.tokens,
                "backend": self.backend,
                "recompute": self.recompute,
                "recompute_modules": self.recompute_modules,
                **self.engine,
            }
        )

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together; of ragged rows the mean over steps."""
        return round(sum(sum(self.lengths(step)) for step in range(self.steps)) / self.steps)

    def rows(self, step: int) -> list[list[list[int]]]:
        """Sequence lengths of a step: [dp rank][micro-batch][sequence]. A row takes `tokens` on each of its cp ranks, with nothing padded;
        a ragged one from `LEAST` of that."""
        generator = random.Random(f"{self.seed} {step}")
        draw, cp = MODELS[self.model].lengths.row, self.size("cp")
        full, unit = self.tokens * cp, 2 * cp if cp > 1 else 1

        def row() -> list[int]:
            size = generator.randint(int(LEAST * full), full) if self.ragged else full
            lengths = draw(size // unit * unit, generator)
            cut = [n // unit * unit or unit for n in lengths[:-1]]
            return [*cut, size // unit * unit - sum(cut)]

        return [[row() for _ in range(self.microbatches)] for _ in range(self.dp)]

    def lengths(self, step: int) -> Iterator[int]:
        """Lengths of all sequences of a step."""
        return (n for rank in self.rows(step) for row in rank for n in row)

    def trained(self, step: int) -> int:
        """Trained tokens of a step, over all ranks."""
        return sum(n - TRAINED_FROM for n in self.lengths(step))

    def flops(self, step: int) -> float:
        """6·N·T and causal attention within each sequence (`ModelShape.flops_per_token`); recomputing is not counted."""
        lengths = list(self.lengths(step))
        seen = sum(n * n / 2 for n in lengths) / sum(lengths)  # keys a query sees, on average
        return sum(lengths) * self.shape.flops_per_token(seen)

    def own_size(self) -> list[str]:
        """What a record's case says of a step whose size is not the model's own."""
        sizes = {"tokens": MODELS[self.model].tokens, "microbatches": MICROBATCHES}
        return [f"{name}{getattr(self, name)}" for name, own in sizes.items() if getattr(self, name) != own]

    def case(self) -> str:
        """The record's case."""
        short = {"transformer_engine": "te"}.get(self.backend, self.backend)
        parts = [self.model, short]
        if self.layout or self.gpus > 1:
            parts.append("-".join(filter(None, [f"gpus{self.gpus}", layout_name(self.layout)])))
        if self.layers is not None:
            parts.append(f"layers{self.layers}")
        if self.experts is not None:
            parts.append(f"experts{self.experts}")
        parts += self.own_size()
        if self.balance != "natural":
            parts.append(f"balance-{self.balance}")
        if self.ragged:
            parts.append("ragged")
        if self.busy:
            parts.append(f"busy-{self.busy}")
        if self.recompute != "none":
            parts.append("-".join(["recompute", self.recompute, *(self.recompute_modules or [])]))
        if self.cpu_fraction:
            parts.append(f"cpu{self.cpu_fraction:g}")
        keys = self.engine | self.engine.get("megatron", {})
        parts += [f"{key}-{value}".lower() for key, value in keys.items() if key != "megatron"]
        return "/".join(parts)


def parse_engine(keys: list[str]) -> dict[str, Any]:
    """["a=true", "megatron.b=1"] → {"a": True, "megatron": {"b": 1}}; values as in a recipe. Raises UserError for what is none."""
    out: dict[str, Any] = {}
    for one in keys:
        key, _, value = one.partition("=")
        name, dot, field_name = key.partition(".")
        section, name = (out.setdefault(name, {}), field_name) if dot else (out, name)
        if not isinstance(section, dict):
            raise UserError(
                f"--engine {one}: before it, --engine says of {key.partition('.')[0]} that it is {section}"
            )
        section[name] = read_yaml(value, one).data
    return out


def setup_of(model: str, **options: Any) -> Setup:
    """A setup with the model's own row size where `tokens` is None."""
    tokens = options.pop("tokens", None)
    return replace(Setup(model, **options), tokens=tokens or MODELS[model].tokens)
