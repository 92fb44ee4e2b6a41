"""What both ends of a channel know: addresses, how they greet each other, and what they say.

Control messages are JSON of the types below over a socket, after each side has proved that it holds the key. The weights themselves
take another way: memory that both map, or a process group.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Annotated, Literal, TypeVar

from pydantic import Base64Bytes, Field

from quintet.errors import SyncFailure
from quintet.sync.buckets import Bucket
from quintet.sync.handshake import WrongKey, introduce
from quintet.typed import Typed, Words

T = TypeVar("T")
TELLS_S = 5.0
"""How long it may take to tell a sender who does not come: one that cannot be told finds out itself, after a while."""


@dataclass(frozen=True)
class Ticket:
    """What admits one receiver to its sender.

    receiver: its id. plan: which of the sender's plans it is of; an older one is refused. key: what both prove to hold.
    timeout_s: how long it waits for the trainer, which meanwhile may wait for other receivers.
    """

    receiver: str
    address: tuple[str, int]
    plan: str
    key: Base64Bytes
    timeout_s: float

    def failure(self, why: str) -> SyncFailure:
        """Return the error that the receiver did not get its weights."""
        return SyncFailure(f"receiver {self.receiver}: {why}")


@dataclass(frozen=True)
class Hello:
    """A receiver's first words. group: the process group it has from the last sync, if any. knows: whether it has the plan's
    buckets."""

    receiver: str
    plan: str
    knows: bool
    group: str | None
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class ReceiverGone:
    """What is said in a receiver's place by whoever knows that it ended: it is not to be waited for."""

    receiver: str
    plan: str
    kind: Literal["absent"] = "absent"


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
    """A sender's first words. buckets: None to one that knows them. group: how the weights come; None is through
    memory that both see: of each stretch the handle (`SharedBuffer`), and its bytes. bucket_bytes: what is larger is one tensor.
    device: cpu or cuda."""

    buckets: tuple[Bucket, ...] | None = None
    group: Group | None = None
    memory: tuple[tuple[Base64Bytes, int], ...] = ()
    bucket_bytes: int = 0
    device: str = "cpu"
    kind: Literal["answer"] = "answer"


@dataclass(frozen=True)
class Offer:
    """The message that the bucket of this number is in memory, in this slot of it."""

    number: int
    slot: int
    kind: Literal["offer"] = "offer"


@dataclass(frozen=True)
class End:
    """What is said by the sender after the last bucket."""

    kind: Literal["end"] = "end"


@dataclass(frozen=True)
class GivenUp:
    """A sender's last words to a receiver that gets no more, or nothing: why."""

    why: Words
    kind: Literal["given up"] = "given up"


FIRST: Typed[Hello | ReceiverGone] = Typed(
    Annotated[Hello | ReceiverGone, Field(discriminator="kind")], "a receiver's first words"
)
TAKEN: Typed[int] = Typed(int, "the number of a bucket")
"""Said by a receiver of each bucket that it has taken, and after the end how many there were."""
Said = Answer | Offer | End | GivenUp
SAID: Typed[Said] = Typed(Annotated[Said, Field(discriminator="kind")], "the words of a trainer")
MOST_BYTES = 1 << 30
"""What is longer is no message."""


def address_toward(host: str) -> str:
    """Return this node's address on the network by which it reaches another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def bounded(channel: socket.socket, timeout_s: float) -> Connection:
    """Return a connection on which no read or write takes longer; a message that stops halfway, or that a stopped process does
    not read, raises BlockingIOError, an OSError."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    channel.settimeout(None)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)  # two offers may follow each other
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        channel.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(channel.detach())


def say(connection: Connection, kind: Typed[T], what: T) -> None:
    """Send a message of this kind. Raises OSError for one who does not read it."""
    connection.send_bytes(kind.dump(what))


def hear(connection: Connection, kind: Typed[T], source: str) -> T:
    """Receive a message of this kind. Raises QuintetError naming its source when it is something else, EOFError or OSError when
    none comes, or one of a size that no message has."""
    return kind.load(connection.recv_bytes(MOST_BYTES), source)


def call(ticket: Ticket, said: Hello | ReceiverGone) -> Connection:
    """Return the receiver's side of a greeting. Raises SyncFailure naming the receiver."""
    try:
        channel = socket.create_connection(ticket.address, ticket.timeout_s)
    except OSError as error:
        raise ticket.failure(
            f"no trainer answers at {ticket.address!r} ({error}): it ended, or is on a node that cannot be reached"
        ) from None
    with channel:
        try:
            introduce(channel, ticket.key, ticket.timeout_s)
            connection = bounded(channel, ticket.timeout_s)
            say(connection, FIRST, said)
            return connection
        except WrongKey:
            why = "its ticket has another key than the trainer: it is of a trainer that ended"
        except TimeoutError:
            why = f"the trainer did not greet it within {ticket.timeout_s:g} s"
        except OSError:
            why = "the trainer ended while greeting it"
    raise ticket.failure(why)


def notify_absent(ticket: Ticket) -> None:
    """Tell its sender, from any node, not to wait for this receiver; a sender that cannot be reached is not told."""
    with suppress(SyncFailure):
        call(replace(ticket, timeout_s=TELLS_S), ReceiverGone(ticket.receiver, ticket.plan)).close()


def shutdown_write(connection: Connection) -> None:
    """Let the other end know, whoever else of this process's children has the socket open, that nothing more comes."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.shutdown(socket.SHUT_WR)


def ended(connection: Connection, *, drop: bool = False) -> bool:
    """Return whether the other end is closed, or its process gone. drop: what it said before, and nobody will hear."""
    how = socket.MSG_DONTWAIT | (0 if drop else socket.MSG_PEEK)
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        try:
            while channel.recv(1 << 16, how):
                if not drop:
                    return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
