"""Ray, started lean, locked, and stopped completely: the one place, with `ray_auth`, that knows Ray's private parts.

`ray.init` starts a dashboard server, an autoscaler monitor and a log monitor even with `include_dashboard=False`:
three Python processes, half of the start-up's processor time on a laptop, and nothing here talks to them.
Written for and tested with ray 2.60. Adaptations, and what fails without them (tests/cluster/test_cluster.py):

- `_LeanNode`: no dashboard, monitor and log monitor processes (`test_only_needed_processes_run`); and more than the 30 s
  that Ray gives its own raylet to come up, which a busy machine exceeds (`test_ray_is_waited_for_on_a_busy_machine`). Its agents get ports:
  where they choose them, the raylet waits 15 s to be told, and then ends (`test_slow_agents_are_waited_for`).
- `listen_error_messages` replaced: no "(raylet) A worker died" on the console beside our own message, which says
  more (`test_ctrl_c_...` and the failure tests read a quiet console).
- `signals_pass`: a wait of Ray's makes a SystemError of what a signal's handler raises, but for Ctrl-C's
  (`test_what_a_signal_raises_ends_a_wait_as_itself`).
- `_undisturbed`: Ray that is interrupted while it starts crashes when the program ends, and it takes SIGTERM for itself
  (`test_a_signal_while_ranks_start_ends_in_one_sentence`).
- `_Job`: workers would look for modules in the working directory, and in that of the script, before all others
  (tests/security/test_safe_path.py).
- `resolve_ip_for_localhost` replaced: Ray would make this machine's outward address of 127.0.0.1, and listen on all
  (tests/security/test_ray.py).
- `LocalRay.stop`: `ray.shutdown` returns before agents and workers are gone (`test_ctrl_c_...`).
- `check`, `LocalRay.watch`: Ray waits a minute for a GCS that is gone and then ends this process, and ends it at once when its
  raylet is gone and an object is asked for, each with exit code 1 (tests/security/test_endings.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import quintet
from quintet.cluster.guardian import Guardian
from quintet.errors import RayFailure, UserError

# Read by Ray when it is imported or started. RAY_ENABLE_UV_RUN_RUNTIME_ENV keeps `uv run` from packing up the working directory
# and building an environment anew for every worker; with RAY_ENABLE_AUTO_CONNECT=0 a thread that asks Ray something after its end
# gets an error, and no new Ray; without reports of tasks, which nothing reads, the end does not wait 5 s for a dead GCS to take them;
# and a raylet gives its agents more than 30 s to answer before it ends.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
os.environ.setdefault("RAY_agent_register_timeout_ms", "180000")

import psutil
import ray
import ray._private.node
import ray._private.services
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray._raylet
from ray.experimental import internal_kv
from ray.job_config import JobConfig

from quintet.cluster.ray_auth import (
    AUTH_MODE,
    REPLY_TIMEOUT_S,
    Auth,
    check_auth,
    environment,
    scratch_with_token,
)

START_TIMEOUT_S = 180.0
WATCH_EVERY_S = 0.5
LAST_RESORT_S = 8.0
LOG_TAIL_LINES = 10
_COMPLAINT = re.compile(r"\[\S+ \S+ [WEFC] |\*\*\* ")
"""How lines of Ray's logs begin that say what is wrong, rather than how it is doing."""
OBJECT_STORE_BYTES_WITHOUT_GPU = 512 * 2**20
_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_CHOSEN_PORTS = (20_000, 32_000)
"""Below those that Linux gives to connections."""


class _LeanNode(ray._private.node.Node):
    """A head node of GCS, raylet and the raylet's two agents. `begun` gets it before it starts them."""

    def __init__(
        self, ray_params: Any, begun: Callable[[_LeanNode], None] | None = None, **kwargs: Any
    ) -> None:
        self.all_processes: dict[str, Any] = {}
        if begun is not None:
            begun(self)
        ports = zip(_AGENT_PORTS, _free_ports(len(_AGENT_PORTS)), strict=True)
        ray_params.update(no_monitor=True, include_log_monitor=False, **dict(ports))
        super().__init__(ray_params, **kwargs)

    def start_api_server(self, **_: Any) -> None:
        pass

    def tell_raylet(self) -> None:
        """Tell the one port of an agent's that the raylet's command line does not have, as the agent would."""
        listens, name = self.dashboard_agent_listen_port, ray._raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME
        ray._raylet.persist_port(self.get_session_dir_path(), self._node_id, name, listens)

    def start_ray_processes(self) -> None:
        self.tell_raylet()
        super().start_ray_processes()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and not self.dead_processes():
            with contextlib.suppress(RuntimeError):  # it is not there yet
                ray._private.services.get_node(self.gcs_address, self._node_id)
                return
            time.sleep(0.05)
        raise RuntimeError("Its raylet did not come up.")


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, of those that a system gives out to nobody who does not ask for them."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(*_CHOSEN_PORTS)
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


class _Job(JobConfig):
    """Workers look for modules where their Python does; for this package where it is here, if that is another place."""

    def __init__(self) -> None:
        root, code = str(Path(quintet.__file__).parents[1]), "import quintet; print(quintet.__file__)"
        found = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
        )
        super().__init__(_py_driver_sys_path=[] if found.stdout.strip() == quintet.__file__ else [root])

    def _runtime_env_has_working_dir(self) -> bool:
        """What Ray asks before it adds the two directories, and nothing else."""
        return True


def _no_error_messages(worker: Any, threads_stopped: threading.Event) -> None:
    """Stands in for the thread that prints what raylets report."""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for the end of the block, unless they come again. SIGTERM is handled Ray's way where nobody
    else does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            put_back()
            signal.raise_signal(number)

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def leave_to_ray(handler: Any) -> None:
        if before[signal.SIGTERM] is signal.SIG_DFL:
            before[signal.SIGTERM] = handler

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        with mock.patch.object(ray._private.utils, "set_sigterm_handler", leave_to_ray):
            yield
    finally:
        put_back()
    if came:
        signal.raise_signal(came[0])


def start_local(num_cpus: int, num_gpus: int | None, auth: Auth, log_dir: Path) -> LocalRay:
    """Start Ray on this machine, listening on its loopback interface alone; returns what `stop` needs.

    `num_cpus` is also the number of worker processes that are started ahead of need. `num_gpus` None lets Ray count them. With
    `auth` "token" whoever connects must show a token that is made here, whatever RAY_AUTH_MODE says outside. If a process of Ray's
    own dies, its log is kept in `log_dir`.
    """
    global _local
    before = set(psutil.Process().children(recursive=True))
    small = num_gpus == 0 or not Path("/dev/nvidiactl").exists()
    local = LocalRay(before, auth, log_dir)
    try:
        with (
            _undisturbed(),
            mock.patch.object(ray._private.node, "Node", partial(_LeanNode, begun=local.watch)),
            mock.patch.object(ray._private.worker, "listen_error_messages", _no_error_messages),
            mock.patch.object(ray._private.services, "resolve_ip_for_localhost", lambda host: host),
        ):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=OBJECT_STORE_BYTES_WITHOUT_GPU if small else None,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                job_config=_Job(),
                _node_ip_address="127.0.0.1",
                _temp_dir=str(local.directory),
            )
    except BaseException as error:  # also Ctrl-C: a half-started cluster is ours to clear away
        failure = local.death()
        with uninterrupted():
            local.stop()
        if not isinstance(error, Exception):
            raise
        if failure is not None:
            raise failure from error
        raise UserError(
            f"Ray did not start on this machine: {str(error).splitlines()[0] if str(error) else type(error).__name__} A machine "
            "that has too much else to do, or too little memory, is the usual reason: try again when it has less, or join a Ray "
            "that runs with cluster.address."
        ) from error
    _local = local
    return local


@contextlib.contextmanager
def join(address: str, auth: Auth) -> Iterator[None]:
    """Be connected to a running cluster for the length of the block.

    With `auth` "token" the token is found where Ray looks for it, and the cluster must ask for it. Raises UserError otherwise.
    """
    where = (
        address if address != "auto" else ray._private.services.canonicalize_bootstrap_address_or_die(address)
    )
    with environment(RAY_AUTH_MODE=AUTH_MODE[auth]):
        check_auth(where, f"The Ray cluster at cluster.address={address!r}", auth)
        with (
            _undisturbed(),
            mock.patch.object(ray._private.worker, "listen_error_messages", _no_error_messages),
        ):
            ray.init(address=where, log_to_driver=False, logging_level="error", job_config=_Job())
        try:
            yield
        finally:
            ray.shutdown()


class LocalRay:
    """The processes and files of a Ray that `start_local` starts."""

    def __init__(self, before: set[psutil.Process], auth: Auth, log_dir: Path) -> None:
        self._before = before
        self._log_dir = log_dir
        # Ray opens its directory to everybody, so it is one within ours.
        self._scratch, token = scratch_with_token()
        self.directory = self._scratch.path / "r"
        self._guardian = Guardian(self._scratch.path, [Path(ray.__file__).parent])
        self._environment = environment(
            RAY_AUTH_MODE=AUTH_MODE[auth],
            RAY_AUTH_TOKEN=None,
            RAY_AUTH_TOKEN_PATH=str(token),
        )
        self._environment.__enter__()
        self._node: _LeanNode | None = None
        self._death: str | None = None
        self._stopping = threading.Event()

    def watch(self, node: _LeanNode) -> None:
        """Watch the processes of `node`. This process ends `LAST_RESORT_S` after one of them has died, unless `expect_end` was called:
        the main thread may be in a call of Ray's, which would wait for a minute and then end this process without saying why."""
        self._node = node

        def wait() -> None:
            while not self._stopping.wait(WATCH_EVERY_S):
                failure = self.death()
                if failure is not None and not self._stopping.wait(LAST_RESORT_S):
                    print(f"error: {failure}", file=sys.stderr, flush=True)
                    os._exit(failure.exit_code)  # the guardian clears up

        threading.Thread(target=wait, name="ray-watch", daemon=True).start()

    def death(self) -> RayFailure | None:
        """Return what to tell of the first process of Ray's own that has died, if one has."""
        if self._death is None and self._node is not None and not self._stopping.is_set():
            for name, (one, *_) in list(self._node.all_processes.items()):
                if (code := one.process.poll()) is not None:
                    log = Path(self._node.get_logs_dir_path()) / f"{name}.out"
                    self._death = _obituary(name, code, log, self._log_dir)
                    break
        return None if self._death is None else RayFailure(self._death)

    def expect_end(self) -> None:
        """Leave the end of this process to the caller, who calls `stop` in the end: it takes the time it takes."""
        self._stopping.set()

    def stop(self) -> None:
        """End every process of it, at once, and remove its files."""
        global _local
        self.expect_end()
        started = set(psutil.Process().children(recursive=True)) - self._before
        # Workers first and without asking: one that waits in a collective would not listen anyway. Not the agents:
        # the raylet ends with them, and a driver that sees its raylet end ends itself, with exit code 1.
        _kill([process for process in started if _is_worker(_name(process))])
        ray.shutdown()
        self._guardian.finish()
        _kill(started)
        psutil.wait_procs(started, timeout=2)
        self._environment.__exit__(None, None, None)
        self._scratch.cleanup()
        _local = None if _local is self else _local


_local: LocalRay | None = None


def death() -> RayFailure | None:
    """Return what to tell if a process of Ray's own has died, of a Ray that was started here."""
    return None if _local is None else _local.death()


def check() -> None:
    """Raise what `death` tells. To be called before what needs Ray: with its raylet gone, fetching or putting an object ends this
    process, without a word."""
    if (failure := death()) is not None:
        raise failure


def put(value: Any) -> ray.ObjectRef[Any]:
    """Put an object into Ray's store, unless Ray has died."""
    check()
    return ray.put(value)


def _obituary(name: str, code: int, log: Path, log_dir: Path) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    kept = log_dir / f"ray-{log.name}"
    try:
        shutil.copyfile(log, kept)
        told = [line for line in kept.read_text(errors="replace").splitlines() if _COMPLAINT.match(line)]
    except OSError as error:
        return f"Ray's {name} died: {how}. Its log cannot be kept: {error}"
    tail = "".join(f"\n{line}" for line in told[-LOG_TAIL_LINES:])
    return (
        f"Ray's {name} died: {how}. Its log is kept as {kept}{'; its last complaints:' if tail else ''}{tail}"
    )


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _is_worker(name: str) -> bool:
    return name.startswith("ray::") and not name.endswith("Agent")


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return (process.cmdline() or [""])[0]
    return ""


@contextlib.contextmanager
def signals_pass() -> Iterator[None]:
    """Let what a signal's handler raises while Ray waits go on as itself."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def free_resources() -> list[dict[str, float]]:
    """Return what is free on each node, by node."""
    per_node: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return list(per_node.values())


def post(key: str, words: str) -> None:
    """Keep words under a key for the whole cluster; they are not worth failing for."""
    with contextlib.suppress(ray.exceptions.RayError, OSError):
        internal_kv._internal_kv_put(key, words, overwrite=True)


def posted(keys: Sequence[str]) -> list[str]:
    """Return the words kept under these keys, "" where there are none; one request for all."""
    with contextlib.suppress(ray.exceptions.RayError, OSError):
        names = [key.encode() for key in keys]
        gcs = internal_kv.internal_kv_get_gcs_client()
        found = gcs.internal_kv_multi_get(names, timeout=REPLY_TIMEOUT_S)
        return [found.get(name, b"").decode() for name in names]
    return [""] * len(keys)


def forget_posts(prefix: str) -> None:
    """Drop all words whose key begins so."""
    with contextlib.suppress(ray.exceptions.RayError, OSError):
        gcs = internal_kv.internal_kv_get_gcs_client()
        gcs.internal_kv_del(prefix.encode(), del_by_prefix=True, namespace=None, timeout=REPLY_TIMEOUT_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep a second Ctrl-C or SIGTERM from breaking the clearing up that the first one began."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            undo.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        yield
