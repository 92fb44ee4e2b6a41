"""A response's text while its tokens come: whole characters, no stop string, and in the end all of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quintet.data.text_pieces import INCOMPLETE, TextPieces, before_stop
from quintet.data.tokenizer import decoder
from tests.data.byte_tokenizer import byte_tokenizer

decode = decoder(byte_tokenizer())


def told(ids: list[int], *stop: str) -> list[str]:
    """The pieces of a response whose tokens come one after another."""
    pieces: list[str] = []
    told = TextPieces(decode, stop, pieces.append)
    for count in range(1, len(ids) + 1):
        told.add(ids[:count])
    text = decode(ids)
    for one in stop:
        text = text.split(one)[0]
    told.end(text)
    assert "".join(pieces) == text
    return pieces


def ids_of(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def test_each_character_comes_whole_and_as_soon_as_it_is_sure() -> None:
    assert told(ids_of("na€😀!")) == ["n", "a", "€", "😀", "!"]


def test_the_end_of_the_sequence_is_no_text() -> None:
    assert told([*ids_of("ab"), 0]) == ["a", "b"]


@pytest.mark.parametrize(
    ("stop", "pieces"),
    [(["END"], ["a", "E", "Eb"]), (["!"], ["a", "E", "E", "b", "E", "N", "D"]), (["bEND", "E"], ["a"])],
    ids=["held until it is another word", "none", "several"],
)
def test_no_part_of_a_stop_string_is_told(stop: list[str], pieces: list[str]) -> None:
    assert told(ids_of("aEEbEND"), *stop) == pieces


@given(
    st.lists(st.integers(0, 257), max_size=40), st.lists(st.sampled_from(["a", "ab", "ba", "é"]), max_size=2)
)
@example(ids_of("€")[:2] + ids_of("b"), [])
@example(ids_of("abab"), ["ba"])
def test_all_of_any_response_is_told_and_nothing_is_taken_back(ids: list[int], stop: list[str]) -> None:
    pieces = told(ids, *stop)
    assert all(pieces)
    if INCOMPLETE not in decode(ids):
        assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_response_ends_before_the_stop_string_that_begins_first() -> None:
    assert before_stop("a\nbc", ["b", "\nb"]) == "a"
    assert before_stop("abc", ["c", "b"]) == "a"
    assert before_stop("abc", []) == before_stop("abc", ["x"]) == "abc"
