"""What the whole test session shares: worker processes are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracle.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for tests that need several ranks without Ray: `pool.run(function, world_size, ...)`."""
    pool = Pool()
    yield pool
    pool.close()
