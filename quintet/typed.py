"""Values on their way between processes: JSON of a declared type, never objects that unpickling would run.

What comes out of a socket or a store is checked against its type before anything else looks at it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar, get_args

import torch
from pydantic import GetCoreSchemaHandler, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from quintet.errors import QuintetError

T = TypeVar("T")

_DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}


def _dtype_named(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{name!r} is no dtype")
    return _DTYPES[name]


Dtype = Annotated[
    torch.dtype,
    PlainValidator(_dtype_named),
    PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."), return_type=str),
]
"""A dtype, by its name."""

Words = Annotated[str, PlainSerializer(lambda text: text.encode(errors="backslashreplace").decode())]
"""Text for people. A path in it may have bytes that are no UTF-8, and so no JSON."""


class AsPairs:
    """Marks a dict whose keys are no text, as in Annotated[dict[K, V], AsPairs()]: it travels as a list of (key, value)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        key, value = get_args(source)
        pairs = handler.generate_schema(list[tuple[key, value]])  # type: ignore[valid-type]
        listed = core_schema.plain_serializer_function_ser_schema(
            lambda found: list(found.items()), return_schema=pairs
        )
        return core_schema.no_info_after_validator_function(dict, pairs, serialization=listed)


class Typed(Generic[T]):
    """The values of one type as JSON. kind: the type, of dataclasses, tuples, lists, dicts, text and numbers; what: what messages
    call a value of it."""

    def __init__(self, kind: Any, what: str) -> None:
        self._kind, self.what = kind, what

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self._kind)

    def dump(self, value: T) -> bytes:
        """Return the JSON of a value."""
        return self._adapter.dump_json(value)

    def load(self, data: bytes, source: str) -> T:
        """Return the value of which this is the JSON. Raises QuintetError naming `source`, where it came from, when it is of
        another type, or no JSON."""
        try:
            return self._adapter.validate_json(data, strict=True, extra="forbid")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise QuintetError(
                f"what came from {source} is not {self.what}: {place + ': ' if place else ''}{first['msg']}"
            ) from None
