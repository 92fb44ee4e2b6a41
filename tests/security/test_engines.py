"""Engines of other projects, whose processes unpickle what they say to each other: nobody else hears them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from quintet.rollout.sglang import compat

ROOT = Path(__file__).parents[2]
MEET = """
import os, sys, time
{before}
import torch, torch.distributed as dist
from tests.security.ranks import listening
other = os.fork()
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(other == 0), world_size=2)
dist.all_reduce(torch.ones(1))
os.write(1, (" ".join(address for address, _ in listening()) + "\\n").encode())  # a line whole, beside the other's
dist.barrier()
if other:
    os.waitpid(other, 0)
"""


def met(where: str, before: str) -> set[str]:
    """Addresses that two processes listen on which have met there."""
    command = [sys.executable, "-c", MEET.format(before=before), where]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=240, check=True
    )
    ranks = done.stdout.splitlines()
    assert len(ranks) == 2
    return {address for rank in ranks for address in rank.split()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_where_vllm_s_workers_meet_is_on_loopback():
    where = f"tcp://127.0.0.1:{free_port()}"
    assert met(where, "import quintet.rollout.vllm.extension") == {"127.0.0.1"}


def test_where_sglang_s_ranks_meet_is_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with compat.for_its_processes(tmp_path / "meeting"):
        where = os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert where.startswith("file://")
        assert met(where, "") == {"127.0.0.1"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in os.environ
