"""Where a rollout gets its weights: opened, with a ticket, in the process that takes them.

Runs beside any rollout engine and its own version of torch: neither megatron-core nor Ray is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quintet.errors import QuintetError
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


class Line:
    """A receiver's line to the trainer; what goes wrong on it is a SyncFailure that names the receiver."""

    def __init__(self, ticket: Ticket, said: Hello) -> None:
        self.ticket, self.connection = ticket, call(ticket, said)
        self.ended = False
        """Whether the trainer has said that these were all its weights."""

    def hear(self) -> Said:
        """Return what the trainer says next; raises when that is that no more weights come."""
        with self.named():
            if not self.connection.poll(self.ticket.timeout_s):
                raise QuintetError(f"nothing came from the trainer within {self.ticket.timeout_s:g} s")
            said = hear(self.connection, SAID, "the trainer")
        if isinstance(said, GivenUp):
            raise self.ticket.failure(said.why)
        self.ended = isinstance(said, End)
        return said

    def say(self, taken: int) -> None:
        """Say which bucket has been taken."""
        with self.named():
            say(self.connection, TAKEN, taken)

    def poll(self, within_s: float = 0.0) -> bool:
        """Hear what the trainer says while weights take another way, or begins to within this time. Returns True, always."""
        while not self.ended and self.connection.poll(within_s):
            self.hear()
        return True

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raise what goes wrong within as an error that names the receiver."""
        try:
            yield
        except QuintetError as error:
            raise self.ticket.failure(str(error)) from None
        except (EOFError, OSError):
            why = "the trainer went away before all weights had arrived, or gave this receiver up"
            raise self.ticket.failure(why) from None


@dataclass
class ReceiverState:
    """What a receiver keeps from one sync to the next, while the sender's plan is the same."""

    plan: str
    buckets: tuple[Bucket, ...]
    group: TransferGroup | None = None

    def joined(self, group: Group, line: Line) -> TransferGroup:
        """Return the joined group, which may be the last sync's."""
        if self.group is None or self.group.group.name != group.name:
            self.leave()
            self.group = TransferGroup(group, line.ticket.timeout_s, line.poll)
        return self.group

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None


_TICKETS: Typed[list[Ticket]] = Typed(list[Ticket], "tickets")
_RECEIVERS: dict[str, ReceiverState] = {}


class ChannelSource:
    """A `quintet.rollout.base.WeightSource`: one ticket a receiver."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.tickets = list(tickets)

    def words(self) -> str:
        """Return the source as text: see `WeightSource.words`."""
        return _TICKETS.dump(self.tickets).decode()

    @classmethod
    def of(cls, words: str) -> ChannelSource:
        """Return the source of which these are the words. Raises QuintetError when they are something else."""
        return cls(_TICKETS.load(words.encode(), "the rollout"))

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        """Yield all that a receiver takes, a bucket at a time: see `WeightSource`. On a GPU all that has been queued on the current
        stream by the time that the next list is asked for is waited for.

        Raises SyncFailure naming the receiver when the trainer refuses the ticket, ends, or is silent for too long.
        """
        ticket = self.tickets[receiver]
        known = _RECEIVERS.get(ticket.receiver)
        if known is not None and known.plan != ticket.plan:
            known.leave()
            del _RECEIVERS[ticket.receiver]
            known = None
        name = None if known is None or known.group is None else known.group.group.name
        line = Line(ticket, Hello(ticket.receiver, ticket.plan, known is not None, name))
        with line.connection:
            answer = line.hear()
            assert isinstance(answer, Answer)
            if known is None:
                assert answer.buckets is not None
                known = _RECEIVERS[ticket.receiver] = ReceiverState(ticket.plan, answer.buckets)
            if answer.group is None:
                yield from _through_memory(line, known, answer)
            else:
                yield from _through_group(line, known, answer, answer.group)


def _through_memory(line: Line, known: ReceiverState, answer: Answer) -> Iterator[list[Piece]]:
    seen: list[MappedBuffer] = []
    device = torch.device(answer.device)
    try:
        with line.named():
            seen.extend(MappedBuffer(handle, nbytes, device) for handle, nbytes in answer.memory)
        while isinstance(said := line.hear(), Offer):
            yield _pieces(known.buckets[said.number], seen[said.slot].bytes)
            if device.type == "cuda":
                torch.cuda.synchronize()
            line.say(said.number)
    finally:
        for one in seen:  # before the trainer hears that all is taken, and frees it
            one.close()
    line.say(len(known.buckets))


def _through_group(line: Line, known: ReceiverState, answer: Answer, group: Group) -> Iterator[list[Piece]]:
    """Two buckets' memory: while one is read, the next arrives."""
    device, buckets = torch.device(answer.device), known.buckets
    place, room = slots([bucket.nbytes for bucket in buckets], answer.bucket_bytes)
    memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in room]
    posted: list[Any] = []
    try:
        joined = known.joined(group, line)
        for number, bucket in enumerate(buckets):
            for ahead in range(len(posted), min(number + 2, len(buckets))):
                if ahead > number and place[ahead] == place[number]:
                    break  # its memory is being read
                posted.append(joined.broadcast(memory[place[ahead]][: buckets[ahead].nbytes]))
            joined.wait(posted[number], line.poll)
            yield _pieces(bucket, memory[place[number]])
            # Not for the whole device: the next bucket is on its way, and where another receiver dies it never comes.
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        while not line.ended:
            line.hear()
        line.say(len(known.buckets))
    except RuntimeError as error:
        known.leave()
        line.poll(SAYS_S)
        raise line.ticket.failure(f"weights stopped coming from the trainer: {error}") from None
    except BaseException:
        known.leave()
        raise


def _pieces(bucket: Bucket, memory: torch.Tensor) -> list[Piece]:
    views = bucket.views(memory)
    return [
        Piece(one.name, one.shape, one.box, view) for one, view in zip(bucket.entries, views, strict=True)
    ]
