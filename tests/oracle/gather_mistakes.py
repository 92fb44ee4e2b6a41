"""What `tests.oracle.mistakes` does wrong about parameters that are gathered while layers compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Late:
    """A gather whose result comes when it is waited for, and not before: whoever does not wait reads what was, and what is written
    meanwhile is lost."""

    def __init__(self, bucket: Any) -> None:
        self._bucket, self._before = bucket, [one.param_data.clone() for one in bucket.buckets]
        type(bucket).start_param_sync(bucket, force_sync=True)
        self._swap()

    def wait(self) -> None:
        self._swap()

    def _swap(self) -> None:
        for one, other in zip(self._bucket.buckets, self._before, strict=True):
            now = one.param_data.clone()
            one.param_data.copy_(other)
            other.copy_(now)


def gather_late(buckets: Iterable[Any]) -> None:
    """Have these buckets come as late as they may."""
    for one in buckets:
        one.start_param_sync = lambda one=one, **how: setattr(one, "param_gather_handle", Late(one))


def layers_do_not_wait(original: Any, module: Any, buckets: list[Any]) -> None:
    gather_late(buckets)


def heads_do_not_wait(original: Any, gather: Any, chunks: Any) -> None:
    """What layers and norms read is waited for, what the head reads besides is not."""
    original(gather, chunks)
    gather_late(gather._buckets)
    for chunk in chunks:
        chunk.module._forward_hooks.clear()
