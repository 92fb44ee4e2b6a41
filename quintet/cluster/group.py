"""A worker group: the ranks that run one program together, and how the controller calls them."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from quintet.cluster import placement, ray_compat
from quintet.cluster import process_probe as probe
from quintet.cluster.calls import PendingCall, StreamingCall, first_answers
from quintet.cluster.cluster import Cluster
from quintet.cluster.environment import LOOPBACK, rank_environment, threads_per_rank
from quintet.cluster.failures import Failure, explain
from quintet.cluster.lane import HEARD, LANE
from quintet.cluster.process_probe import Location
from quintet.cluster.progress import KEY_VARIABLE, group_prefix
from quintet.cluster.rank_actor import RankActor, RankSetup
from quintet.cluster.verbs import Asked, Call, Ranks, Returns
from quintet.cluster.worker import Place, Worker
from quintet.errors import QuintetError, UserError, WorkerFailure
from quintet.recipe.schema import Layout

import ray  # isort: skip
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

ROOM_TIMEOUT_S = 15.0
HEARD_WITHIN_S = 0.05
PLACEMENT_TIMEOUT_S = 120.0
REMOTE_PROBE_TIMEOUT_S = 10.0
_names, _words = itertools.count(), itertools.count()


class WorkerGroup(Ranks):
    """One `worker_class(place, **kwargs)` a rank, in a process of its own, placed and set up.

    A class given as a `StandIn` is imported on the ranks alone, so the controller is spared its imports.
    `layout` (of the recipe) decides whether CUDA needs a single connection; `name` names the logs, and with `named_in_messages` the
    ranks in messages too ("rollout-1 rank 0"); `pack` puts them on as few nodes as hold them, whatever
    cluster.ranks_per_node says. A rank has `devices_per_rank` devices of its own; or, with `colocate_with`, those of
    the ranks of another group that it sits beside, on their node. `cancel`, once set by another thread, ends the start.
    Raises UserError when the cluster cannot hold the ranks, WorkerFailure when a rank fails to start, or the start is given up.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: type[Worker],
        n_ranks: int,
        *,
        layout: Layout | None = None,
        name: str | None = None,
        named_in_messages: bool = False,
        pack: bool = False,
        devices_per_rank: int = 1,
        colocate_with: Sequence[Sequence[Location]] | None = None,
        cancel: threading.Event | None = None,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster
        self.n_ranks = n_ranks
        self.name = name or f"{worker_class.__name__.lower()}-{next(_names)}"
        self._title = self.name if named_in_messages else ""
        self._seats: list[Any] = []
        self._processes: dict[int, probe.RankProcess] = {}
        self._coords: list[dict[str, int]] | None = None
        self._placement: Any = None
        self._broken: WorkerFailure | None = None
        self._stopped: dict[int, float] = {}
        self._posts = ""
        self._cancel = cancel or threading.Event()
        cluster.adopt(self)
        try:
            per_node = None if pack else cluster.settings.ranks_per_node
            self.locations = (
                self._place(devices_per_rank, per_node)
                if colocate_with is None
                else self._place_beside(colocate_with)
            )
            """Where each rank is."""
            self._build(worker_class, layout, kwargs)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def coords(self) -> list[dict[str, int]]:
        """Return each rank's position on the mesh axes, as its worker tells it; asked once."""
        if self._coords is None:
            self._coords = self.all(Worker.coords)()
        return self._coords

    def posted(self, ranks: Sequence[int]) -> int:
        """Return units that these ranks say they have done in the call under way (`quintet.cluster.progress`), summed."""
        return sum(int(count or 0) for count in ray_compat.posted([f"{self._posts}{rank}" for rank in ranks]))

    def forget_posts(self) -> None:
        """Forget the counts of a call that is over: they must not be taken for the next one's."""
        ray_compat.forget_posts(self._posts)

    def stalled(self, ranks: Sequence[int], phase: str) -> list[Failure]:
        """Return the failures of those ranks that have been stopped for longer than a collective may wait; the first time that
        one is seen stopped, the user is told."""
        limit, now, failures = self.cluster.settings.collective_timeout_s, time.monotonic(), []
        found = self._on_nodes(ranks, probe.stopped)
        self._stopped = {rank: self._stopped.get(rank, now) for rank in found}
        for rank, text in found.items():
            if now - self._stopped[rank] >= limit:
                told = f"{text}, for longer than {limit:g} s (cluster.collective_timeout_s)"
                failures.append(Failure(rank, told))
            elif self._stopped[rank] == now:
                who = f"{self._title} rank {rank}" if self._title else f"rank {rank}"
                self.cluster.say(
                    f"warning: {who}, in {phase}: {text}. SIGCONT wakes it; it is given up after {limit:g} s"
                )
        return failures

    def answered(self, rank: int) -> None:
        """Note that a rank goes on: a later stop of it is another one."""
        self._stopped.pop(rank, None)

    def inspect(self, ranks: Sequence[int] | None = None) -> dict[int, probe.Report]:
        """Return the stacks, state and log tail of each rank, whatever it is doing; answers within a few seconds."""
        asked = list(self._processes) if ranks is None else list(ranks)
        found: dict[int, probe.Report] = self._on_nodes(asked, probe.inspect)
        return {rank: found.get(rank, _NODE_GONE) for rank in asked}

    def _on_nodes(
        self, ranks: Sequence[int], look: Callable[[list[probe.RankProcess]], dict[int, Any]]
    ) -> dict[int, Any]:
        """What a function of the probe tells of these ranks' processes; nothing of those whose node is gone."""
        by_node: dict[str, list[probe.RankProcess]] = {}
        for rank in ranks:
            process = self._processes[rank]
            by_node.setdefault(process.at.node_id, []).append(process)
        calls = [_on_node(node, look, there) for node, there in by_node.items()]
        return {rank: told for call in calls for rank, told in (call() or {}).items()}

    def close(self) -> None:
        """End the group's processes and give its place back."""
        if ray_compat.death() is None:
            for seat in self._seats:
                ray.kill(seat)
            if self._placement is not None:
                remove_placement_group(self._placement)
        self.forget()

    def forget(self) -> None:
        """Forget the processes, which go with the cluster."""
        self._seats, self._placement = [], None

    # --- starting ---

    def _place(self, devices_per_rank: int, per_node: int | None) -> list[Location]:
        """Start one actor a rank; `self._seats` and the returned locations are in rank order."""
        n_ranks = self.n_ranks
        resources = placement.rank_resources(self.cluster.device, self.cluster.is_local, devices_per_rank)
        bundles, strategy = placement.bundles(n_ranks, per_node, resources)
        _wait_for_room(n_ranks, per_node, resources, self._title)
        self._placement = placement_group(bundles, strategy=strategy)
        if not self._placement.wait(PLACEMENT_TIMEOUT_S):
            raise WorkerFailure(
                f"Ray placed no {n_ranks} ranks within {PLACEMENT_TIMEOUT_S:g} s", phase="start"
            )
        there = [
            PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=index // (per_node or 1)
            )
            for index in range(n_ranks)
        ]
        locations = self._start(there, resources)
        order = placement.rank_order(locations)
        self._seats = [self._seats[index] for index in order]
        return [locations[index] for index in order]

    def _place_beside(self, colocate_with: Sequence[Sequence[Location]]) -> list[Location]:
        """Start one actor a rank, on the node and with the devices of others, which Ray counts as theirs alone."""
        there = [NodeAffinitySchedulingStrategy(others[0].node_id, soft=False) for others in colocate_with]
        found = self._start(there, {})
        return [
            replace(location, gpus=tuple(gpu for other in others for gpu in other.gpus))
            for location, others in zip(found, colocate_with, strict=True)
        ]

    def _start(self, strategies: Sequence[Any], resources: Mapping[str, float]) -> list[Location]:
        """Start an actor by each scheduling strategy; returns where they are."""
        actor = ray.remote(RankActor)
        cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        self._seats = [
            actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy).remote()
            for strategy in strategies
        ]
        return self._first([seat.locate.remote() for seat in self._seats])

    def _build(
        self,
        worker_class: type[Worker],
        layout: Layout | None,
        kwargs: dict[str, Any],
    ) -> None:
        locations = self.locations
        hosts = [LOOPBACK if self.cluster.is_local else location.host for location in locations]
        (port,) = self._first([self._seats[0].listen.remote(hosts[0])])
        blob = ray_compat.put(ray.cloudpickle.dumps((worker_class, kwargs)))
        single = placement.needs_single_cuda_connection(self.cluster.device, layout)
        refs = {}
        self._posts = group_prefix(ray.get_runtime_context().get_job_id(), self.name)
        for rank, (local_rank, local_world_size) in enumerate(placement.local_ranks(locations)):
            location, log = locations[rank], self.cluster.log_dir / f"{self.name}-rank-{rank}.log"
            process = probe.RankProcess(rank, location, log, probe.size(log), log.with_suffix(".stacks"))
            self._processes[rank] = process
            place = Place(
                rank=rank,
                world_size=self.n_ranks,
                local_rank=local_rank,
                local_world_size=local_world_size,
                # Ray shows an actor its own GPU only, which is then number 0.
                device="cpu" if self.cluster.device == "cpu" else "cuda:0",
                master_host=hosts[0],
                master_port=port,
                host=hosts[rank],
                collective_timeout_s=self.cluster.settings.collective_timeout_s,
                threads=threads_per_rank(location.cores, local_world_size),
            )
            order = RankSetup(
                place=place,
                env=rank_environment(place, location.gpus, self.cluster.is_local)
                | {KEY_VARIABLE: f"{self._posts}{rank}"},
                search_path=[path for path in sys.path if path],
                log=process.log,
                stacks=process.stacks,
                single_cuda_connection=single,
            )
            refs[rank] = [self._seats[rank].build.remote(order, blob)]
        building: PendingCall[list[bool]] = PendingCall(self, refs, range(self.n_ranks), "setup")
        building.others = self._no_more
        limited = building.result()
        if any(limited):
            self.cluster.say(
                f"{self.name}: CUDA_DEVICE_MAX_CONNECTIONS=1, which this layout (tp or cp > 1) needs on these GPUs"
            )

    def _no_more(self) -> WorkerFailure | None:
        if self._cancel.is_set():
            return WorkerFailure(f"the start of {self.name} was given up", phase="setup")
        return None

    def _first(self, refs: list[Any]) -> list[Any]:
        return first_answers(refs, self.name, self._no_more)

    # --- calling ---

    def submit(self, asked: Asked) -> PendingCall[Any]:
        if self._broken is not None:
            raise self._broken
        name, num_returns = asked.verb.__name__, asked.num_returns
        phase = asked.phase or name
        refs = {
            rank: self._remote_call(rank, name, call, phase, num_returns)
            for rank, call in asked.calls.items()
        }
        made = StreamingCall if num_returns == "streaming" else PendingCall
        return made(self, refs, asked.owners, phase, asked.single)

    def _remote_call(self, rank: int, method: str, rank_call: Call, phase: str, num_returns: Returns) -> Any:
        args, kwargs = rank_call
        ray_compat.check()
        seat = self._seats[rank]
        if num_returns == "streaming":
            return seat.stream.options(num_returns="streaming").remote(method, args, kwargs, phase)
        if num_returns == 1:
            return [seat.call.remote(method, args, kwargs, phase)]
        told = seat.call.options(num_returns=num_returns).remote(method, args, kwargs, phase, num_returns)
        return list(told)

    def interject(self, call: PendingCall[Any], name: str, verb: str, ranks: Sequence[int]) -> bool:
        """Have ranks that listen beside a call of this name run a verb (`quintet.cluster.lane`), and wait for those of `ranks` that are
        still at work at it, as long as for a collective. Returns False when none of them is, or one did not hear."""
        if not call.at_work(within_s=0):
            return False
        word = f"{next(_words)} {verb}"
        ray_compat.post(f"{self._posts}{LANE}{name}", word)
        deadline = time.monotonic() + self.cluster.settings.collective_timeout_s
        while time.monotonic() < deadline:
            left = [rank for rank in call.at_work(within_s=HEARD_WITHIN_S) if rank in ranks]
            # Of a call that is over by now, as after an abort, ranks have said before its end what they heard.
            heard = ray_compat.posted([f"{self._posts}{rank}{HEARD}" for rank in left or ranks])
            if all(found == word for found in heard):
                return True
            if not left:
                break
        return False

    def death(self, rank: int, error: ray.exceptions.RayError) -> Failure:
        """Return what is known of a rank whose process is gone."""
        process = self._processes[rank]
        report = _on_node(process.at.node_id, probe.death_report, process)() or _NODE_GONE
        return Failure.of_death(rank, report, str(error))

    def fail(
        self, failures: list[Failure], phase: str, at_work: Sequence[int], returned: Sequence[int]
    ) -> QuintetError:
        """Return the error for these failures; `at_work` ranks are asked for their stacks if it is a hang."""
        hang = all(failure.communication for failure in failures) and any(f.timed_out for f in failures)
        error = explain(
            failures,
            phase=phase,
            timeout_s=self.cluster.settings.collective_timeout_s,
            reports=self.inspect(at_work) if hang else {},
            returned=returned,
            group=self._title,
        )
        if isinstance(error, WorkerFailure):
            self._broken = error
        return error


def _wait_for_room(n_ranks: int, ranks_per_node: int | None, resources: dict[str, float], title: str) -> None:
    """Raise a UserError when the cluster is too small, or stays too full: what another group gave back comes late."""
    total = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    placement.check_fits(total, n_ranks, ranks_per_node, resources, title)
    deadline = time.monotonic() + ROOM_TIMEOUT_S
    while True:
        try:
            free = ray_compat.free_resources()
            return placement.check_fits(free, n_ranks, ranks_per_node, resources, title)
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


_NODE_GONE = probe.Report("no answer: its node is gone")


def _on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Start `function(*args)` on a node; calling what is returned waits for the result, None if the node is gone."""
    if node_id == ray.get_runtime_context().get_node_id():
        return lambda: function(*args)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ref = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*args)

    def result() -> Any:
        try:
            return ray.get(ref, timeout=REMOTE_PROBE_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return None

    return result
