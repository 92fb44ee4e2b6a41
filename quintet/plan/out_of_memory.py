"""Errors that say that there is no memory left, and the message of such a rank: what held how much, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quintet.plan.offload import SPARE_SHARE

GIB = 1 << 30
NAMED = 4
"""Most settings that a message names."""
_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
"""What torch, NCCL, cuBLAS and the system say. NCCL's wording reads like the end of a connection otherwise."""
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMG]iB|\d+ bytes)")


@dataclass(frozen=True)
class Held:
    """Bytes of a device when it ran out. tensors: of this process. kept: that its allocator keeps for tensors to come, in pieces that
    were too small. elsewhere: of other processes, and what CUDA itself needs."""

    total: int
    tensors: int
    kept: int
    elsewhere: int


@dataclass(frozen=True)
class Needs:
    """What the memory formula says of a rank: parts, in bytes, {} where it says nothing; settings with which it needs less, and the bytes
    of that. The rest are words of the message: what a rank does that needs so much, what comes on top, and who else holds memory of the
    device and how they take less."""

    parts: Mapping[str, int] = field(default_factory=dict)
    settings: Sequence[tuple[str, int]] = ()
    doing: str = "trains"
    on_top: str = "a rollout"
    others: str = "a rollout beside it"
    less_of_others: str = (
        "A rollout in a process of its own takes less with a smaller rollout.memory_fraction, a native one with a smaller "
        "rollout.sequences_per_rank, and with rollout.sleep_level=2 little while others compute."
    )


def says_no_memory(error: BaseException) -> str | None:
    """Return what was asked for in vain, or the line that says so; None for an error of another kind."""
    text = str(error)
    if not isinstance(error, MemoryError) and not _NO_MEMORY.search(text):
        return None
    if asked := _ASKED.search(text):
        return f"{asked[1]} more were asked for"
    line = next((one for one in text.splitlines() if _NO_MEMORY.search(one)), "")
    return line.strip()[:200] or type(error).__name__


def out_of_memory(phase: str, said: str, held: Held | None, needs: Needs) -> str:
    """Return the message, which goes on after "Rank 3: ". said: by torch or NCCL. held: None on a CPU. Of the settings those are named that
    fit, or else those that need least."""
    where = "GPU memory" if held else "memory"
    text = f"out of {where} in {phase} ({said})."
    if held:
        text += (
            f" Of the device's {held.total / GIB:.1f} GiB this process's tensors held {held.tensors / GIB:.1f}, its allocator kept "
            f"{held.kept / GIB:.1f} for more, and {held.elsewhere / GIB:.1f} were other processes' ({needs.others}) and CUDA's own."
        )
    planned = sum(needs.parts.values())
    if needs.parts:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needs.parts.items())
        text += (
            f"\nWhile it {needs.doing} the fullest rank needs about {planned / GIB:.1f} GiB by the memory formula ({parts}), and "
            f"{needs.on_top} on top."
        )
    if needs.settings:
        room = (1 - SPARE_SHARE) * (held.total - held.elsewhere) if held else 0
        fitting = [one for one in needs.settings if one[1] <= room]
        if planned <= room or not fitting:
            # Nothing tells what would do.
            room, fitting = 0, sorted(needs.settings, key=lambda one: one[1])
        named = "; ".join(f"{key} ({size / GIB:.1f} GiB)" for key, size in fitting[:NAMED])
        fits = f" and fits {room / GIB:.1f} GiB" if room else ""
        text += f"\nWhat needs less{fits}, by the same formula: {named}."
    if held and held.elsewhere > held.total // 4:
        text += "\n" + needs.less_of_others
    return text
