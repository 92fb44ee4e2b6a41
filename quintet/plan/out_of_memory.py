"""The message of a rank whose memory did not suffice: what held how much, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.plan.offload import SPARE_SHARE

GIB = 1 << 30
NAMED = 4
"""Most settings that a message names."""


@dataclass(frozen=True)
class Held:
    """Bytes of a device when it ran out. tensors: of this process. kept: that its allocator keeps for tensors to come, in pieces that
    were too small. elsewhere: of other processes, and what CUDA itself needs."""

    total: int
    tensors: int
    kept: int
    elsewhere: int


def out_of_memory(
    phase: str,
    said: str,
    held: Held | None,
    planned: Mapping[str, int] | None = None,
    settings: Sequence[tuple[str, int]] = (),
) -> str:
    """Return the message, which goes on after "Rank 3: ". said: by torch or NCCL. held: None on a CPU. planned: by `fullest_rank`, None for a
    process that does not train. settings: by `cheaper`; named are those that fit, or else those that need least."""
    where = "GPU memory" if held else "memory"
    text = f"out of {where} in {phase} ({said})."
    if held:
        text += (
            f" Of the device's {held.total / GIB:.1f} GiB this process's tensors held {held.tensors / GIB:.1f}, its allocator kept "
            f"{held.kept / GIB:.1f} for more, and {held.elsewhere / GIB:.1f} were other processes' (a rollout beside it) and CUDA's own."
        )
    if planned is not None:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in planned.items())
        total = sum(planned.values()) / GIB
        text += f"\nWhile it trains the fullest rank needs about {total:.1f} GiB by the memory formula ({parts}), and a rollout on top."
    if settings:
        room = (1 - SPARE_SHARE) * (held.total - held.elsewhere) if held else 0
        fitting = [one for one in settings if one[1] <= room]
        if planned is None or sum(planned.values()) <= room or not fitting:
            # Nothing tells what would do.
            room, fitting = 0, sorted(settings, key=lambda one: one[1])
        named = "; ".join(f"{key} ({size / GIB:.1f} GiB)" for key, size in fitting[:NAMED])
        fits = f" and fits {room / GIB:.1f} GiB" if room else ""
        text += f"\nWhat needs less{fits}, by the same formula: {named}."
    if held and held.elsewhere > held.total // 4:
        text += (
            "\nA rollout in a process of its own takes less with a smaller rollout.memory_fraction, and with rollout.sleep_level=2 little while "
            "others compute."
        )
    return text
