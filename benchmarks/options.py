"""Command line options that several benchmarks have: their types, and whether this machine can do what they ask."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quintet.errors import UserError

AXES = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp")


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
        if key not in AXES:
            raise argparse.ArgumentTypeError(f"there is no axis {key}; there are {', '.join(AXES)}")
        if key == "sp" and value.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"sp={value}: expected true or false")
        out[key] = value.lower() == "true" if key == "sp" else positive_int(value)
    return out


def layout_name(layout: Mapping[str, Any]) -> str:
    """The same in a record's case: "tp2-sp"; layers by stage as "stage_layers15+13"."""
    told = {
        key: "+".join(map(str, value)) if isinstance(value, list) else value for key, value in layout.items()
    }
    return "-".join(key if value is True else f"{key}{value}" for key, value in told.items() if value)


def end_at_sigterm() -> None:
    """Have SIGTERM end this process as an error does, and so what it has started: by itself Python leaves that behind, on the GPUs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def user_errors_told() -> Iterator[None]:
    """Tell what is wrong with what was asked for as quintet does, without a traceback."""
    try:
        yield
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def need_gpus(wanted: int, otherwise: str) -> None:
    """End where this machine has fewer GPUs. otherwise: what tries the plumbing without one."""
    import torch

    found = torch.cuda.device_count()
    if found < wanted:
        there = f"GPUs were found: {found}, and {wanted} are needed" if found else "no GPU was found"
        raise SystemExit(f"{there}; {otherwise} is a dry run on a CPU")


def need_whole(layout: Mapping[str, int | bool], gpus: int) -> None:
    """End where a layout cannot be spread over so many GPUs."""
    tp, pp, cp, ep = (int(layout.get(axis) or 1) for axis in ("tp", "pp", "cp", "ep"))
    experts = int(layout.get("etp") or tp) * ep * pp
    if gpus % math.lcm(tp * pp * cp, experts):
        raise SystemExit(
            f"tp {tp} × pp {pp} × cp {cp}, and of experts etp × ep × pp = {experts}, have to divide --gpus {gpus}"
        )
