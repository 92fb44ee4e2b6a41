"""The Ray cluster of a run: started here, or joined; and stopped again if it was started here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from quintet.cluster import ray_compat  # sets Ray's environment before Ray is imported
from quintet.errors import QuintetError, UserError
from quintet.recipe.schema import Cluster as Settings
from quintet.runs.fsync import Scratch
from quintet.runs.process import cores_here

import ray  # isort: skip

if TYPE_CHECKING:
    from quintet.cluster.group import WorkerGroup


class Cluster:
    """Ray for a run: `with Cluster(recipe.cluster) as cluster:` has it for the length of the block.

    Starts a local Ray when `settings.address` is null, unless this process is connected already. On exit, also by
    Ctrl-C or an error, closes its worker groups and stops what it started, and nothing else.

    `log_dir` gets one log a rank (null: a temporary directory, kept only for the length of the block);
    `say` prints the few lines a user should see.
    """

    def __init__(
        self, settings: Settings, *, log_dir: Path | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.settings = settings
        self.say = say
        self.device: Literal["cpu", "cuda"] = "cpu"
        self.is_local = True
        """Whether all of the cluster is this machine, and ours to fill."""
        self._log_dir = log_dir
        self._started: ray_compat.LocalRay | None = None
        self._groups: list[WorkerGroup] = []
        self._exit = contextlib.ExitStack()

    @property
    def log_dir(self) -> Path:
        """The directory that the ranks' logs go to."""
        assert self._log_dir is not None, "the cluster is not started"
        return self._log_dir

    def __enter__(self) -> Self:
        try:
            if self._log_dir is None:
                self._log_dir = Path(self._exit.enter_context(Scratch("quintet-logs-")))
            self._log_dir = self._log_dir.absolute()
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._connect()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            self.is_local = self.settings.address is None and len(nodes) == 1
            self.device = self._choose_device()
            ranks, cores = self.settings.ranks, cores_here()
            if self.is_local and self.device == "cpu" and ranks > 4 * cores:
                self.say(f"{ranks} ranks (cluster.ranks) share {cores} cores: each takes seconds to start")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = ray_compat.death()
        if self._started is not None:
            self._started.expect_end()
        with ray_compat.uninterrupted():
            if self._started is not None:
                # The groups' processes go with their Ray.
                for group in self._groups:
                    group.forget()
                self._started.stop()
            else:
                for group in self._groups:
                    group.close()
            self._groups, self._started = [], None
            self._exit.close()
        if failure is not None and isinstance(error, Exception) and not isinstance(error, QuintetError):
            raise failure from error  # what a call of Ray's says then

    def group(self, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Make a worker group of this cluster: see `WorkerGroup`."""
        from quintet.cluster.group import WorkerGroup

        return WorkerGroup(self, *args, **kwargs)

    def adopt(self, group: WorkerGroup) -> None:
        """Close `group` together with the cluster."""
        self._groups.append(group)

    def check_devices(self, wanted: Mapping[str, int], otherwise: str) -> None:
        """Raise a UserError when the cluster has fewer devices than several recipe keys ask for together."""
        kind = "GPU" if self.device == "cuda" else "CPU"
        if kind == "CPU" and self.is_local:  # ranks share its cores
            return
        there, needed = int(ray.cluster_resources().get(kind, 0)), sum(wanted.values())
        if there < needed:
            asked = " and ".join(f"{key}={count}" for key, count in wanted.items())
            raise UserError(
                f"{asked} need {needed} {kind}s, and the cluster has {there}. Lower one of them, {otherwise}."
            )

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        if self.settings.address is None:
            cpu_only = self.settings.device == "cpu"
            self._started = ray_compat.start_local(
                self.settings.ranks, 0 if cpu_only else None, self.settings.ray_auth, self.log_dir
            )
            return
        try:
            _knock(self.settings.address)
            self._exit.enter_context(ray_compat.join(self.settings.address, self.settings.ray_auth))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RpcError) as error:
            raise UserError(
                f"No Ray cluster answers at cluster.address={self.settings.address!r} ({_first_line(error)}). "
                "Start one there with `RAY_AUTH_MODE=token ray start --head`, or leave cluster.address null for a local one."
            ) from error

    def _choose_device(self) -> Literal["cpu", "cuda"]:
        if self.settings.device == "cpu":
            return "cpu"
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if self.settings.device == "auto" and gpus == 0:
            return "cpu"
        if gpus < self.settings.ranks:
            fewer = "lower cluster.ranks, or " if gpus else ""
            raise UserError(
                f"cluster.device={self.settings.device} with cluster.ranks={self.settings.ranks} needs as many GPUs, and the "
                f"cluster has {gpus}; {fewer}set cluster.device=cpu"
            )
        return "cuda"


def _knock(address: str) -> None:
    """Raise OSError or ValueError unless something listens at host:port; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        raise ValueError("an address is host:port, or auto for the cluster of this machine")
    socket.create_connection((host, int(port)), timeout=10).close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
