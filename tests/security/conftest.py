"""What several files of this room share."""

from tests.sync.conftest import alone

__all__ = ["alone"]
