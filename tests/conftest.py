"""What the whole test session shares: worker processes are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.oracle.pool import Pool

# Wall-clock deadlines per example fail on a busy machine; derandomized, a red test is red for everyone.
settings.register_profile("quintet", deadline=None, derandomize=True)
settings.load_profile("quintet")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for tests that need several ranks without Ray: `pool.run(function, world_size, ...)`."""
    pool = Pool()
    yield pool
    pool.close()
