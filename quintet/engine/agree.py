"""All ranks go on, or none does: work that can fail on one rank alone, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from quintet.errors import DamagedCheckpoint, UserError
from quintet.typed import Typed, Words

T = TypeVar("T")
_Kind = Literal["damage", "user", "bug"]
_FAILURE: Typed[tuple[_Kind, str] | None] = Typed(tuple[_Kind, Words] | None, "an error, or none")
_RAISED: dict[_Kind, type[Exception]] = {
    "damage": DamagedCheckpoint,
    "user": UserError,
    "bug": RuntimeError,
}


def gathered(kind: Typed[T], mine: T) -> list[T]:
    """Return every rank's value, in rank order. Collective over the default process group.

    Values travel as JSON in tensors of bytes, so nothing that arrives is run; equal ones are one object here. Raises QuintetError
    naming a rank whose value is of another type.
    """
    world = dist.get_world_size()
    data = torch.frombuffer(bytearray(kind.dump(mine)), dtype=torch.uint8)
    sizes = torch.empty(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]))
    longest = int(sizes.max())
    all_data = torch.empty(world * longest, dtype=torch.uint8)
    dist.all_gather_into_tensor(all_data, torch.nn.functional.pad(data, (0, longest - len(data))))
    rows = all_data.view(world, longest).numpy()
    said = [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]
    values: dict[bytes, T] = {}
    for rank, one in enumerate(said):
        if one not in values:  # ranks of other dp ranks hold the same
            values[one] = kind.load(one, f"rank {rank}")
    return [values[one] for one in said]


def exchanged(kind: Typed[T], mine: Sequence[T]) -> list[T]:
    """Return what every rank has for this one, in rank order. Collective over the default process group.

    mine: what this rank has for each. Values travel as in `gathered`, which see.
    """
    if len(mine) == 1:
        return list(mine)
    data = [kind.dump(one) for one in mine]
    sizes_out = torch.tensor([len(one) for one in data])
    sizes_in = torch.empty_like(sizes_out)
    dist.all_to_all_single(sizes_in, sizes_out)
    arrived = torch.empty(int(sizes_in.sum()), dtype=torch.uint8)
    out = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8)
    dist.all_to_all_single(arrived, out, sizes_in.tolist(), sizes_out.tolist())
    parts = arrived.split(sizes_in.tolist())
    return [kind.load(one.numpy().tobytes(), f"rank {rank}") for rank, one in enumerate(parts)]


def most(mine: Sequence[int]) -> list[int]:
    """Return, at each place, the largest number that any rank has there. Collective over the default process group; every rank has
    as many."""
    numbers = torch.tensor(mine, dtype=torch.int64)
    if numbers.numel():
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def run_on_all_or_raise(work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank, once it went well on every rank. Collective; `work` must not communicate.

    Raises on every rank when it failed on one: UserError with the first such rank's message where that was one,
    else RuntimeError; where it failed, what was raised there. DamagedCheckpoint only where no rank failed of anything else: a
    rank that cannot read says nothing of the files. Without a process group, just `work()`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:
        failure = error
    mine = None if failure is None else (_kind(failure), str(failure) or repr(failure))
    failed = [(rank, *one) for rank, one in enumerate(gathered(_FAILURE, mine)) if one is not None]
    if not failed:
        return result[0]
    rank, kind, message = next((one for one in failed if one[1] != "damage"), failed[0])
    if failure is not None and (kind == "damage" or _kind(failure) != "damage"):
        raise failure
    raise _RAISED[kind](f"rank {rank} failed: {message}" if kind == "bug" else message)


def _kind(failure: Exception) -> _Kind:
    if isinstance(failure, DamagedCheckpoint):
        return "damage"
    return "user" if isinstance(failure, UserError) else "bug"
