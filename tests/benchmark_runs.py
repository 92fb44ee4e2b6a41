"""Benchmarks run as from a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def benchmark(name: str, *options: str) -> str:
    """Run `python -m benchmarks.NAME OPTIONS` to its good end, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        # An engine that was in this process has its children look for no modules in the working directory.
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
