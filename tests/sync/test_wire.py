"""Control messages: nobody waits for ever, on either side."""

from __future__ import annotations

import socket

import pytest

from quintet.sync.wire import bounded


def test_a_message_that_nobody_reads_or_ends_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as door:
        theirs = socket.create_connection(door.getsockname())
        ours, _ = door.accept()
    connection = bounded(ours, 0.2)
    with pytest.raises(BlockingIOError):
        connection.send_bytes(b"x" * (64 << 20))
    theirs.recv(1 << 20)
    theirs.send(b"\0\0\1\0half of it")
    with pytest.raises(BlockingIOError):
        connection.recv_bytes()
    connection.close()
    theirs.close()
