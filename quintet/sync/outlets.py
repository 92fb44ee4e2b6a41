"""The sender's ends of channels: who is to get a set of buckets, and how it is handed over.

A receiver that dies, closes its end or stays silent for too long is `lost`, with the reason; the others go on.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from quintet.sync.buckets import Bucket
from quintet.sync.memory import Shared
from quintet.sync.wire import END, Address, Answer, Hello, admit, host_address, listen, local_address

GONE = "its connection closed: it died, or gave up, before everything had arrived"


class Reception:
    """Lets receivers in, in the background: those of the present plan, once they proved to hold the key."""

    def __init__(self, timeout_s: float) -> None:
        self.key, self.timeout_s = secrets.token_bytes(32), timeout_s
        self.plan = ""
        self._expected: set[str] = set()
        self._here: dict[str, tuple[Connection, Hello]] = {}
        self._changed = threading.Condition()
        self._sockets: dict[bool, socket.socket] = {}
        self._addresses: dict[bool, Address] = {}

    def address(self, colocated: bool) -> Address:
        """Where receivers knock: a socket of this node, or one that other nodes reach."""
        if colocated not in self._addresses:
            address: Address = local_address() if colocated else (host_address(), 0)
            found = self._sockets[colocated] = listen(address)
            self._addresses[colocated] = address if colocated else found.getsockname()
            threading.Thread(target=self._accept, args=(found,), daemon=True).start()
        return self._addresses[colocated]

    def expect(self, receivers: Iterable[str]) -> str:
        """From now on these are let in, and those of older plans are not; returns the plan's name."""
        with self._changed:
            self.plan, self._expected = secrets.token_hex(8), set(receivers)
            for connection, _ in self._here.values():
                connection.close()
            self._here = {}
            return self.plan

    def meet(self) -> dict[str, tuple[Connection, Hello]]:
        """Whoever is expected and comes within the time limit."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while self._expected - set(self._here):
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            found, self._here = self._here, {}
        return found

    def close(self) -> None:
        """Nobody is let in any more."""
        self.expect(())
        for one in self._sockets.values():
            one.shutdown(socket.SHUT_RDWR)  # ends the wait for receivers
            one.close()
        self._sockets = {}

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                channel, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(channel,), daemon=True).start()

    def _greet(self, channel: socket.socket) -> None:
        admitted = admit(channel, self.key, self.timeout_s)
        if admitted is None:
            return
        connection, hello = admitted
        with self._changed:
            if hello.plan == self.plan and hello.receiver in self._expected:
                former = self._here.pop(hello.receiver, None)
                if former is not None:
                    former[0].close()
                self._here[hello.receiver] = connection, hello
                self._changed.notify_all()
                return
        _say(
            connection, Answer(refused="its ticket is of an earlier plan: the trainer has planned anew since")
        )
        connection.close()


class Outlet:
    """One set of buckets, for all receivers that want it. Through memory that both see."""

    def __init__(self, receivers: Sequence[str], buckets: Sequence[Bucket], timeout_s: float) -> None:
        self.receivers, self.buckets, self.timeout_s = list(receivers), tuple(buckets), timeout_s
        self.lost: dict[str, str] = {}
        self._lines: dict[str, Connection] = {}
        self._heard: dict[str, int] = {}

    def open(
        self, here: dict[str, tuple[Connection, Hello]], answer: Answer, memory: Sequence[Shared]
    ) -> None:
        """Greet those receivers that came, and show them the memory."""
        self.lost = {
            one: "it did not come for its weights in time" for one in self.receivers if one not in here
        }
        self._lines = {one: here[one][0] for one in self.receivers if one in here}
        self._heard = dict.fromkeys(self._lines, -1)
        for one, connection in list(self._lines.items()):
            buckets = None if here[one][1].knows else self.buckets
            try:
                connection.send(Answer(None, buckets, None, answer.room, answer.bucket_bytes, answer.device))
                for shared in memory:
                    shared.show(connection)
            except OSError:
                self._lose(one, GONE)

    def offer(self, number: int, slot: int, memory: torch.Tensor) -> None:
        """Hand over the bucket of this number, which is in `memory`, the slot's bytes."""
        for one in list(self._lines):
            if not _say(self._lines[one], (number, slot)):
                self._lose(one, GONE)

    def wait(self, number: int) -> None:
        """Until everyone has taken that bucket: its memory is free then."""
        self._hear(number)

    def finish(self) -> None:
        """Tell the receivers that it was all, and hear from them that they have it."""
        for one in list(self._lines):
            if not _say(self._lines[one], END):
                self._lose(one, GONE)
        self._hear(len(self.buckets))

    def close(self) -> None:
        """Let go of the receivers; what they keep for the next sync stays."""
        for connection in self._lines.values():
            connection.close()
        self._lines = {}

    def _hear(self, wanted: int) -> None:
        """Every receiver's word that it has taken that bucket; of earlier ones it came before."""
        deadline = time.monotonic() + self.timeout_s
        for one, connection in list(self._lines.items()):
            try:
                while self._heard[one] < wanted:
                    if not connection.poll(max(0.0, deadline - time.monotonic())):
                        self._lose(one, f"it took nothing for {self.timeout_s:g} s")
                        break
                    self._heard[one] = connection.recv()
            except (EOFError, OSError):
                self._lose(one, GONE)

    def _lose(self, receiver: str, reason: str) -> None:
        self.lost[receiver] = reason
        self._lines.pop(receiver).close()


def _say(connection: Connection, what: Any) -> bool:
    try:
        connection.send(what)
    except OSError:
        return False
    return True
