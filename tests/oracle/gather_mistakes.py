"""What `tests.oracle.mistakes` does wrong about parameters that are gathered while layers compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Late:
    """A gather that is done when it is waited for, and not before: whoever does not wait reads what was."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket

    def wait(self) -> None:
        self.bucket.param_gather_handle = None
        type(self.bucket).start_param_sync(self.bucket, force_sync=True)


def gather_late(buckets: Iterable[Any]) -> None:
    """Have these buckets come as late as they may."""
    for one in buckets:
        one.start_param_sync = lambda one=one: setattr(one, "param_gather_handle", Late(one))


def layers_do_not_wait(original: Any, module: Any, buckets: list[Any]) -> None:
    gather_late(buckets)


def heads_do_not_wait(original: Any, gather: Any, chunks: Any) -> None:
    """What layers and norms read is waited for, what the head reads besides is not."""
    original(gather, chunks)
    gather_late(gather._buckets)
    for chunk in chunks:
        chunk.module._forward_hooks.clear()
