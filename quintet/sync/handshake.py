"""Both ends of a connection prove that they hold the key, and neither shows it.

    sender → receiver    s: 32 random bytes
    receiver → sender    r: 32 random bytes, and HMAC-SHA256(key, "receiver" s r)
    sender → receiver    HMAC-SHA256(key, "sender" s r); zeros to one without the key

Nothing else is read before, and all of it within one time limit. What one role proves is no proof of the other, so nobody gets in
by sending back what he is sent. (Python's own handshake, of multiprocessing.connection, is HMAC-MD5 here, and has a time limit a
read.)
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

RANDOM_BYTES = PROOF_BYTES = 32


class WrongKey(Exception):
    """The other end does not hold the key."""


def welcome(channel: socket.socket, key: bytes, timeout_s: float) -> None:
    """Prove the key to a receiver that proves it. Raises WrongKey, or OSError for one that leaves or takes too long."""
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(RANDOM_BYTES)
    channel.settimeout(timeout_s)
    channel.sendall(ours)
    theirs = _read(channel, RANDOM_BYTES, deadline)
    proof = _read(channel, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"receiver", ours + theirs)):
        channel.sendall(bytes(PROOF_BYTES))
        raise WrongKey("it does not hold the key of this run's weight sync")
    channel.sendall(_proof(key, b"sender", ours + theirs))


def introduce(channel: socket.socket, key: bytes, timeout_s: float) -> None:
    """Prove the key to a sender that proves it. Raises as `welcome` does."""
    deadline = time.monotonic() + timeout_s
    both = _read(channel, RANDOM_BYTES, deadline) + secrets.token_bytes(RANDOM_BYTES)
    channel.sendall(both[RANDOM_BYTES:] + _proof(key, b"receiver", both))
    if not hmac.compare_digest(_read(channel, PROOF_BYTES, deadline), _proof(key, b"sender", both)):
        raise WrongKey("it does not hold the key of this ticket")


def _proof(key: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.digest(key, role + both, "sha256")


def _read(channel: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long to prove that it holds the key")
        channel.settimeout(left)
        part = channel.recv(nbytes - len(found))
        if not part:
            raise ConnectionError("it left before it proved that it holds the key")
        found += part
    return found
