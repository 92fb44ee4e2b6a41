"""What a model family is: a Hugging Face config read into a shape, and a table of its weights.

A family is data. It says how `config.json` becomes a `ModelShape`, and which Hugging Face tensors make up
each megatron-core parameter. Loading, exporting, weight sync and fingerprints all follow from that table
(see `quintet.engine.shards`), so a name is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quintet.errors import UserError
from quintet.models.hf_config import HfConfig, read_json

Split = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up"]
"""How tensor parallelism cuts a megatron-core parameter.

replicated: every rank holds all of it.
rows: dim 0 is cut (a column-parallel linear's weight, in megatron's words).
columns: dim 1 is cut (a row-parallel linear's weight).
vocab: dim 0 is cut after padding it to a multiple of tp.
qkv: q, k and v interleaved by KV group along dim 0, cut between groups.
gate_up: gate and up stacked along dim 0, each cut by rows.
"""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base, and the scaling dictionary of the Hugging Face config if any."""

    theta: float = 10000.0
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model, as its family reads them from config.json."""

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

    @property
    def parameter_count(self) -> int:
        """Number of weights, tied embeddings counted once."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.heads + 2 * self.kv_heads)
        if self.qkv_bias:
            attention += d * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            attention += 2 * d
        layer = attention + 3 * h * self.ffn_hidden_size + 2 * h
        return self.layers * layer + self.vocab_size * h * (1 if self.tied_embeddings else 2) + h

    def flops_per_token(self, context: float) -> float:
        """Training FLOPs of one token: 6 per weight that multiplies, plus causal attention over `context` tokens.

        `context` is the mean number of keys a query sees (half the length of a causal sequence).
        """
        weights = self.parameter_count - (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)
        return 6.0 * weights + 12.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True)
class Weight:
    """One megatron-core parameter and the Hugging Face tensors it is made of.

    `name` holds the global layer number: `decoder.layers.7.…`. `hf` lists the tensors in their order inside
    the parameter (q, k, v; gate, up); `shapes` are their full shapes.
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: Split


class Family:
    """A model family. `architectures` are the names in config.json it answers to."""

    def __init__(
        self,
        name: str,
        architectures: tuple[str, ...],
        shape: Callable[[HfConfig], ModelShape],
        weights: Callable[[ModelShape], Iterator[Weight]],
    ) -> None:
        self.name = name
        self.architectures = architectures
        self._shape = shape
        self.weights = weights

    def shape(self, config: dict[str, Any], where: str = "config.json") -> ModelShape:
        """Shape of a model of this family from its config.

        Raises UserError for a key that is missing, of a wrong type, or that asks for what is not supported.
        """
        return self._shape(HfConfig(config, where))


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make a family known under each of its architectures."""
    for architecture in family.architectures:
        _FAMILIES[architecture] = family
    return family


def _load_builtin() -> None:
    from quintet.models import llama, qwen2, qwen3  # noqa: F401  (they register themselves)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory.

    Raises UserError when the directory or the file is missing, not UTF-8 or not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: model.path must be a Hugging Face directory with a config.json"
        )
    return read_json(file)


def family_of(config: dict[str, Any], where: str = "config.json") -> Family:
    """The family of a Hugging Face config.

    Raises UserError naming the families there are when this one is not among them.
    """
    _load_builtin()
    names = HfConfig(config, where).texts("architectures")
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    raise UserError(
        f"{where}: architecture {', '.join(names) or '(none given)'} is not supported; "
        f"supported are {', '.join(sorted(_FAMILIES))}"
    )


def family_named(name: str) -> Family:
    """A family by its own name, as `ModelShape.family` holds it."""
    _load_builtin()
    return next(f for f in _FAMILIES.values() if f.name == name)


def read_shape(path: Path) -> ModelShape:
    """Shape of the model in a Hugging Face directory."""
    config = read_config(path)
    where = str(Path(path) / "config.json")
    return family_of(config, where).shape(config, where)
