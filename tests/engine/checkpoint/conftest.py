"""What the tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models are written, each once."""
    return tmp_path_factory.mktemp("models")
