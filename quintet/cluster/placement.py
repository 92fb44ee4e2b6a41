"""Where ranks go: bundles of resources for Ray, and which actor becomes which rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.cluster.process_probe import Location

LOCAL_CPU_SHARE = 0.001
"""Of a core, asked of a local Ray for a CPU rank: ranks share the cores there, and more of them than cores may run."""


def rank_resources(device: str, is_local: bool, devices: int = 1) -> dict[str, float]:
    """Return what one rank asks of Ray: GPUs, or a core (a token share of one on a local CPU cluster)."""
    if device == "cuda":
        return {"GPU": float(devices)}
    return {"CPU": LOCAL_CPU_SHARE if is_local else 1.0}


def bundles(
    n_ranks: int, ranks_per_node: int | None, resources: Mapping[str, float]
) -> tuple[list[dict[str, float]], str]:
    """Return bundles and strategy of the placement group: one bundle a rank packed on as few nodes as hold them, or one
    bundle for each `ranks_per_node` ranks, every bundle on a node of its own."""
    if ranks_per_node is None:
        return [dict(resources)] * n_ranks, "PACK"
    if n_ranks % ranks_per_node:
        raise UserError(
            f"cluster.ranks_per_node={ranks_per_node} does not divide the {n_ranks} ranks: nodes would hold unequal numbers."
        )
    bundle = {kind: amount * ranks_per_node for kind, amount in resources.items()}
    return [bundle] * (n_ranks // ranks_per_node), "STRICT_SPREAD"


def check_fits(
    nodes: Sequence[Mapping[str, float]],
    n_ranks: int,
    ranks_per_node: int | None,
    resources: Mapping[str, float],
    title: str = "",
) -> None:
    """Raise a UserError when `nodes` (the resources of each, all or the free ones) cannot hold the ranks.

    title: of the group of ranks, where it is not the trainer's.
    """
    ((kind, amount),) = resources.items()
    room = [int((node.get(kind, 0.0) + 1e-6) / amount) for node in nodes]
    unit = f"{kind}s" if amount == 1 else f"groups of {amount:g} {kind}s" if amount > 1 else kind
    if ranks_per_node is None:
        if sum(room) < n_ranks:
            who = f"{title}: " if title else ""
            advice = "Free or add nodes." if title else "Lower cluster.ranks, or free or add nodes."
            raise UserError(
                f"{who}{n_ranks} ranks need {n_ranks} free {unit}, and the cluster has {sum(room)} on {len(nodes)} node(s). {advice}"
            )
        return
    fitting = sum(1 for free in room if free >= ranks_per_node)
    if fitting < n_ranks // ranks_per_node:
        raise UserError(
            f"{n_ranks} ranks at cluster.ranks_per_node={ranks_per_node} need {n_ranks // ranks_per_node} nodes with "
            f"{ranks_per_node} free {unit} each, and the cluster has {fitting} such node(s). "
            "Change cluster.ranks_per_node, or free or add nodes."
        )


def rank_order(locations: Sequence[Location]) -> list[int]:
    """Return the indices of the actors in the order of ranks: node by node, and by GPU within a node.

    Neighbouring ranks are the ones that talk most (tp is the innermost axis), so they belong on one node. Nodes
    keep the order in which they first appear.
    """
    first_seen: dict[str, int] = {}
    for location in locations:
        first_seen.setdefault(location.node_id, len(first_seen))
    keys = [(first_seen[loc.node_id], loc.gpus, index) for index, loc in enumerate(locations)]
    return [index for _, _, index in sorted(keys)]


def local_ranks(locations: Sequence[Location]) -> list[tuple[int, int]]:
    """Return, for locations in rank order, each rank's position on its node, and the number of ranks there."""
    totals = Counter(location.node_id for location in locations)
    seen: Counter[str] = Counter()
    result = []
    for location in locations:
        result.append((seen[location.node_id], totals[location.node_id]))
        seen[location.node_id] += 1
    return result


def needs_single_cuda_connection(device: str, layout: Any) -> bool:
    """Return whether kernels must be issued in one queue so that communication is not overtaken (tp or cp on CUDA)."""
    return device == "cuda" and layout is not None and (layout.tp > 1 or layout.cp > 1)
