"""What a model family is: a Hugging Face config read into a shape, and a table of its weights.

A family is data. It says how `config.json` becomes a `ModelShape`, and which Hugging Face tensors make up
each megatron-core parameter. Loading, exporting, weight sync and fingerprints all follow from that table
(see `quintet.engine.shards`), so a name is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quintet.errors import UserError
from quintet.models.hf_config import HfConfig, read_json
from quintet.models.shape import ModelShape as ModelShape

Split = Literal[
    "replicated", "rows", "columns", "vocab", "qkv", "gate_up", "expert_gate_up", "expert_columns"
]
"""How tensor parallelism cuts a megatron-core parameter.

replicated: every rank holds all of it.
rows: dim 0 is cut (a column-parallel linear's weight, in megatron's words).
columns: dim 1 is cut (a row-parallel linear's weight).
vocab: dim 0 is cut after padding it to a multiple of tp.
qkv: q, k and v interleaved by KV group along dim 0, cut between groups.
gate_up: gate and up stacked along dim 0, each cut by rows.
expert_gate_up, expert_columns: the same of one expert, cut over etp; only the ep rank of that expert holds it.
"""


VALUE_MODEL = "ForSequenceClassification"
"""The end of a value model's architecture, where a language model's is ForCausalLM: transformers' class with one label
has the scalar head."""


@dataclass(frozen=True)
class Weight:
    """One megatron-core parameter and the Hugging Face tensors it is made of.

    `name` holds the global layer number: `decoder.layers.7.…`, and an expert's number among all:
    `…mlp.experts.42.linear_fc1.weight`. `hf` lists the tensors in their order inside the parameter (q, k, v;
    gate, up); `shapes` are their full shapes. What is not `trained` is a buffer in fp32, whatever the others are.
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: Split
    trained: bool = True


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
        read = HfConfig(config, where)
        shape = self._shape(read)
        if not any(name.endswith(VALUE_MODEL) for name in read.texts("architectures")):
            return shape
        labels = config.get("id2label")
        if isinstance(labels, dict) and len(labels) != 1:
            raise read.wrong("id2label", "one label: a value model's head gives one number a token")
        return shape.as_value_model()


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make a family known under each of its architectures."""
    for architecture in family.architectures:
        _FAMILIES[architecture] = family
    return family


def _load_builtin() -> None:
    from quintet.models import deepseek_v3, llama, qwen2, qwen3, qwen3_moe  # noqa: F401  (they register)


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
        causal = name.replace(VALUE_MODEL, "ForCausalLM")
        if causal in _FAMILIES:
            return _FAMILIES[causal]
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
