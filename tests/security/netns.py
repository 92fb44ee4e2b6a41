"""Another network namespace: what it reaches of this one, another machine on the same network would reach too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil
import pytest

HERE, THERE = "10.213.77.1", "10.213.77.2"
HERE_6, THERE_6 = "fd13:77::1", "fd13:77::2"
_CONNECT = """
import json, socket, sys
found = []
for address, port in json.load(sys.stdin):
    try:
        socket.create_connection((address, port), timeout=3).close()
        found.append((address, port))
    except OSError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Stranger:
    """Runs programs in the other namespace."""

    name: str
    addresses: list[str]
    """Of this namespace, as the other one can ask for them."""

    def run(self, *command: str, stdin: str = "", timeout_s: float = 240) -> str:
        """What a program prints there."""
        return subprocess.run(
            ["ip", "netns", "exec", self.name, *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        ).stdout

    def reached(self, ports: Sequence[int]) -> list[tuple[str, int]]:
        """The (address, port) of this namespace's, of all its addresses and these TCP ports, that take a connection from there."""
        asked = [(address, port) for address in self.addresses for port in ports]
        found = json.loads(self.run(sys.executable, "-c", _CONNECT, stdin=json.dumps(asked)))
        return [(address, port) for address, port in found]


@contextmanager
def stranger() -> Iterator[Stranger]:
    """A new namespace, joined to this one by a virtual cable with IPv4 and IPv6 addresses. Skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and iproute2")
    name, here, there = f"quintet-{os.getpid()}", f"qh{os.getpid()}", f"qt{os.getpid()}"
    with ExitStack() as stack:
        try:
            _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        stack.callback(_ip, "link", "del", here)
        for address, device, where in ((HERE, here, []), (THERE, there, ["-n", name])):
            _ip(*where, "address", "add", f"{address}/24", "dev", device)
        for address, device, where in ((HERE_6, here, []), (THERE_6, there, ["-n", name])):
            _ip(*where, "address", "add", f"{address}/64", "dev", device, "nodad")
        for device, where in ((here, []), ("lo", ["-n", name]), (there, ["-n", name])):
            _ip(*where, "link", "set", device, "up")
        for gateway in (HERE, HERE_6):  # the way to this namespace's other addresses
            _ip("-n", name, "route", "add", "default", "via", gateway)
        yield Stranger(name, _addresses())


def listening(processes: Sequence[psutil.Process]) -> dict[int, str]:
    """The TCP ports on which these processes listen, with whose they are."""
    found = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = process.name()
        except psutil.Error:  # it has ended
            continue
    return found


def _addresses() -> list[str]:
    """This namespace's own, without those that mean something else in every namespace."""
    return [
        one.address
        for of_device in psutil.net_if_addrs().values()
        for one in of_device
        if one.family.name in ("AF_INET", "AF_INET6")
        and not one.address.startswith(("127.", "fe80:"))
        and one.address != "::1"
    ]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
