"""All ranks go on, or none does: work that can fail on one rank alone, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from quintet.errors import UserError

T = TypeVar("T")


def agreed(work: Callable[[], T]) -> T:
    """What `work` returns on this rank, once it went well on every rank. Collective; `work` must not communicate.

    Raises on every rank when it failed on one: UserError with the first such rank's message where that was one,
    else RuntimeError; where it failed, what was raised there. Without a process group, just `work()`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:
        failure = error
    said: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    mine = None if failure is None else (isinstance(failure, UserError), str(failure) or repr(failure))
    dist.all_gather_object(said, mine)
    if failure is not None:
        raise failure
    for rank, one in enumerate(said):
        if one is not None:
            for_user, message = one
            raise UserError(message) if for_user else RuntimeError(f"rank {rank} failed: {message}")
    return result[0]
