"""Strangers at the door of the weights' sender: refused, logged, and nobody's sync fails by them."""

from __future__ import annotations

import logging
import pickle
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quintet.errors import SyncFailure
from quintet.sync import rendezvous as reception
from quintet.sync.handshake import WrongKey, introduce, welcome
from quintet.sync.rendezvous import CROWD, Rendezvous
from quintet.sync.server import ReceiverSpec, WeightServer
from quintet.sync.source import ChannelSource
from quintet.sync.wire import Hello, Ticket, bounded, call
from tests.patience import BUSY
from tests.security.stranger import Runs
from tests.sync.layouts import Taker
from tests.sync.one_rank import NAMES, boxes, server_of, shards

KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate")]


def connected(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 10 * BUSY)


def strangers(ticket: Ticket, harm: Path) -> None:
    """Who has no key, and who has one and says what runs when it is unpickled."""
    evil = pickle.dumps(Runs(harm))
    with connected(ticket.address) as garbage:
        garbage.sendall((evil * 8)[:512])
        with suppress(OSError):
            while garbage.recv(1 << 10):
                pass
    with pytest.raises(SyncFailure, match="its ticket has another key"):
        call(replace(ticket, key=bytes(32)), Hello(ticket.receiver, ticket.plan, False, None))
    with connected(ticket.address) as inside:
        introduce(inside, ticket.key, 10 * BUSY)
        connection = bounded(inside, 10 * BUSY)
        connection.send_bytes(evil)
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
        connection.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("colocated", KINDS)
def test_a_sync_goes_on_beside_strangers(tmp_path, caplog, colocated):
    server, harm = server_of(shards(), timeout_s=60.0 * BUSY), tmp_path / "harm"
    (ticket,) = server.plan([ReceiverSpec("r", boxes(*NAMES), colocated)])
    seen: list[str] = []

    def use(piece: object) -> None:
        if not seen:
            strangers(ticket, harm)  # in the middle of it
        seen.append(piece.name)  # type: ignore[attr-defined]

    with caplog.at_level(logging.WARNING), closing(connected(ticket.address)):  # one says nothing at all
        strangers(ticket, harm)
        taker = Taker(ChannelSource([ticket]), use)
        assert server.serve().lost == {}
        taker.finish()
        assert seen == list(NAMES)
        server.close()
    assert not harm.exists()
    said = [one.getMessage() for one in caplog.records if one.name == reception.__name__]
    whence = r"127\.0\.0\.1:\d+: "
    for why in ("does not hold the key", "is not a receiver's first words: Invalid JSON"):
        assert sum(why in one for one in said) >= 2, said
    assert all(re.search(f"refused a connection from {whence}", one) for one in said)


@pytest.fixture
def door() -> Iterator[Rendezvous]:
    found = Rendezvous("127.0.0.1", timeout_s=60.0 * BUSY)
    yield found
    found.close()


def test_a_crowd_that_says_nothing_keeps_nobody_out(door):
    plan, address = door.expect(["r"]), door.address
    crowd = [connected(address) for _ in range(3 * CROWD)]
    began = time.monotonic()
    call(Ticket("r", address, plan, door.key, 60.0), Hello("r", plan, False, None)).close()
    here, missing = door.meet()
    assert time.monotonic() - began < reception.GREETS_S / 2
    assert (list(here), missing) == (["r"], {})
    assert len(door._unknown) <= CROWD
    assert threading.active_count() < 2 * CROWD
    for one in crowd:
        one.close()


def test_one_that_says_a_byte_at_a_time_has_as_long_as_one_that_says_nothing(door, monkeypatch):
    monkeypatch.setattr(reception, "GREETS_S", 1.0)
    door.expect(["r"])
    began = time.monotonic()
    with connected(door.address) as slow:
        slow.recv(32)
        with suppress(OSError):
            while time.monotonic() - began < 20 * BUSY:
                slow.sendall(b"x")
                slow.settimeout(0.1)
                with suppress(TimeoutError):
                    assert slow.recv(32) == b""
                    break
    assert time.monotonic() - began < 5 * BUSY


def test_a_flood_does_not_fill_the_disk_with_its_refusals(door, monkeypatch, caplog):
    monkeypatch.setattr(reception, "LOGGED", 5)
    door.expect(["r"])
    for _ in range(20):
        connected(door.address).close()
    deadline = time.monotonic() + 10 * BUSY
    while (door._refused, len(caplog.records)) != (20, 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (door._refused, len(caplog.records)) == (20, 5)
    assert sum("this one none" in record.getMessage() for record in caplog.records) == 1


def test_what_one_role_proves_is_no_proof_of_the_other():
    """Somebody between two senders: each gets the other's words, and neither takes them."""
    ours, theirs = socket.socketpair()
    found: list[type] = []

    def one(channel: socket.socket) -> None:
        try:
            welcome(channel, b"k" * 32, 0.5)
        except (WrongKey, OSError) as error:
            found.append(type(error))

    threads = [threading.Thread(target=one, args=(end,)) for end in (ours, theirs)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10 * BUSY
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert len(found) == 2
    ours.close()
    theirs.close()


def listening() -> set[str]:
    """Addresses that this process listens on."""
    return {
        one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN
    }


@pytest.mark.usefixtures("alone")
def test_its_sockets_are_on_loopback_where_the_rollouts_are_on_this_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outward())  # it is said where to listen, and not looked for
    before = listening()
    server: WeightServer = server_of(shards())
    source = ChannelSource(server.plan([ReceiverSpec("r", boxes(*NAMES), False)]))
    seen: list[set[str]] = []
    taker = Taker(source, lambda piece: seen.append(listening()))
    assert server.serve().lost == {}
    taker.finish()
    server.close()
    assert set().union(*seen) - before <= {"127.0.0.1"}
    assert seen[0]


def outward() -> str:
    """An interface that is not loopback, if there is one."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and not one.address.startswith("127.") for one in found):
            return name
    return "lo"
