"""The door of the weights' sender: who is let in, and what becomes of those who are not."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection

from quintet.errors import QuintetError
from quintet.sync.handshake import WrongKey, welcome
from quintet.sync.wire import (
    FIRST,
    SAID,
    Address,
    GivenUp,
    Hello,
    ReceiverGone,
    bounded,
    hear,
    listen,
    local_address,
    say,
)

log = logging.getLogger(__name__)

PAUSE_S = 0.1
GREETS_S = 10.0
"""Within this time one who knocks proves that it holds the key. Receivers take milliseconds."""
CROWD = 64
"""As many may be at it at a time; when more come, the one that came first has to go."""
LOGGED = 100
"""So many refusals are logged a plan: a flood of them must not fill the disk."""
ENDED = "its process ended before it came for its weights"


class Rendezvous:
    """Lets receivers in, in the background: those of the present plan, once they proved to hold the key."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host, self.key, self.timeout_s = host, secrets.token_bytes(32), timeout_s
        self.plan, self._closed = "", False
        self._expected: set[str] = set()
        self._absent: set[str] = set()
        self._here: dict[str, tuple[Connection, Hello]] = {}
        self._changed = threading.Condition()
        self._sockets: dict[bool, socket.socket] = {}
        self._addresses: dict[bool, Address] = {}
        self._unknown: dict[socket.socket, None] = {}
        self._refused = 0

    def address(self, colocated: bool) -> Address:
        """Return where receivers knock: a socket of this node, or one on `host`, which other nodes reach."""
        if colocated not in self._addresses:
            address: Address = local_address() if colocated else (self.host, 0)
            found = self._sockets[colocated] = listen(address)
            self._addresses[colocated] = address if colocated else found.getsockname()
            threading.Thread(target=self._accept, args=(found,), daemon=True).start()
        return self._addresses[colocated]

    def expect(self, receivers: Iterable[str]) -> str:
        """Let these receivers in from now on, and those of older plans no more; returns the plan's name."""
        with self._changed:
            self.plan, self._expected, self._absent = secrets.token_hex(8), set(receivers), set()
            self._refused = 0
            for connection, _ in self._here.values():
                connection.close()
            self._here = {}
            return self.plan

    def meet(self) -> tuple[dict[str, tuple[Connection, Hello]], dict[str, str]]:
        """Return whoever is expected and comes within the time limit; and why each of the others is not here. Those are not
        waited for of whom it is known that they do not come."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while self._expected - self._absent - set(self._here):
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            found, self._here = self._here, {}
            late = f"it did not come for its weights within {self.timeout_s:g} s"
            missing = {one: ENDED if one in self._absent else late for one in self._expected - set(found)}
        return found, missing

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
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
                if self._closed:
                    return
                time.sleep(PAUSE_S)  # too many open files, or one who knocked and went: others will come
                continue
            with self._changed:
                self._unknown[channel] = None
                if len(self._unknown) > CROWD:
                    first = next(iter(self._unknown))
                    del self._unknown[first]
                    with suppress(OSError):
                        first.shutdown(socket.SHUT_RDWR)  # its thread finds it closed
            self._start_greeting(channel)

    def _start_greeting(self, channel: socket.socket) -> None:
        while not self._closed:
            try:
                threading.Thread(target=self._greet, args=(channel,), daemon=True).start()
                return
            except RuntimeError:  # no more threads are to be had, until others end
                time.sleep(PAUSE_S)
        channel.close()

    def _greet(self, channel: socket.socket) -> None:
        """Let one in that proves to hold the key, and says who it is; refuse it otherwise."""
        whence = _whence(channel)
        with channel:
            try:
                welcome(channel, self.key, GREETS_S)
            except (WrongKey, OSError) as error:
                return self._refuse(whence, error)
            finally:
                with self._changed:
                    self._unknown.pop(channel, None)
            connection = bounded(channel, self.timeout_s)
        try:
            self._admit(connection, hear(connection, FIRST, whence))
        except (QuintetError, OSError, EOFError) as error:
            connection.close()
            self._refuse(whence, error)

    def _refuse(self, whence: str, why: Exception) -> None:
        self._refused += 1
        if self._refused <= LOGGED:
            log.warning("weight sync refused a connection from %s: %s", whence, str(why) or "it said nothing")
        if self._refused == LOGGED:
            log.warning("weight sync logs no more refusals until its next plan")

    def _admit(self, connection: Connection, said: Hello | ReceiverGone) -> None:
        with self._changed:
            if said.plan == self.plan and said.receiver in self._expected:
                if isinstance(said, ReceiverGone):
                    self._absent.add(said.receiver)
                    connection.close()
                else:
                    former = self._here.pop(said.receiver, None)
                    if former is not None:
                        former[0].close()
                    self._here[said.receiver] = connection, said
                self._changed.notify_all()
                return
        with suppress(OSError):
            why = "its ticket is of an earlier plan: the trainer has planned anew since"
            say(connection, SAID, GivenUp(why))
        connection.close()


def _whence(channel: socket.socket) -> str:
    """Who is at the other end, for people."""
    if channel.family == socket.AF_INET:
        with suppress(OSError):
            return "{}:{}".format(*channel.getpeername())
    elif hasattr(socket, "SO_PEERCRED"):
        pid, *_ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid} of this node"
    return "somebody who is gone"
