"""Ray of a local run: out of reach from other machines, and closed to whoever has no token on this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc  # tensorboard brings it
import psutil
import pytest

from quintet.cluster import ray_compat  # sets Ray's environment before Ray is imported
from quintet.errors import UserError
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.patience import BUSY
from tests.security.netns import listening, stranger
from tests.train.runs import ROOT, TINY

CALLS = [
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
]
"""One of each server of Ray's."""
OUTER = "0" * 64
"""A token of the environment in which the runs are started, and not theirs."""
RANKS_OWN_STORE_IS_OPEN = True  # TODO: rank 0's store and the sync's sockets


@contextmanager
def started(command: Sequence[str], until: str) -> Iterator[list[psutil.Process]]:
    """The processes of a local run; its environment asks for no authentication, and has a token."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": OUTER, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if until in line:
                yield [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                return
        raise AssertionError(said)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def run() -> Iterator[list[psutil.Process]]:
    with started(["tests.cluster.controller"], "calling") as processes:
        yield processes


def test_nothing_answers_from_another_network_namespace(run: list[psutil.Process]) -> None:
    out_of_reach(run)


@pytest.mark.nightly
def test_nothing_of_a_training_answers_from_another_network_namespace(tmp_path: Path) -> None:
    """With rollouts in processes of their own, which get their weights over sockets."""
    recipe = [
        "recipes/laptop_demo.yaml",
        *TINY,
        "cluster.ranks=2",
        "rollout.own_processes=true",
        "train.steps=100000",
    ]
    with started(["quintet", "train", *recipe, f"run.dir={tmp_path}"], "  1/") as processes:
        out_of_reach(processes)


def out_of_reach(run: list[psutil.Process]) -> None:
    ports = listening(run)
    assert len(ports) >= 7, ports  # the controller, gcs, raylet (two), an agent, ranks
    if RANKS_OWN_STORE_IS_OPEN:
        ports = {
            port: whose
            for port, whose in ports.items()
            if not whose.startswith("ray::RankActor") or is_grpc(port)
        }
    with socket.create_server(("", 0)) as control, stranger() as elsewhere:
        opened = control.getsockname()[1]
        reached = elsewhere.reached([opened, *ports])
        assert {port for _, port in reached} == {opened}, [(a, p, ports.get(p)) for a, p in reached]
        assert len(reached) >= 2  # by more than one of our addresses


def test_nothing_of_ray_answers_without_the_token(run: list[psutil.Process]) -> None:
    answers = {
        (whose, port): {answer(port, call) for call in CALLS}
        for port, whose in listening(run).items()
        if is_grpc(port)
    }
    # The controller, gcs, raylet (two), two ranks at least.
    assert len(answers) >= 6
    asked = {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }  # each server knows one of the calls
    assert [(who, codes) for who, codes in answers.items() if codes != asked] == []
    token = token_of(run).read_text()
    gcs = next(port for port, whose in listening(run).items() if whose == "gcs_server")
    assert answer(gcs, CALLS[0], token) == grpc.StatusCode.OK
    assert answer(gcs, CALLS[0], OUTER) == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_only_the_recipe_switches_the_token_off() -> None:
    with started(["tests.cluster.controller", "open"], "calling") as processes:
        gcs = next(port for port, whose in listening(processes).items() if whose == "gcs_server")
        assert answer(gcs, CALLS[0]) == grpc.StatusCode.OK


def test_the_agent_of_ray_answers_no_http_without_the_token(run: list[psutil.Process]) -> None:
    ports = [port for port, whose in listening(run).items() if whose.endswith("Agent")]
    assert ports
    for port in ports:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/get_or_create_runtime_env", data=b"", timeout=30)
        assert refused.value.code == 401


def test_a_driver_without_the_token_is_refused(run: list[psutil.Process], tmp_path: Path) -> None:
    gcs = next(port for port, whose in listening(run).items() if whose == "gcs_server")
    settings = ClusterSettings(address=f"127.0.0.1:{gcs}", ray_auth="none")
    refused = pytest.raises(UserError, match=r"asks for a token, and cluster\.ray_auth=none sends none")
    with refused, ray_compat.join(settings.address or "", settings.ray_auth):
        pass


def test_the_token_is_in_no_command_line_and_in_a_file_of_the_user_alone(run: list[psutil.Process]) -> None:
    path = token_of(run)
    token = path.read_text()
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700  # Ray's own directory, below it, is open to all
    assert [one for one in run if token in " ".join(one.cmdline())] == []


def token_of(run: list[psutil.Process]) -> Path:
    raylet = next(one for one in run if one.name() == "raylet")
    return Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])


def answer(port: int, call: str, token: str | None = None, timeout_s: float = 5 * BUSY) -> grpc.StatusCode:
    """What a gRPC server says to an empty request."""
    shown = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", timeout=timeout_s, metadata=shown)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def is_grpc(port: int) -> bool:
    """Whether it is a server of Ray's; what is no gRPC server closes the connection, or says nothing."""
    return answer(port, CALLS[-1], timeout_s=3) not in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
