"""What fields of sections are made of: types with their limits, and the class of every section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quintet.models.shape import LARGEST
from quintet.recipe.paths import expanded

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[int, Field(gt=0, le=1 << 20)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Timeout = Annotated[float, Field(gt=0, le=10**7)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(max_length=200)]
"""Of names of weights."""
UserPathText = Annotated[str, AfterValidator(expanded)]
"""A path where "~" is the home directory: no shell expands it inside a YAML file or after `key=`."""
UserPath = Annotated[Path, AfterValidator(lambda path: Path(expanded(str(path))))]


def _absolute(spec: str) -> str:
    place, colon, name = spec.rpartition(":")
    return f"{Path(expanded(place)).absolute()}:{name}" if colon and place.endswith(".py") else spec


UserCode = Annotated[str, AfterValidator(_absolute)]
"""module:name or file.py:name; a file by its absolute path, so that every process of a run finds it."""


class Section(BaseModel):
    """A recipe section: unknown keys are errors, and so are infinite numbers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
