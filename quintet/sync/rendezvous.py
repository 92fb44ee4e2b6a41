"""The door of the weights' sender: who is let in, and what becomes of those who are not."""

from __future__ import annotations

import logging
import secrets
import socket
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
    GivenUp,
    Hello,
    ReceiverGone,
    bounded,
    hear,
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
        self.key, self.timeout_s = secrets.token_bytes(32), timeout_s
        self.plan, self._closed = "", False
        self._expected: set[str] = set()
        self._absent: set[str] = set()
        self._here: dict[str, tuple[Connection, Hello]] = {}
        self._changed = threading.Condition()
        self._listening = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self.address: tuple[str, int] = self._listening.getsockname()
        """Where receivers knock; it is reached from other nodes where `host` is."""
        self._unknown: dict[socket.socket, None] = {}
        self._refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

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
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the wait for receivers
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, (host, port) = self._listening.accept()
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
            try:
                threading.Thread(target=self._greet, args=(channel, f"{host}:{port}"), daemon=True).start()
            except RuntimeError:  # no thread is to be had, for whoever it is
                channel.close()

    def _greet(self, channel: socket.socket, whence: str) -> None:
        """Let one in that proves to hold the key, and says who it is; refuse it otherwise."""
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
        with self._changed:
            nth = self._refused = self._refused + 1
        if nth <= LOGGED:
            last = "; its next plan logs refusals again, this one none" if nth == LOGGED else ""
            reason = str(why) or "it said nothing"
            log.warning("weight sync refused a connection from %s: %s%s", whence, reason, last)

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
