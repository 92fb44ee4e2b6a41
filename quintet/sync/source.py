"""Where a rollout gets its weights: opened, with a ticket, in the process that takes them.

Runs beside any rollout engine and its own version of torch: neither megatron-core nor Ray is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from quintet.errors import QuintetError, SyncFailure
from quintet.rollout.base import Piece
from quintet.sync.buckets import Bucket, slots
from quintet.sync.group import TransferGroup
from quintet.sync.shared_memory import MappedBuffer
from quintet.sync.wire import (
    SAID,
    TAKEN,
    Answer,
    End,
    GivenUp,
    Group,
    Hello,
    Offer,
    Said,
    Ticket,
    call,
    hear,
    say,
)
from quintet.typed import Typed

SAYS_S = 3.0
"""Within this time of a process group's end its sender says whose fault it was."""


class ControlChannel:
    """What the trainer says while weights take another way."""

    def __init__(self, connection: Connection, ticket: Ticket) -> None:
        self._connection, self._ticket, self._end = connection, ticket, False

    def poll(self) -> bool:
        """Return True, always; raises SyncFailure once no more weights come, saying why."""
        while not self._end and self._connection.poll(0):
            self._end = isinstance(_next(self._connection, self._ticket), End)
        return True

    def raise_cause(self) -> None:
        """Raise SyncFailure, after the weights have broken off, if the trainer says why, and does so soon."""
        if not self._end and self._connection.poll(SAYS_S):
            self.poll()

    def wait_end(self) -> bool:
        """Return whether these were all the weights that the trainer had."""
        return self._end or isinstance(_next(self._connection, self._ticket), End)


@dataclass
class ReceiverState:
    """What a receiver keeps from one sync to the next, while the sender's plan is the same."""

    plan: str
    buckets: tuple[Bucket, ...]
    group: TransferGroup | None = None

    def joined(self, group: Group, timeout_s: float, words: ControlChannel) -> TransferGroup:
        """Return the joined group, which may be the last sync's."""
        if self.group is None or self.group.group.name != group.name:
            self.leave()
            self.group = TransferGroup(group, timeout_s, words.poll)
        return self.group

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None


_TICKETS: Typed[list[Ticket]] = Typed(list[Ticket], "tickets")
_RECEIVERS: dict[str, ReceiverState] = {}


class ChannelSource:
    """A `quintet.rollout.WeightSource`: one ticket a receiver."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.tickets = list(tickets)

    def words(self) -> str:
        """Return the source as text: see `WeightSource.words`."""
        return _TICKETS.dump(self.tickets).decode()

    @classmethod
    def of(cls, words: str) -> ChannelSource:
        """Return the source of which these are the words. Raises QuintetError when they are something else."""
        return cls(_TICKETS.load(words.encode(), "the rollout"))

    def pieces(self, receiver: int) -> Iterator[Piece]:
        """Yield all that receiver takes, once: see `WeightSource`. A piece is good until the next is asked for.

        Raises SyncFailure naming the receiver when the trainer refuses the ticket, ends, or is silent for too long.
        """
        for batch in self.batches(receiver):
            yield from batch

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        """Yield all that a receiver takes, a bucket at a time: its pieces are good until the next list is asked for. On a GPU all
        that has been queued on the current stream by then is waited for."""
        ticket = self.tickets[receiver]
        known = _RECEIVERS.get(ticket.receiver)
        if known is not None and known.plan != ticket.plan:
            known.leave()
            del _RECEIVERS[ticket.receiver]
            known = None
        name = None if known is None or known.group is None else known.group.group.name
        connection = call(ticket, Hello(ticket.receiver, ticket.plan, known is not None, name))
        try:
            answer = _next(connection, ticket)
            if not isinstance(answer, Answer):
                raise SyncFailure(f"receiver {ticket.receiver}: the trainer did not answer its greeting")
            if known is None:
                assert answer.buckets is not None
                known = _RECEIVERS[ticket.receiver] = ReceiverState(ticket.plan, answer.buckets)
            if answer.group is None:
                yield from _through_memory(connection, ticket, known, answer)
            else:
                yield from _through_group(connection, ticket, known, answer)
        finally:
            connection.close()


def _through_memory(
    connection: Connection, ticket: Ticket, known: ReceiverState, answer: Answer
) -> Iterator[list[Piece]]:
    seen: list[MappedBuffer] = []
    device = _device(answer)
    try:
        seen.extend(MappedBuffer(connection, room, device) for room in answer.room)
        while isinstance(said := _next(connection, ticket), Offer):
            yield _pieces(known.buckets[said.number], seen[said.slot].bytes)
            if device.type == "cuda":
                torch.cuda.synchronize()
            _say(connection, ticket, said.number)
    finally:
        for one in seen:  # before the trainer hears that all is taken, and frees it
            one.close()
    _say(connection, ticket, len(known.buckets))


def _through_group(
    connection: Connection, ticket: Ticket, known: ReceiverState, answer: Answer
) -> Iterator[list[Piece]]:
    """Two buckets' memory: while one is read, the next arrives."""
    assert answer.group is not None
    device, buckets = _device(answer), known.buckets
    place, room = slots([bucket.nbytes for bucket in buckets], answer.bucket_bytes)
    memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in room]
    posted: list[Any] = []
    words = ControlChannel(connection, ticket)
    try:
        group = known.joined(answer.group, ticket.timeout_s, words)
        for number, bucket in enumerate(buckets):
            for ahead in range(len(posted), min(number + 2, len(buckets))):
                if ahead > number and place[ahead] == place[number]:
                    break  # its memory is being read
                posted.append(group.recv(memory[place[ahead]][: buckets[ahead].nbytes]))
            group.wait(posted[number], words.poll)
            yield _pieces(bucket, memory[place[number]])
            # Not for the whole device: the next bucket is on its way, and where another receiver dies it never comes.
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        if not words.wait_end():
            raise SyncFailure(f"receiver {ticket.receiver}: the trainer has other buckets than it announced")
        _say(connection, ticket, len(known.buckets))
    except RuntimeError as error:
        known.leave()
        words.raise_cause()
        raise SyncFailure(
            f"receiver {ticket.receiver}: weights stopped coming from the trainer: {error}"
        ) from None
    except BaseException:
        known.leave()
        raise


def _pieces(bucket: Bucket, memory: torch.Tensor) -> list[Piece]:
    views = bucket.views(memory)
    return [
        Piece(one.name, one.shape, one.box, view) for one, view in zip(bucket.entries, views, strict=True)
    ]


def _device(answer: Answer) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if answer.device == "cuda" else torch.device("cpu")
    )


def _next(connection: Connection, ticket: Ticket) -> Said:
    with _told(ticket):
        if not connection.poll(ticket.timeout_s):
            raise QuintetError(f"nothing came from the trainer within {ticket.timeout_s:g} s")
        said = hear(connection, SAID, "the trainer")
    if isinstance(said, GivenUp):
        raise SyncFailure(f"receiver {ticket.receiver}: {said.why}")
    return said


def _say(connection: Connection, ticket: Ticket, taken: int) -> None:
    with _told(ticket):
        say(connection, TAKEN, taken)


@contextmanager
def _told(ticket: Ticket) -> Iterator[None]:
    """What goes wrong within is told of the receiver."""
    try:
        yield
    except QuintetError as error:
        raise SyncFailure(f"receiver {ticket.receiver}: {error}") from None
    except (EOFError, OSError):
        raise SyncFailure(
            f"receiver {ticket.receiver}: the trainer went away before all weights had arrived, or gave this receiver up"
        ) from None
