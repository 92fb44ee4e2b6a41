"""Placement over two nodes, simulated by two Ray node daemons on this machine; and joining a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import BUSY


def on_two_nodes(auth_mode: str, tmp_path: Path) -> dict[str, Any]:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    # A program of its own, because this one is connected to the session's Ray.
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_nodes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "RAY_AUTH_MODE": auth_mode, "RAY_AUTH_TOKEN_PATH": str(token)},
    )
    assert done.returncode == 0, done.stderr
    assert "Unauthenticated" not in done.stderr  # of those who ask whether a token is needed
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_cluster_that_asks_for_no_token_is_joined_only_when_the_recipe_says_so(tmp_path: Path) -> None:
    refused, joined = on_two_nodes("disabled", tmp_path)["auth"]
    assert "asks for no token: whoever reaches it can run code in it" in refused
    assert joined == "joined"


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    found = on_two_nodes("token", tmp_path)
    joined, refused = found["auth"]
    assert joined == "joined"
    assert "asks for a token, and cluster.ray_auth=none sends none" in refused
    assert "asks for another token than the one here" in found["wrong token"]
    assert "asks for a token, and there is none here" in found["no token"]
    spread = found["spread"]
    assert spread["nodes"] == [0, 0, 2, 2]  # each node by its first rank
    assert [env["LOCAL_RANK"] for env in spread["env"]] == ["0", "1", "0", "1"]
    assert {env["LOCAL_WORLD_SIZE"] for env in spread["env"]} == {"2"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in spread["env"]}) == 1
    assert found["packed"]["nodes"] == [0, 0]
    assert "need 3 nodes with 2 free CPUs each, and the cluster has 2" in found["too many"]
    assert found["total"] == [4.0, 4.0]
    assert set(found["places"]) <= set(found["hosts"])
    opened = {address for rank in found["listening"] for address, _ in rank}
    assert found["places"][0] in opened
    assert not opened & {"0.0.0.0", "::"}
    assert "Waiting in it: rank 0. Never came: rank 1." in found["hang"]
    assert "in oversleep" in found["stacks"]["1"]  # asked for through Ray, on the other node
    assert found["hang seconds"] < 2 + 5 * BUSY
    assert found["still up"] == 2  # a cluster that was joined is left running
