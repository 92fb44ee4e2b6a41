"""Recipe text: values by the rules of YAML 1.2, lines, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.recipe.yaml_text import read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5E+3", 1500.0),
        ("-.5", -0.5),
        ("8_192", 8192),
        ("0x10", 16),
        ("010", 10),
        ("off", "off"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("2026-11-21", "2026-11-21"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("[a, 1, null]", ["a", 1, None]),
    ],
)
def test_values_follow_yaml_1_2(text: str, value: object) -> None:
    read = read_yaml(text, "x").data
    assert read == value
    assert type(read) is type(value)


def test_lines_of_keys() -> None:
    lines = read_yaml("a: 1\n# remark\nb:\n  c: 2\n  d: [1,\n    2]\n", "x").lines
    assert lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "d"): 5,
        ("b", "d", "0"): 5,
        ("b", "d", "1"): 6,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", r"x:4: key b.c is given twice; the first is on line 3"),
        ("a: [1", r"x:1: not valid YAML"),
        ("a: 1\n\tb: 2", r"x:2: not valid YAML"),
        ("1: a", r"x:1: keys are text"),
        ("a: !!python/name:os.system", r"x:1: the YAML tag"),
        ("a: &a [*a]", r"x:1: an alias that contains itself"),
        ("a: 1\n---\nb: 2", r"x:2: not valid YAML"),
        ("a: [*.gate.weight]", r'x:1: not valid YAML: .* begins with \* stands in quotes: \["\*'),
        ("a:\n- *gate", r"x:2: not valid YAML: found undefined alias.* stands in quotes"),
        ("a: \x00", r"x: not a text file"),
    ],
)
def test_malformed_text_names_the_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_yaml(text, "x")


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_data = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(_data)
def test_written_yaml_reads_back_the_same(data: object) -> None:
    assert read_yaml(write_yaml(data), "x").data == data


@given(
    st.sampled_from(
        ["1e-6", "1_000", "off", "null", "~", "0o7", "0x1F", ".inf", "1.", "true", "No", "=", "<<", ""]
    )
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert read_yaml(write_yaml({"key": text, text: 1}), "x").data == {"key": text, text: 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n- " + "[" * 40 + "]" * 40, r"x:2: not valid YAML: nested more than 32 levels deep"),
        (
            "a: &a " + "x" * 60_000 + "\nb: [*a,\n *a, *a]",
            r"x:1: with its aliases written out, longer than 131,072",
        ),
        ("a:\n" + "  b\n" * 30_000, r"x: longer than 65,536 characters"),
        ("a: [" + "1," * 1001 + "]", r"x:1: 1,001 values in one place; at most 1,000"),
        ("a: 1\nb: " + "1" * 65, r"x:2: a number of 65 characters"),
        ("a: !!int 9e", r"x:1: '9e' is not what its YAML tag tag:yaml.org,2002:int says"),
        ("a: !!bool maybe", r"x:1: 'maybe' is not what its YAML tag"),
        (r'a: "\ud800"', r"x:1: half of a surrogate pair is no character"),
    ],
)
def test_what_would_take_all_time_or_memory_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_yaml(text, "x")


def test_what_stays_below_the_limits_is_read() -> None:
    read = read_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: " + "[" * 30 + "]" * 30 + "\nd: " + "9" * 64, "x").data
    assert read["b"] == [[1, 2], [1, 2]]
    assert read["d"] == int("9" * 64)
    assert len(read_yaml("# " + "x" * 60_000 + "\na: [" + "1, " * 1000 + "]", "x").data["a"]) == 1000
