"""A run as a program of its own, all its processes, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.patience import BUSY
from tests.train.runs import ROOT


class Run:
    """`python -m` something, with a temporary directory of its own below `scratch`."""

    def __init__(self, command: Sequence[str], scratch: Path) -> None:
        self.scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", "TMPDIR": str(scratch)},
        )
        self.said = ""
        self.family: list[psutil.Process] = []
        self.ray_directory: Path | None = None

    def until(self, text: str) -> None:
        """Read what it prints until a line holds `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if text in line:
                return
        raise AssertionError(f"it ended with {self.process.wait()}:\n{self.said}")

    def look(self) -> None:
        """Note its processes, and its Ray's directory, as long as they are there."""
        with suppress(psutil.Error):
            me = psutil.Process(self.process.pid)
            self.family = sorted({*self.family, *me.children(recursive=True)}, key=lambda one: one.pid)
            for raylet in self.of("raylet"):
                self.ray_directory = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"]).parent

    def of(self, name: str) -> list[psutil.Process]:
        """Its processes whose title begins so."""
        return [one for one in self.family if one.is_running() and one.name().startswith(name)]

    def end(self, within_s: float) -> int:
        """Wait for it, read the rest, and return its exit code."""
        began = time.monotonic()
        rest, _ = self.process.communicate(timeout=60 * BUSY)
        self.said += rest
        assert time.monotonic() - began < within_s * BUSY, self.said
        return self.process.returncode

    def nothing_left(self, within_s: float) -> None:
        """Wait until all of its processes and its Ray's directory are gone."""
        deadline = time.monotonic() + within_s * BUSY
        assert self.ray_directory is not None
        while left := [
            one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        while self.ray_directory.exists():
            assert time.monotonic() < deadline, list(self.ray_directory.rglob("*"))
            time.sleep(0.05)
