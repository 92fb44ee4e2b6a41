"""Types of command line options that several benchmarks have."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def parse_layout(text: str) -> dict[str, int | bool]:
    """ "tp=2,sp=true" → {"tp": 2, "sp": True}."""
    out: dict[str, int | bool] = {}
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        out[key] = value.lower() == "true" if key == "sp" else positive_int(value)
    return out


def layout_name(layout: dict[str, int | bool]) -> str:
    """The same in a record's case: "tp2-sp"."""
    return "-".join(key if value is True else f"{key}{value}" for key, value in layout.items() if value)
