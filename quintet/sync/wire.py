"""What both ends of a channel know: addresses, and how they greet each other.

Control messages are pickled Python over a socket; each side first proves that it holds the key. The weights themselves take
another way: memory that both map, or a process group.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from quintet.errors import SyncFailure
from quintet.sync.buckets import Bucket

Address = str | tuple[str, int]
"""Of a socket on this node, or (host, port)."""
TELLS_S = 5.0
"""How long it may take to tell a sender who does not come: one that cannot be told finds out itself, after a while."""


@dataclass(frozen=True)
class Ticket:
    """What admits one receiver to its sender.

    receiver: its id. plan: which of the sender's plans it is of; an older one is refused. key: what both prove to hold.
    timeout_s: how long it waits for the trainer, which meanwhile may wait for other receivers. from_afar: where the sender is to
    be told, from any node, that this receiver does not come.
    """

    receiver: str
    address: Address
    from_afar: Address
    plan: str
    key: bytes
    timeout_s: float


@dataclass(frozen=True)
class Hello:
    """A receiver's first words. group: the process group it has from the last sync, if any. knows: whether it has the plan's
    buckets."""

    receiver: str
    plan: str
    knows: bool
    group: str | None


@dataclass(frozen=True)
class Absent:
    """Said in a receiver's place by whoever knows that it ended: it is not to be waited for."""

    receiver: str
    plan: str


@dataclass(frozen=True)
class Group:
    """A process group to join: sender and receivers of one set of buckets. rank: whose copy this is; the sender is 0."""

    name: str
    host: str
    port: int
    rank: int
    size: int
    backend: str


@dataclass(frozen=True)
class Answer:
    """A sender's first words. refused: why this receiver gets nothing. buckets: None to one that knows them. group: how the
    weights come; None is through memory that both see, of `room` bytes each, which is shown next. bucket_bytes: what is larger
    is one tensor. device: cpu or cuda."""

    refused: str | None = None
    buckets: tuple[Bucket, ...] | None = None
    group: Group | None = None
    room: tuple[int, int] = (0, 0)
    bucket_bytes: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class GivenUp:
    """A sender's last words to a receiver that gets no more."""

    why: str


END = "end"
"""Said by the sender after the last bucket. A receiver says the number of each bucket that it has taken, and after the end how
many there were."""


def local_address() -> str:
    """A new one on this node. On Linux it has no file, and is gone with the process."""
    if os.uname().sysname == "Linux":
        return f"\0quintet-sync-{secrets.token_hex(8)}"
    return str(Path(tempfile.mkdtemp(prefix="quintet-sync-")) / "socket")


def host_address() -> str:
    """This node's address as other nodes of the run see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "10.255.255.255"), 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def listen(address: Address) -> socket.socket:
    """A socket that takes receivers."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    found = socket.socket(family)
    found.bind(address)
    found.listen(64)
    return found


def bounded(channel: socket.socket, timeout_s: float) -> Connection:
    """A connection on which no read or write takes longer; a message that stops halfway, or that a stopped process does not
    read, raises BlockingIOError, an OSError."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    channel.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        channel.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(channel.detach())


def admit(channel: socket.socket, key: bytes, timeout_s: float) -> tuple[Connection, Hello | Absent] | None:
    """The sender's side of a greeting; None for one who does not know the key, or does not say what it must."""
    connection = bounded(channel, timeout_s)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        if connection.poll(timeout_s):
            said = connection.recv()
            if isinstance(said, Hello | Absent):
                return connection, said
    except (AuthenticationError, OSError, EOFError, AssertionError):
        pass
    connection.close()
    return None


def call(ticket: Ticket, said: Hello | Absent) -> Connection:
    """The receiver's side of a greeting. Raises SyncFailure naming the receiver."""
    who = f"receiver {ticket.receiver}"
    family = socket.AF_UNIX if isinstance(ticket.address, str) else socket.AF_INET
    channel = socket.socket(family)
    channel.settimeout(ticket.timeout_s)
    try:
        channel.connect(ticket.address)
        connection = bounded(channel, ticket.timeout_s)
    except OSError as error:
        channel.close()
        raise SyncFailure(
            f"{who}: no trainer answers at {ticket.address!r} ({error}): it ended, or is on a node that cannot be reached"
        ) from None
    try:
        if not connection.poll(ticket.timeout_s):
            raise SyncFailure(f"{who}: the trainer did not greet it within {ticket.timeout_s:g} s")
        answer_challenge(connection, ticket.key)
        deliver_challenge(connection, ticket.key)
        connection.send(said)
    except AuthenticationError:
        connection.close()
        raise SyncFailure(
            f"{who}: its ticket has another key than the trainer: it is of a trainer that ended"
        ) from None
    except (OSError, EOFError, SyncFailure) as error:
        connection.close()
        if isinstance(error, SyncFailure):
            raise
        raise SyncFailure(f"{who}: the trainer ended while greeting it") from None
    return connection


def does_not_come(ticket: Ticket) -> None:
    """Tell its sender, from any node, not to wait for this receiver; a sender that cannot be reached is not told."""
    there = replace(ticket, address=ticket.from_afar, timeout_s=TELLS_S)
    with suppress(SyncFailure):
        call(there, Absent(ticket.receiver, ticket.plan)).close()


def hang_up(connection: Connection) -> None:
    """Let the other end know, whoever else of this process's children has the socket open, that nothing more comes."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.shutdown(socket.SHUT_WR)


def has_left(connection: Connection) -> bool:
    """Whether the other end is closed, or its process gone. What it said before is dropped."""
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        try:
            while channel.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def ended(connection: Connection) -> bool:
    """Whether the other end is closed, or its process gone. What it said before is not lost."""
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        try:
            return channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
