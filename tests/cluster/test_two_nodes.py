"""Placement over two nodes, simulated by two Ray node daemons on this machine; and joining a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import BUSY


@pytest.mark.slow
def test_two_nodes() -> None:
    # A program of its own, because this one is connected to the session's Ray.
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_nodes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    spread = found["spread"]
    assert spread["nodes"] == [0, 0, 2, 2]  # each node by its first rank
    assert [env["LOCAL_RANK"] for env in spread["env"]] == ["0", "1", "0", "1"]
    assert {env["LOCAL_WORLD_SIZE"] for env in spread["env"]} == {"2"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in spread["env"]}) == 1
    assert found["packed"]["nodes"] == [0, 0]
    assert "need 3 nodes with 2 free CPUs each, and the cluster has 2" in found["too many"]
    assert found["total"] == [4.0, 4.0]
    assert "Waiting in it: rank 0. Never came: rank 1." in found["hang"]
    assert "in oversleep" in found["stacks"]["1"]  # asked for through Ray, on the other node
    assert found["hang seconds"] < 2 + 5 * BUSY
    assert found["still up"] == 2  # a cluster that was joined is left running
