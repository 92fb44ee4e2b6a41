"""What a model family is: a Hugging Face config read into a shape, and a table of its weights.

A family is data. It says how `config.json` becomes a `ModelShape`, and which Hugging Face tensors make up
each megatron-core parameter. Loading, exporting, weight sync and fingerprints all follow from that table
(see `quintet.engine.weights.shards`), so a name is written down once.

    @register
    class Mine(Family):
        name = "mine"
        architectures = ("MineForCausalLM",)

        def shape(self, config: HfConfig) -> ModelShape:
            return dense_shape(config, self.name, qk_norm=True)
"""

from __future__ import annotations

import functools
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from quintet.errors import UserError
from quintet.models.hf_config import HfConfig, read_json
from quintet.models.shape import MOST_EXPERT_LAYERS, ModelShape
from quintet.models.table import MtpNames, Names, decoder_weights
from quintet.models.weight import Weight

VALUE_MODEL = "ForSequenceClassification"
"""The end of a value model's architecture, where a language model's is ForCausalLM: transformers' class with one label
has the scalar head."""


class Family(ABC):
    """A model family: subclass it and `register` the subclass."""

    name: ClassVar[str]
    """What `ModelShape.family` holds."""
    architectures: ClassVar[tuple[str, ...]]
    """The names in config.json that it answers to."""
    names: ClassVar[Names] = Names()
    """What its checkpoints call the parts of a decoder."""
    defaults: ClassVar[dict[str, Any]] = {}
    """What transformers' class takes for keys that config.json leaves out, where that is not what `dense_shape` takes."""

    @abstractmethod
    def shape(self, config: HfConfig) -> ModelShape:
        """Return the shape of a language model of this family.

        Raises UserError for a key that is missing, of a wrong type, or that asks for what is not supported.
        """

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Return every weight of a model, in layer order."""
        return decoder_weights(shape, self.names)

    def shape_of(self, config: dict[str, Any], where: str = "config.json") -> ModelShape:
        """Return the shape of a model of this family, a language model or a value model, from its config.

        Raises UserError as `shape` does, and when `shape` fails or gives another family's.
        """
        given = {key: value for key, value in config.items() if value is not None}
        read = HfConfig(config | self.defaults | given, where)
        try:
            shape = self.shape(read)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{where}: {_title(type(self))}.shape raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from error
        if not isinstance(shape, ModelShape) or shape.family != self.name:
            made = f"one of the family {shape.family!r}" if isinstance(shape, ModelShape) else repr(shape)
            raise UserError(
                f"{_title(type(self))}.shape must give a ModelShape of the family {self.name!r}, not {made}"
            )
        if shape.moe and (layers := shape.layers + shape.mtp_layers) * shape.moe.experts > MOST_EXPERT_LAYERS:
            raise UserError(
                f"{where}: {layers} layers of {shape.moe.experts} experts are more than {MOST_EXPERT_LAYERS:,} experts"
            )
        if not any(name.endswith(VALUE_MODEL) for name in read.texts("architectures")):
            return shape
        labels = config.get("id2label")
        if isinstance(labels, dict) and len(labels) != 1:
            raise read.wrong("id2label", "one label: a value model's head gives one number a token")
        return shape.as_value_model()


_FAMILIES: dict[str, Family] = {}
_Class = TypeVar("_Class", bound=type[Family])


def register(cls: _Class) -> _Class:
    """Make a family known by its name and under each of its architectures. A class decorator.

    A class of the same module and name replaces the one registered before: its file was loaded again.

    Raises UserError when it leaves something out, or another family has the name or one of the architectures.
    """
    _load_builtin()
    _check(cls)
    others = {name: one for name, one in _FAMILIES.items() if _title(type(one)) != _title(cls)}
    for known in others.values():
        if known.name == cls.name:
            raise UserError(f"{_title(cls)}: its name {cls.name!r} is that of {_title(type(known))}")
        for architecture in set(known.architectures) & set(cls.architectures):
            raise UserError(
                f"{_title(cls)}: {architecture} is an architecture of {_title(type(known))} already; "
                "a checkpoint's config.json must say which family it is of"
            )
    _FAMILIES.clear()
    _FAMILIES.update(others | {cls.name: cls()})
    return cls


def _check(cls: type[Family]) -> None:
    name, architectures = getattr(cls, "name", None), getattr(cls, "architectures", None)
    if not isinstance(name, str) or not name:
        raise UserError(f'{_title(cls)}: a family has a name, such as name = "mine"')
    if not isinstance(architectures, tuple) or not all(isinstance(one, str) for one in (*architectures, "")):
        raise UserError(
            f"{_title(cls)}: a family has the architectures it answers to in config.json, such as architectures = "
            '("MineForCausalLM",)'
        )
    if not architectures:
        raise UserError(
            f"{_title(cls)}: architectures is empty; no config.json could say that it is of this family"
        )
    if cls.__abstractmethods__:
        raise UserError(f"{_title(cls)}: {', '.join(sorted(cls.__abstractmethods__))}() is not defined")


def _title(cls: type[Family]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _load_builtin() -> None:
    from quintet.models import (  # noqa: F401  (they register)
        deepseek_v3,
        glm4_moe,
        gpt_oss,
        llama,
        mimo,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of a Hugging Face directory.

    Raises UserError when the directory or the file is missing, not UTF-8 or not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        trained = Path(path) / "checkpoint"
        of_a_run = f"; that of the run is {trained}" if (trained / "config.json").is_file() else ""
        raise UserError(
            f"{file} does not exist: name a Hugging Face directory with a config.json, or as model.path one of the hub, owner/name"
            f"{of_a_run}"
        )
    return read_json(file)


def family_of(config: dict[str, Any], where: str = "config.json") -> Family:
    """Return the family of a Hugging Face config.

    Raises UserError naming the families there are when this one is not among them.
    """
    _load_builtin()
    names = HfConfig(config, where).texts("architectures")
    known = {architecture: one for one in _FAMILIES.values() for architecture in one.architectures}
    for name in names:
        if (found := known.get(name.replace(VALUE_MODEL, "ForCausalLM"))) is not None:
            return found
    raise UserError(
        f"{where}: architecture {', '.join(names) or '(none given)'} is not supported; "
        f"supported are {', '.join(sorted(known))}, and what model.family names"
    )


def family_named(name: str) -> Family:
    """Return a family by its own name, as `ModelShape.family` holds it."""
    _load_builtin()
    return _FAMILIES[name]


def mtp_names(shape: ModelShape) -> MtpNames:
    """Return what the family says of its layers for multi-token prediction; defaults where it says nothing."""
    return family_named(shape.family).names.mtp or MtpNames()


def families_with_mtp() -> list[str]:
    """Return the names of the families whose models may have layers for multi-token prediction."""
    _load_builtin()
    return sorted(name for name, family in _FAMILIES.items() if family.names.mtp is not None)


def table_of(shape: ModelShape) -> tuple[Weight, ...]:
    """Return the table of a model's weights, in layer order, which the latest callers share: of the largest models it has 50,000."""
    return _table(family_named(shape.family), shape)


@functools.lru_cache(maxsize=2)
def _table(family: Family, shape: ModelShape) -> tuple[Weight, ...]:
    return tuple(family.weights(shape))


def trained_elements(shape: ModelShape) -> tuple[int, int]:
    """Return the trained weights of a model, and those that one token meets."""
    return _elements(family_named(shape.family), shape)


@functools.lru_cache(maxsize=64)
def _elements(family: Family, shape: ModelShape) -> tuple[int, int]:
    counts = {True: 0, False: 0}
    for weight in _table(family, shape):
        counts[weight.split.startswith("expert_")] += weight.elements if weight.trained else 0
    met = counts[True] * shape.moe.top_k // shape.moe.experts if shape.moe else 0
    return counts[False] + counts[True], counts[False] + met


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory."""
    config = read_config(path)
    where = str(Path(path) / "config.json")
    return family_of(config, where).shape_of(config, where)


def trained_shape(path: Path, *, mtp: bool = False) -> ModelShape:
    """Return the shape of what is trained of the model in a Hugging Face directory, and generated with. mtp: its layers for
    multi-token prediction, which are left on the disk otherwise, are loaded too."""
    shape = read_shape(path)
    return shape if mtp else shape.without_mtp()
