"""The actor in which a worker lives: prepares the process, builds the worker, runs its methods.

Two things need a layer between Ray and the worker. The environment must be set before torch is imported, and
Ray's own way (`runtime_env`) cannot use the worker processes that Ray has started ahead: each rank would start
Python twice. And an exception must come back as the worker's own traceback, not wrapped in Ray's.

Methods run in the process's main thread: Ray runs an actor without concurrency groups there (measured with 2.60: an
actor *with* them runs everything in other threads, where signal handlers cannot be set). What must be answered while
a method runs goes by signal instead (`quintet.cluster.process_probe`).
"""

from __future__ import annotations

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import ray

from quintet.cluster.environment import listen
from quintet.cluster.failures import Failure
from quintet.cluster.process_probe import STACK_SIGNAL, Location, kernel_oom_kills, turn_file
from quintet.cluster.progress import TURN_VARIABLE, read_turn
from quintet.cluster.worker import Place
from quintet.runs.fsync import lossy
from quintet.runs.process import cores_here


@dataclass(frozen=True)
class RankSetup:
    """All that a process needs to become a rank."""

    place: Place
    env: dict[str, str]
    search_path: list[str]
    """The controller's sys.path: modules it can import, the worker can."""
    log: Path
    stacks: Path
    single_cuda_connection: bool


class RankActor:
    """One rank's process. Everything it returns is a pair (failure, value), one of them None."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._rank = -1
        self._listener: socket.socket | None = None
        self._stacks_file: Any = None

    def locate(self) -> Location:
        context = ray.get_runtime_context()
        return Location(
            node_id=context.get_node_id(),
            host=ray.util.get_node_ip_address(),
            gpus=tuple(int(gpu) for gpu in ray.get_gpu_ids()),
            cores=cores_here(),
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            oom_kills=kernel_oom_kills(),
        )

    def listen(self, host: str) -> int:
        """Find the port of rank 0's store on this address alone, and hold it: the socket is handed to the store when torch is
        there, whose own would listen on all addresses."""
        self._listener = listen(host)
        return int(self._listener.getsockname()[1])

    def build(self, order: RankSetup, blob: bytes) -> tuple[Failure | None, bool | None]:
        """Become a rank: log, signals, environment, then the worker itself.

        `blob` is a cloudpickle of (worker class, keyword arguments), bytes to Ray, because unpickling it imports
        torch, which must find the environment set. The value is whether CUDA_DEVICE_MAX_CONNECTIONS=1 was set.
        """
        self._rank = order.place.rank
        try:
            self._prepare(order)
            limited = order.single_cuda_connection and _is_before_blackwell()
            if limited:
                os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            place = order.place
            if self._listener is not None:
                place = replace(place, master_fd=self._listener.detach())
            worker_class, kwargs = ray.cloudpickle.loads(blob)
            self._worker = worker_class(place, **kwargs)
            with self._worker.at_work("setup"):
                self._worker.setup()
            return None, limited
        except BaseException as error:  # sys.exit in a worker must be told like any other end
            return self._failure(error), None

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str, num_returns: int = 1
    ) -> Any:
        """Run a method of the worker, or of a part of it ("part.method"), with every object reference within its arguments resolved."""
        try:
            args, kwargs = resolve((args, kwargs))
            with self._worker.at_work(phase):
                value = attrgetter(method)(self._worker)(*args, **kwargs)
            if num_returns == 1:
                return None, value
            if not isinstance(value, tuple) or len(value) != num_returns:
                raise TypeError(
                    f"{method} must return a tuple of {num_returns} (num_returns), got {value!r:.80}"
                )
            return (None, value[0]), *value[1:]
        except BaseException as error:
            outcome = (self._failure(error), None)
            return outcome if num_returns == 1 else (outcome, *[None] * (num_returns - 1))
        finally:
            sys.stdout.flush()

    def stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> Iterator[Any]:
        """Run a method that is a generator: what it yields goes to the controller as it comes. Then come, in a list, the
        outcome and how many objects follow: those of the tuple that it returns, as of `call`, but for its first."""
        outcome: tuple[Failure | None, Any]
        others: Sequence[Any] = ()
        try:
            args, kwargs = resolve((args, kwargs))
            with self._worker.at_work(phase):
                value, *others = yield from attrgetter(method)(self._worker)(*args, **kwargs)
            outcome = None, value
        except GeneratorExit:  # nobody waits for it
            raise
        except BaseException as error:
            outcome = self._failure(error), None
        finally:
            sys.stdout.flush()
        yield [outcome, len(others)]
        yield from (one for one in others)  # Ray sends to what yields, and a list's iterator takes nothing

    def _prepare(self, order: RankSetup) -> None:
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = lossy(1), lossy(2)  # words that a full disk does not take end no rank
        # The file gets its name when the signal is caught: to a process without it, the signal is not sent.
        unnamed = order.stacks.with_suffix(".unnamed")
        self._stacks_file = unnamed.open("w")
        faulthandler.enable(self._stacks_file)
        faulthandler.register(STACK_SIGNAL, self._stacks_file, all_threads=True)
        unnamed.rename(order.stacks)
        for name, value in order.env.items():
            if name.endswith("_SOCKET_IFNAME") and (other := os.environ.get(name, value)) != value:
                print(
                    f"{name}={value}, not {other}: ranks that are all on this machine talk over loopback",
                    flush=True,
                )
        os.environ.update(order.env)
        os.environ[TURN_VARIABLE] = str(turn_file(order.stacks))
        sys.path.extend(path for path in order.search_path if path not in sys.path)

    def _failure(self, error: BaseException) -> Failure:
        failure = Failure.of_exception(self._rank, error, __file__)
        return replace(failure, turn=read_turn())


def resolve(value: Any) -> Any:
    """Return `value` with each ray.ObjectRef within its lists, tuples and dicts replaced by its object.

    All are fetched in one `ray.get`, straight from the node that has them; the controller never sees them.
    """
    refs: list[ray.ObjectRef[Any]] = []
    _with_refs(value, refs.append)  # what it makes is of no use: it is there to find them
    if not refs:
        return value
    return _with_refs(value, dict(zip(refs, ray.get(refs), strict=True)).__getitem__)


def _with_refs(value: Any, change: Callable[[ray.ObjectRef[Any]], Any]) -> Any:
    """`value` with what `change` makes of each reference in it."""
    if isinstance(value, ray.ObjectRef):
        return change(value)
    if type(value) in (list, tuple):
        if set(map(type, value)) <= {int, float, str}:  # token ids and the like: no need to copy them
            return value
        return type(value)(_with_refs(item, change) for item in value)
    if type(value) is dict:
        return {key: _with_refs(item, change) for key, item in value.items()}
    return value


def _is_before_blackwell() -> bool:
    """Compute capability below 10, asked without starting CUDA; unknown counts as yes, which costs little."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return float(text.split()[0]) < 10
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return True
