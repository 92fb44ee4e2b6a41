"""A run on this machine alone listens on loopback alone; and what a stranger on the machine writes to its store is not run."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.environment import LOOPBACK
from quintet.cluster.group import WorkerGroup
from tests.patience import BUSY
from tests.security.ranks import Listening, listening
from tests.security.stranger import Stranger
from tests.security.test_sync import outward

ROOT = Path(__file__).parents[2]
LOOPBACKS = {LOOPBACK, "::1", f"::ffff:{LOOPBACK}"}
"""The last is the first, as a socket of IPv6 names it."""
TINY = [
    *(
        "model.build.layers=1",
        "model.build.hidden_size=64",
        "sft=null",
        "train.eval_prompts=0",
        "train.steps=8",
    ),
    *("train.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=6"),
    *(
        "rollout.sequences_per_rank=16",
        "checkpoint.every_steps=1",
        "optimizer.warmup_steps=1",
        "rollout.placement=separate",
        "rollout.ranks=1",
    ),
]


@pytest.mark.slow
def test_ranks_of_a_local_run_listen_on_loopback_whatever_the_environment_says(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, outward())
    with WorkerGroup(ray_cluster, Listening, 2, name="listening") as group:
        opened = group.all(Listening.addresses)()
        (environment, _) = group.all(Listening.environment)(
            "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"
        )
        place = group.one(Listening.place_of)()
    assert all(ranks for ranks in opened)
    assert {address for ranks in opened for address, _ in ranks} == {LOOPBACK}
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": LOOPBACK}
    assert place == LOOPBACK


def test_a_rank_s_log_tells_whom_it_refused(ray_cluster: Cluster) -> None:
    with WorkerGroup(ray_cluster, Listening, 1, name="refuses") as group:
        group.all(Listening.refuse)()
        log = ray_cluster.log_dir / "refuses-rank-0.log"
        deadline = time.monotonic() + 10 * BUSY
        while "refused" not in (text := log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
    told = r"weight sync refused a connection from 127\.0\.0\.1:\d+: it does not hold the key"
    assert re.search(told, text), text


def ranks_of(run: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    """The processes of a run's ranks."""
    with suppress(psutil.Error):
        for one in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "ray::RankActor" in " ".join(one.cmdline()):
                    yield one


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "quintet",
        "train",
        "recipes/laptop_demo.yaml",
        *TINY,
        f"run.dir={tmp_path}",
    ]
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, text=True)
    yield run
    run.kill()


@pytest.mark.nightly
def test_a_stranger_on_the_machine_runs_nothing_in_a_run(run: subprocess.Popen[str], tmp_path: Path) -> None:
    """It writes to the store of a run that saves checkpoints, as often as it can. The run may end by that, with a sentence."""
    harm, seen = tmp_path / "harm", set[tuple[str, int]]()
    stranger, looks = Stranger("quintet checkpoint", harm), 0
    while run.poll() is None:
        if looks % 50 == 0:
            found = {one for rank in ranks_of(run) for one in sockets(rank)}
            for _, port in found - seen:
                threading.Thread(target=stranger.knock, args=(port,), daemon=True).start()
            seen |= found
        stranger.poison()
        looks += 1
        time.sleep(0.002)
    text = (tmp_path / "said").read_text()
    assert stranger.poisoned, text
    assert not harm.exists()
    assert run.returncode == 0 or "was not written by that rank" in text, text


@pytest.mark.nightly
def test_nothing_that_ranks_open_is_on_another_address(run: subprocess.Popen[str], tmp_path: Path) -> None:
    """Of a run with rollouts in processes of their own: its store, gloo, the weights' sender and the store of that. What Ray
    opens in the same processes is not looked at here."""
    seen = set[tuple[str, int]]()
    while run.poll() is None:
        found = {one for rank in ranks_of(run) for one in sockets(rank)}
        seen |= {one for one in found - seen if one[0] in LOOPBACKS or not is_grpc(one[1])}
        time.sleep(0.2)
    assert run.returncode == 0, (tmp_path / "said").read_text()
    assert len(seen) > 4
    assert {address for address, _ in seen} <= LOOPBACKS


def is_grpc(port: int) -> bool:
    """Whether who listens here answers the beginning of HTTP/2 with settings, or is gone."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=5) as channel:
            channel.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return channel.recv(9)[3:4] == b"\4"
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def sockets(rank: psutil.Process) -> list[tuple[str, int]]:
    with suppress(psutil.Error):
        return listening(rank)
    return []
