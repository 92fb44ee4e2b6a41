"""The sender's ends of channels: who is to get a set of buckets, and how it is handed over.

A receiver that dies, closes its end or stays silent for too long is `lost`, with the reason; the others go on. One that is
lost and lives is never told that it was all, so it does not take for new weights what it read of a bucket that was meanwhile
filled anew; and memory that it may still look at is not given back before it has left.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from quintet.errors import QuintetError
from quintet.sync.buckets import Bucket
from quintet.sync.group import TransferGroup
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
    ended,
    hear,
    say,
    shutdown_write,
)

MEETS_S = 1.0
"""A process that died takes its sockets with it, one a little before the other."""
GONE = "its connection closed: it died, or gave up, before everything had arrived"


class SharedMemorySender:
    """A sender of one set of buckets, to all receivers that want it, through memory that both see."""

    def __init__(self, receivers: Sequence[str], buckets: Sequence[Bucket], timeout_s: float) -> None:
        self.receivers, self.buckets, self.timeout_s = list(receivers), tuple(buckets), timeout_s
        self.lost: dict[str, str] = {}
        self._lines: dict[str, Connection] = {}
        self._hellos: dict[str, Hello] = {}
        self._heard: dict[str, int] = {}
        self._given_up: list[Connection] = []

    def meet(self, here: dict[str, tuple[Connection, Hello]], missing: dict[str, str]) -> None:
        """Take note of the receivers that came, and of those that did not, and why. From here on `close` is owed."""
        self.lost = {one: missing[one] for one in self.receivers if one in missing}
        self._lines = {one: here[one][0] for one in self.receivers if one in here}
        self._hellos = {one: here[one][1] for one in self._lines}
        self._heard = dict.fromkeys(self._lines, -1)

    def open(self, answer: Answer) -> None:
        """Greet those receivers that came. answer: what all of them are told."""
        for one in list(self._lines):
            self._answer(one, answer)

    def _answer(self, one: str, answer: Answer) -> None:
        self._say(one, replace(answer, buckets=None if self._hellos[one].knows else self.buckets))

    def offer(self, number: int, slot: int, memory: Tensor) -> None:
        """Hand over the bucket of this number, which is in `memory`, the slot's bytes."""
        for one in list(self._lines):
            self._say(one, Offer(number, slot))

    def wait(self, number: int) -> None:
        """Wait until everyone has taken that bucket: its memory is free then."""
        self._hear(number)

    def finish(self) -> None:
        """Tell the receivers that it was all, and hear from them that they have it."""
        for one in list(self._lines):
            self._say(one, End())
        self._hear(len(self.buckets))

    def close(self) -> list[Connection]:
        """Let go of the receivers until the next sync; what both sides keep for it stays. Returns connections to those that were given
        up, which may still look at the memory they were shown."""
        for receiver, connection in list(self._lines.items()):
            if self._heard[receiver] < len(self.buckets):
                self._lose(receiver, "the trainer failed")
            else:
                connection.close()
        self._lines, given_up, self._given_up = {}, self._given_up, []
        return given_up

    def leave(self) -> None:
        """Give up what was kept: there is no next sync."""

    def _hear(self, wanted: int) -> None:
        """Every receiver's word that it has taken that bucket; of earlier ones it came before."""
        deadline = time.monotonic() + self.timeout_s
        for one, connection in list(self._lines.items()):
            try:
                while self._heard[one] < wanted:
                    if not connection.poll(max(0.0, deadline - time.monotonic())):
                        raise BlockingIOError
                    self._heard[one] = hear(connection, TAKEN, one)
            except (QuintetError, EOFError, OSError) as error:
                self._lose(one, self._reason(error))

    def _say(self, receiver: str, what: Said) -> None:
        try:
            say(self._lines[receiver], SAID, what)
        except OSError as error:
            self._lose(receiver, self._reason(error))

    def _reason(self, error: Exception) -> str:
        if isinstance(error, QuintetError):
            return str(error)
        return f"it took nothing for {self.timeout_s:g} s" if isinstance(error, BlockingIOError) else GONE

    def _lose(self, receiver: str, reason: str) -> None:
        self.lost[receiver] = reason
        connection = self._lines.pop(receiver)
        with suppress(OSError):
            say(connection, SAID, GivenUp(f"the trainer gave it up: {reason}"))
        shutdown_write(connection)
        self._given_up.append(connection)


class ProcessGroupSender(SharedMemorySender):
    """A sender as `SharedMemorySender`, through a process group of the sender (rank 0) and the receivers that came, which stays
    while these are the same. Where one receiver goes, the group is broken, and all in it are lost to this sync."""

    def __init__(
        self,
        receivers: Sequence[str],
        buckets: Sequence[Bucket],
        timeout_s: float,
        store: Store,
        backend: str,
    ) -> None:
        super().__init__(receivers, buckets, timeout_s)
        self._store, self._backend = store, backend
        self._group: TransferGroup | None = None
        self._members: list[str] = []
        self._work: dict[int, Any] = {}

    def open(self, answer: Answer) -> None:
        """Greet those receivers that came, and meet them in the group."""
        self._work, members = {}, list(self._lines)
        held = {self._hellos[one].group for one in members}
        if self._group is not None and (members != self._members or held != {self._group.group.name}):
            self.leave()
        if not members:
            return
        store, name = self._store, secrets.token_hex(8) if self._group is None else self._group.group.name
        group = Group(name, store.host, store.port, 0, 1 + len(members), self._backend)
        for rank, one in enumerate(members, start=1):
            self._answer(one, replace(answer, memory=(), group=replace(group, rank=rank)))
        gone = [one for one in members if one in self.lost]
        if gone:  # the group has a place for them, and nobody is to wait until it is filled
            self._give_up(gone)
            return
        try:
            if self._group is None:
                self._group = TransferGroup(group, self.timeout_s, self._all_here)
            self._members = members
        except RuntimeError as error:
            self._break(error)

    def offer(self, number: int, slot: int, memory: Tensor) -> None:
        """Begin to send the bucket of this number."""
        if self._group is not None and self._lines:
            try:
                self._work[number] = self._group.broadcast(memory[: self.buckets[number].nbytes])
            except RuntimeError as error:
                self._break(error)

    def wait(self, number: int) -> None:
        """Wait until that bucket has left: its memory is free then."""
        work = self._work.pop(number, None)
        if work is not None and self._group is not None:
            try:
                self._group.wait(work, self._all_here)
            except RuntimeError as error:
                self._break(error)

    def close(self) -> list[Connection]:
        under_way = any(self._heard[one] < len(self.buckets) for one in self._lines)
        given_up = super().close()
        if under_way:  # a transfer that nobody takes would keep the memory
            self.leave()
        return given_up

    def leave(self) -> None:
        """Leave the group: there is no next sync."""
        if self._group is not None:
            self._group.close()
        self._group, self._work = None, {}

    def _all_here(self) -> bool:
        return not any(ended(one) for one in self._lines.values())

    def _break(self, error: RuntimeError) -> None:
        """Find out whose end it was, and give everyone up."""
        deadline = time.monotonic() + MEETS_S
        gone: list[str] = []
        while not gone and time.monotonic() < deadline:
            gone = [one for one, connection in self._lines.items() if ended(connection)]
            time.sleep(0.01)
        self._give_up(gone, f"its process group broke: {error}")

    def _give_up(self, gone: Sequence[str], otherwise: str = "") -> None:
        """Lose all that are left, because those went away."""
        why = f"of its process group {', '.join(gone)} went away" if gone else otherwise
        for one in list(self._lines):
            self._lose(one, GONE if one in gone else why)
        self.leave()


class Store:
    """The store where the members of this rank's groups find each other, on one address of this node; made when it is first
    needed."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host, self._timeout_s = host, timeout_s

    @cached_property
    def store(self) -> Any:
        listening = socket.create_server((self.host, 0))  # torch's own socket would listen on all addresses
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            listening.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listening.detach(),
        )

    @property
    def port(self) -> int:
        return int(self.store.port)
