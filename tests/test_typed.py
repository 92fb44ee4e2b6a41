"""What travels between processes is what was sent, or refused by name: JSON of a declared type."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import torch

from quintet.errors import QuintetError
from quintet.typed import AsPairs, Dtype, Typed, Words

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    name: str
    box: Box
    dtype: Dtype = torch.bfloat16


@dataclass(frozen=True)
class Told:
    parts: list[Part]
    names: set[str] = field(default_factory=set)
    prints: Annotated[dict[tuple[str, Box], int], AsPairs()] = field(default_factory=dict)
    words: Words | None = None


TOLD: Typed[Told] = Typed(Told, "what is told")


def test_a_value_comes_back_as_it_was():
    part = Part("a", ((0, 3), (5, 7)), torch.float8_e4m3fn)
    told = Told([part, Part("b", ())], {"x", "y"}, {("a", ((0, 3),)): -(2**63), ("b", ()): 7}, "so")
    assert TOLD.load(TOLD.dump(told), "rank 1") == told
    assert TOLD.load(TOLD.dump(Told([], words="a\udcff.txt")), "rank 1").words == "a\\udcff.txt"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps(Told([])), "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b'{"parts": [{"name": "a", "box": [[0, "3"]]}]}', "parts.0.box.0.1: "),
        (b'{"parts": [{"name": 7, "box": []}]}', "parts.0.name: "),
        (b'{"parts": [{"name": "a", "box": [], "dtype": "load"}]}', "'load' is no dtype"),
        (b'{"parts": [], "more": 1}', "more: "),
        (b'{"parts": [], "prints": [["a", 1]]}', "prints.0.0: "),
        (b'{"names": []}', "parts: Field required"),
    ],
)
def test_anything_else_is_refused_with_where_it_came_from(data, said):
    with pytest.raises(QuintetError) as caught:
        TOLD.load(data, "rank 1")
    assert str(caught.value).startswith("what came from rank 1 is not what is told: ")
    assert said in str(caught.value)
