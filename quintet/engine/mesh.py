"""Process groups of one layout.

A `Mesh` is what megatron-core calls a ProcessGroupCollection, with this rank's coordinates. It is built from
the layout alone, passed to every constructor, and never stored in process-global state, so meshes of different
layouts live side by side. Ranks are ordered tp fastest, then cp, dp, and pp slowest, as megatron-core does. The same
ranks of a stage are ordered a second time for experts: etp fastest, then ep, then expert data parallel (edp).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.packing.plan import cell_sizes

if TYPE_CHECKING:  # what reads shards of a rank elsewhere has no need of megatron-core
    from megatron.core.process_groups_config import ProcessGroupCollection

AXES = ("tp", "cp", "dp", "pp")  # fastest first
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the mesh axes; tp * cp * dp * pp is the number of ranks, and so is etp * ep * edp * pp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    dynamic_cp: bool = False
    """Whether fewer ranks than cp may share a row: cp is a power of two, and so are they."""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def cp_sizes(self) -> list[int]:
        """How many ranks may share a row, ascending."""
        return cell_sizes(self.cp) if self.dynamic_cp else sorted({1, self.cp})

    def sharing(self, size: int) -> list[list[int]]:
        """Return the groups of `size` neighbouring ranks along cp."""
        return [
            group[begin : begin + size] for group in self.partition("cp") for begin in range(0, self.cp, size)
        ]

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on each axis."""
        return self._along(AXES, rank) | self._along(EXPERT_AXES, rank)

    def _along(self, axes: tuple[str, ...], rank: int) -> dict[str, int]:
        found = {}
        for axis in axes:
            size = getattr(self, axis)
            found[axis] = rank % size
            rank //= size
        return found

    def partition(self, *axes: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along `axes`, ordered by the other axes."""
        order = EXPERT_AXES if {"etp", "ep", "edp"} & set(axes) else AXES
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            at = self.coordinates(rank)
            groups.setdefault(tuple(at[a] for a in order if a not in axes), []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout and the groups it belongs to."""

    sizes: Sizes
    rank: int
    groups: ProcessGroupCollection
    cp_groups: dict[int, dist.ProcessGroup | None] = field(default_factory=lambda: {1: None})
    """The ranks that share a row with this one, by how many they are."""

    @cached_property  # asked for every tensor
    def coordinates(self) -> dict[str, int]:
        return self.sizes.coordinates(self.rank)

    def at(self, axis: str) -> int:
        """Return this rank's coordinate on one axis."""
        return self.coordinates[axis]

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum over the ranks with other samples. Collective over dp."""
        total = values.clone()
        dist.all_reduce(total, group=self.groups.dp)
        return total

    @property
    def first_stage(self) -> bool:
        return self.at("pp") == 0

    @property
    def last_stage(self) -> bool:
        return self.at("pp") == self.sizes.pp - 1

    @property
    def owns_output(self) -> bool:
        """Whether this is the one rank of its dp rank whose results are reported."""
        return self.last_stage and self.at("tp") == 0 and self.at("cp") == 0


def alone() -> Mesh:
    """Return the mesh of a rank that holds everything. It has no groups: nothing of it communicates."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return Mesh(Sizes(), 0, ProcessGroupCollection())


_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_default: dist.ProcessGroup | None = None


def _group(partition: list[list[int]], rank: int, use: str = "") -> dist.ProcessGroup:
    """The group of `partition` that holds this rank. Every rank must call this with the same partitions in the
    same order; groups of the same ranks are made once in a process for each use."""
    global _default
    world: Any = dist.group.WORLD
    if _default is not world:  # a new default group: the old ones are gone
        _groups.clear()
        _default = world
    # Unless it is told, torch gives any other group half an hour.
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    for ranks in partition:
        key = use, tuple(ranks)
        if key not in _groups:
            _groups[key] = dist.new_group(list(ranks), timeout=timeout)
    mine = next(tuple(ranks) for ranks in partition if rank in ranks)
    return _groups[use, mine]


def build_mesh(sizes: Sizes) -> Mesh:
    """Make the groups of a layout. Collective: every rank of the default group calls it with the same sizes.

    Raises ValueError when the sizes do not multiply to the number of ranks.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, world = dist.get_rank(), dist.get_world_size()
    if sizes.ranks != world:
        raise ValueError(f"{sizes} need {sizes.ranks} ranks, there are {world}")
    if sizes.etp * sizes.ep * sizes.edp * sizes.pp != world:
        raise ValueError(f"{sizes}: etp * ep does not divide the {world // sizes.pp} ranks of a stage")

    def over(*axes: str) -> dist.ProcessGroup:
        return _group(sizes.partition(*axes), rank)

    ends = [[column[0], column[-1]] if sizes.pp > 1 else column for column in sizes.partition("pp")]
    middle = [[r] for column in sizes.partition("pp") for r in column[1:-1]]
    dp_cp = over("dp", "cp")
    groups = ProcessGroupCollection(
        tp=over("tp"),
        cp=over("cp"),
        dp=over("dp"),
        pp=over("pp"),
        dp_cp=dp_cp,
        mp=over("tp", "pp"),
        tp_cp=over("tp", "cp"),
        tp_dp_cp=over("tp", "dp", "cp"),
        # Embedding weights live on the first stage, and tied ones on the last too: their gradients are summed.
        embd=_group(ends + middle, rank),
        pos_embd=_group([[r] for r in range(world)], rank),
        ep=over("ep"),
        expt_tp=over("etp"),
        tp_ep=over("etp", "ep"),
        tp_ep_pp=over("etp", "ep", "pp"),
        expt_dp=over("edp"),
        intra_dp_cp=dp_cp,
        intra_expt_dp=over("edp"),
        intra_dist_opt=_group([list(range(world))], rank),
    )
    shared = {size: _group(sizes.sharing(size), rank) if size > 1 else None for size in sizes.cp_sizes}
    return Mesh(sizes, rank, groups, shared)


def with_own_gathers(mesh: Mesh) -> ProcessGroupCollection:
    """Return the groups of a mesh, with others of the same ranks where parameters are gathered: NCCL does in a group one thing after
    another, and a layer's exchange, where it is between the same ranks, would wait until all layers have their parameters. Collective."""
    groups = copy.copy(mesh.groups)
    for name, axes in (("dp_cp", ("dp", "cp")), ("expt_dp", ("edp",))):  # what core takes for it
        setattr(groups, name, _group(mesh.sizes.partition(*axes), mesh.rank, "gathers"))
    return groups
