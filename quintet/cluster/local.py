"""One rank in the controller's own process, behind the verbs of a worker group: neither Ray nor a process is started for it.

A verb runs when its result is asked for, in the thread that asks. What it prints goes to the rank's log, an error of it is told as
any rank's; and the rank ends with the controller.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from unittest import mock

from quintet.cluster import lane
from quintet.cluster.environment import LOOPBACK, listen, rank_environment, threads_per_rank
from quintet.cluster.failures import Failure, explain
from quintet.cluster.progress import Progress
from quintet.cluster.verbs import Asked, Ranks
from quintet.cluster.worker import Place, Worker
from quintet.recipe.schema import Cluster as Settings
from quintet.runs.process import cores_here

if TYPE_CHECKING:  # it brings Ray
    from quintet.cluster.calls import PendingCall


class LocalCluster:
    """What controller and groups need of a `Cluster`, where the one rank of a run is this process, on a CPU."""

    is_local, device = True, "cpu"

    def __init__(self, settings: Settings, *, log_dir: Path, say: Callable[[str], None] = print) -> None:
        self.settings, self.log_dir, self.say = settings, log_dir, say
        self._groups = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._groups.close()

    def group(self, worker_class: type[Worker], n_ranks: int, *, name: str, **kwargs: Any) -> LocalGroup:
        """Make the group of the one rank: see `Cluster.group`."""
        assert n_ranks == 1, "this process is one rank"
        kwargs.pop("layout", None)
        group = LocalGroup(self, name)
        self._groups.callback(group.close)
        group.build(worker_class, kwargs)
        return group


class LocalGroup(Ranks):
    """One worker in this process, between `build` and `close`, which puts environment, threads and process groups back."""

    n_ranks = 1

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._worker: Any = None
        self._undo = contextlib.ExitStack()
        self._log = self._undo.enter_context(
            (cluster.log_dir / f"{name}-rank-0.log").open("a", encoding="utf-8", errors="replace")
        )

    def build(self, worker_class: Callable[..., Worker], kwargs: dict[str, Any]) -> None:
        """Make `worker_class(place, **kwargs)`, and set it up."""
        import torch
        import torch.distributed as dist

        listener = listen(LOOPBACK)
        place = Place(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            device=self._cluster.device,
            master_host=LOOPBACK,
            master_port=int(listener.getsockname()[1]),
            collective_timeout_s=self._cluster.settings.collective_timeout_s,
            master_fd=listener.detach(),
            threads=threads_per_rank(cores_here(), 1),
        )
        env = rank_environment(place, (), is_local=True)
        self._undo.enter_context(mock.patch.dict(os.environ, env))
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        self._undo.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        with self._at_work("setup"):
            self._worker = worker_class(place, **kwargs)
            with self._worker.at_work("setup"):
                self._worker.setup()

    def close(self) -> None:
        """End the rank."""
        self._worker = None
        self._undo.close()

    def coords(self) -> list[dict[str, int]]:
        """Return the rank's place on the mesh axes."""
        return self.all(Worker.coords)()

    def posted(self, ranks: Sequence[int]) -> int:
        """Return units that the rank has done in the call under way."""
        return Progress.done_here

    def interject(self, call: Any, name: str, verb: str, ranks: Sequence[int]) -> bool:
        """Run a verb beside a call of this name, in the thread that asks: see `WorkerGroup.interject`."""
        return lane.say_here(name, verb)

    def submit(self, asked: Asked) -> PendingCall[Any]:
        return cast("PendingCall[Any]", LocalCall(self, asked))

    def run(self, asked: Asked, heard: Callable[[int, Any], None], watch: Callable[[], None]) -> Any:
        """Run a verb. Of one that is a generator, `heard` is told what it yields, and `watch` is called in between."""
        (args, kwargs), phase = asked.calls[0], asked.phase or asked.verb.__name__
        with self._at_work(phase), self._worker.at_work(phase):
            told = attrgetter(asked.verb.__name__)(self._worker)(*args, **kwargs)
        while asked.num_returns == "streaming":
            watch()
            with self._at_work(phase), self._worker.at_work(phase):
                try:
                    piece = next(told)
                except StopIteration as end:
                    return end.value
            heard(0, piece)  # where it raises, the generator goes with this frame
        return told

    @contextlib.contextmanager
    def _at_work(self, phase: str) -> Iterator[None]:
        """What the rank does: where its words go, and what its errors become."""

        with warnings.catch_warnings(), contextlib.redirect_stdout(self._log):
            warnings.showwarning = lambda *said: print(warnings.formatwarning(*said[:4]), end="")
            try:
                yield
            except (Exception, SystemExit) as error:
                failure = Failure.of_exception(0, error, __file__)
                timeout_s = self._cluster.settings.collective_timeout_s
                raise explain([failure], phase=phase, timeout_s=timeout_s, reports={}, returned=[]) from error


class LocalCall:
    """A call that runs when its result is asked for: what is used of `PendingCall`."""

    def __init__(self, group: LocalGroup, asked: Asked) -> None:
        self._group, self._asked = group, asked
        self.heard: Callable[[int, Any], None] = lambda rank, piece: None
        """Told what a streaming verb yields."""

    def result(self, watch: Callable[[], None] | None = None) -> Any:
        """Run the verb; its value, or a list of it, as the caller of a group expects it."""
        told = self._group.run(self._asked, self.heard, watch or (lambda: None))
        return told if self._asked.single else [told]
