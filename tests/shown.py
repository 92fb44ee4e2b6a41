"""What documentation shows of `quintet check RECIPE …`, and whether that is what comes out."""

from __future__ import annotations

import re
import shlex

import pytest


def commands(page: str) -> list[tuple[str, str]]:
    """Arguments and shown output of each `$ quintet check` in a page's console blocks."""
    return [
        (arguments, said)
        for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)
        for part in block.replace("\\\n", "").split("$ quintet check ")[1:]
        for arguments, _, said in [part.partition("\n")]
    ]


def run_as_shown(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    """Run the command here; what is shown, between its ellipses, must be what comes out, in order."""
    from quintet.cli import main

    code = main(["check", *shlex.split(arguments)])
    out = " ".join(capsys.readouterr().err.split())
    pieces = [" ".join(piece.split()) for piece in said.split("…")]
    assert code == (2 if "error:" in said else 0), out
    assert out.startswith(pieces[0]), out
    assert out.endswith(pieces[-1]), out
    end = 0
    for piece in pieces:
        assert piece in out[end:], f"{piece!r} is not in {out[end:]!r}"
        end = out.index(piece, end) + len(piece)
