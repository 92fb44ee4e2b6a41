"""What vLLM's processes listen on is on loopback, whatever the environment says: they unpickle what they say to each other."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest

from tests.rollout.vllm.conftest import DEVICE
from tests.security.test_sync import outward

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("mode", "tp"), [("server", 1), ("offline", 2)])
def test_nothing_listens_on_another_address(start: Any, monkeypatch: Any, mode: str, tp: int) -> None:
    interface = outward()
    (address, *_) = [a.address for a in psutil.net_if_addrs()[interface] if a.family == socket.AF_INET]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("VLLM_HOST_IP", address)
    before = {
        one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN
    }
    rollout = start("qwen3", mode=mode, layout={"tp": tp if DEVICE == "cpu" else 1})
    me = psutil.Process()
    found = {
        one.laddr
        for process in (me, *me.children(recursive=True))
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    rollout.close()
    assert found - before
    assert {one.ip for one in found - before} == {"127.0.0.1"}
