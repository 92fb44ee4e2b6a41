"""Ranks that know which sockets they have opened; imported by them."""

from __future__ import annotations

import socket
from typing import Any

import psutil

from quintet.cluster.worker import Worker
from tests.cluster.workers import Collective


class Listening(Collective):
    """A rank in a gloo group."""

    def setup(self) -> None:
        before = listening()
        Worker.setup(self)
        port = self.place.master_port  # opened before, by its seat
        self.opened = [one for one in listening() if one not in before or one[1] == port]

    def addresses(self) -> list[Any]:
        """Addresses of what it listens on, beside Ray's."""
        return self.opened

    def place_of(self) -> str:
        """Where its own channels would listen."""
        return self.place.host

    def refuse(self) -> None:
        """One who has no key knocks at the door of this rank's weights."""
        from quintet.sync.rendezvous import Rendezvous

        door = Rendezvous(self.place.host, 60.0)
        door.expect(["r"])
        with socket.create_connection(door.address) as stranger:
            stranger.sendall(bytes(64))
            while stranger.recv(64):
                pass
        door.close()


def listening(process: psutil.Process | None = None) -> list[tuple[str, int]]:
    """Address and port of each socket that a process listens on."""
    found = (process or psutil.Process()).net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]
