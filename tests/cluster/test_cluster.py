"""Starting and stopping: only what is needed runs, and nothing stays behind, however the controller ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from quintet.cluster import ray_auth, ray_compat
from quintet.cluster.cluster import Cluster
from quintet.errors import QuintetError, RayFailure, UserError
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.patience import BUSY

ROOT = Path(__file__).parents[2]


def start_controller(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.controller", *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # all that it starts, and starts in turn, is then found by the session
    )


def session_members(session: int) -> list[str]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(f"{process.pid} {process.cmdline()[:3]}")
        except (OSError, psutil.Error):
            continue
    return members


@pytest.mark.parametrize("ranks", [8, 9])
def test_many_ranks_on_few_cores_are_told(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr("quintet.cluster.cluster.cores_here", lambda: 2)
    told: list[str] = []
    with Cluster(ClusterSettings(ranks=ranks, device="cpu"), say=told.append):
        assert told == (
            ["9 ranks (cluster.ranks) share 2 cores: each takes seconds to start"] if ranks > 8 else []
        )


def test_only_needed_processes_run(ray_cluster: Cluster) -> None:
    commands = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # another test's, that has just ended
            commands.append(" ".join(process.cmdline()))
    commands = [
        command for command in commands if "multiprocessing." not in command
    ]  # the pool's, whose path names Ray's
    ours = [command for command in commands if "/ray/" in command or "ray::" in command]
    names = {
        "gcs_server",
        "raylet",
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
        "ray::RankActor",
        "ray::IDLE",
    }
    assert [command for command in ours if not any(name in command for name in names)] == []
    assert sum("gcs_server" in command.split()[0] for command in ours) == 1


@pytest.mark.parametrize("dies", [False, True])
def test_ray_is_waited_for_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """Not by a process of it that is gone."""
    asked: list[str] = []

    def get_node(address: str, node: str) -> None:
        asked.append(node)
        if len(asked) < 4:
            raise RuntimeError("no such node")

    monkeypatch.setattr(ray._private.node.Node, "start_ray_processes", lambda self: None)
    monkeypatch.setattr(ray._private.node.Node, "gcs_address", "here", raising=False)
    monkeypatch.setattr(ray._private.node.Node, "dead_processes", lambda self: [1] * (dies and len(asked)))
    monkeypatch.setattr(ray._private.services, "get_node", get_node)
    monkeypatch.setattr(ray_compat._LeanNode, "tell_raylet", lambda self: None)
    node = object.__new__(ray_compat._LeanNode)
    node._node_id = "mine"
    if dies:
        with pytest.raises(RuntimeError, match="raylet did not come up"):
            node.start_ray_processes()
    else:
        node.start_ray_processes()
    assert asked == ["mine"] * (1 if dies else 4)


def test_slow_agents_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Ray's agents take longer to start than its raylet waits to be told the ports that they have chosen."""
    agents, much = "dashboard/agent.py", 1000
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys, time\nif any({agents!r} in word for word in sys.orig_argv): time.sleep({much})\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    controller = start_controller()
    assert controller.stdout is not None
    first = controller.stdout.readline()
    controller.send_signal(signal.SIGINT)
    assert first == "calling\n", controller.communicate()[1]
    controller.communicate(timeout=60 * BUSY)
    assert session_members(controller.pid) == []


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything_within_five_seconds(how: signal.Signals) -> None:
    controller = start_controller()
    assert controller.stdout is not None
    first = controller.stdout.readline()
    assert first == "calling\n", controller.communicate()[1]
    assert len(session_members(controller.pid)) >= 5  # controller, GCS, raylet, two ranks
    began = time.monotonic()
    controller.send_signal(how)
    out, err = controller.communicate(timeout=60 * BUSY)
    assert time.monotonic() - began < 5 * BUSY
    assert controller.returncode != 0
    assert session_members(controller.pid) == []
    assert out == "stopped\n"  # the controller outlives its Ray, and says nothing else
    if how == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_with_one_message() -> None:
    controller = start_controller("fail")
    out, err = controller.communicate(timeout=60 * BUSY)
    assert session_members(controller.pid) == []
    assert out == "stopped\n"
    assert err.count("WorkerFailure") == 1
    assert "Rank 1 died in train" in err
    assert "raylet" not in err


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("ray://127.0.0.1:1", "is host:port"),
        ("somewhere", "is host:port"),
    ],
)
def test_no_cluster_at_the_address(address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match=rf"No Ray cluster answers at cluster.address='{address}' \(.*{why}"):
        Cluster(ClusterSettings(address=address)).__enter__()


def test_a_ray_that_does_not_start_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quintet.cluster import ray_compat

    def late(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nAnd more.")

    monkeypatch.setattr(ray_compat.ray, "init", late)
    monkeypatch.setattr(ray_compat.ray, "shutdown", lambda: None)  # the Ray of the other tests stays
    with pytest.raises(
        UserError, match=r"Ray did not start .*: The current node timed out during startup\. A machine"
    ):
        ray_compat.start_local(1, num_gpus=0, auth="token", log_dir=tmp_path)


def test_no_room_for_what_ray_is_started_with_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nothing of it stays."""
    scratch = ray_auth.Scratch
    monkeypatch.setattr(ray_auth, "Scratch", lambda prefix, parent: scratch(prefix, str(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, empty files can be made
    try:
        with pytest.raises(UserError, match=r"Ray cannot be started: .* in /tmp: File too large\. Make room"):
            ray_compat.start_local(1, num_gpus=0, auth="token", log_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ray.exceptions.RaySystemError("broken pipe"), "Ray's raylet died"),
        (UserError("another thing"), "another thing"),
    ],
)
def test_what_a_call_of_ray_says_when_ray_has_died_is_told_as_that(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_compat, "death", lambda: RayFailure("Ray's raylet died"))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", list)
    monkeypatch.setattr("ray.cluster_resources", dict)
    with pytest.raises(QuintetError, match=told), Cluster(ClusterSettings()):
        raise error


def test_gpus_that_are_not_there(ray_cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"cluster.ranks=2 needs as many GPUs, and the cluster has 0; set"):
        Cluster(ClusterSettings(ranks=2, device="cuda")).__enter__()
