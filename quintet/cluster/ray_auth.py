"""Who may connect to a Ray: whoever shows its token, or everybody (cluster.ray_auth).

Every process of Ray reads from its environment whether a token is asked for, and where it is to be found; Ray has read it in this
process when it was imported, and reads it again here, from what is put into the environment for the length of a block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import ray
import ray._raylet
import ray.exceptions

from quintet.errors import UserError
from quintet.runs.fsync import Scratch

Auth = Literal["token", "none"]
"""What whoever connects to a Ray must show: the values of cluster.ray_auth."""
AUTH_MODE = {"token": "token", "none": "disabled"}
_TOKEN_PLACES = "Ray reads it from RAY_AUTH_TOKEN, from the file that RAY_AUTH_TOKEN_PATH names, or from ~/.ray/auth_token"
REPLY_TIMEOUT_S = 5.0  # of Ray's GCS


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Set these variables of Ray's, or unset those that are None, for the length of the block."""
    before = {name: os.environ.get(name) for name in changes}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()

    put(changes)
    try:
        yield
    finally:
        put(before)


def scratch_with_token() -> tuple[Scratch, Path]:
    """Make a directory for a Ray, and a token in it that nobody else can read. Raises UserError where there is no room."""
    with contextlib.ExitStack() as unless_whole:
        try:
            # In /tmp, because the sockets' paths must stay under 104 characters on macOS.
            scratch = Scratch("quintet-ray-", "/tmp")
            unless_whole.callback(scratch.cleanup)
            token = scratch.path / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        except OSError as error:
            raise UserError(
                f"Ray cannot be started: its files cannot be written in /tmp: {error.strerror}. Make room there"
            ) from None
        unless_whole.pop_all()
    return scratch, token


def check_auth(address: str, cluster: str, auth: Auth) -> None:
    """Raise UserError unless the Ray at `address`, which messages call `cluster`, asks for a token if `auth` says so, and for the
    one that is found here."""
    open_to_all = _admits(address, "none")
    if auth == "none" and not open_to_all:
        raise UserError(
            f"{cluster} asks for a token, and cluster.ray_auth=none sends none: leave that key out."
        )
    if auth == "none":
        return
    if open_to_all:
        raise UserError(
            f"{cluster} asks for no token: whoever reaches it can run code in it. Start it with RAY_AUTH_MODE=token in the "
            "environment; or, in a network that you trust, set cluster.ray_auth=none."
        )
    if not _has_token():
        raise UserError(f"{cluster} asks for a token, and there is none here: {_TOKEN_PLACES}.")
    if not _admits(address, auth):
        raise UserError(f"{cluster} asks for another token than the one here: {_TOKEN_PLACES}.")


def _has_token() -> bool:
    try:
        return bool(ray._raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except ray.exceptions.AuthenticationError:  # a file is named, and is not there
        return False


def _admits(address: str, auth: Auth) -> bool:
    """Whether the cluster answers one who shows a token, or none."""
    with environment(RAY_AUTH_MODE=AUTH_MODE[auth]), _no_stderr():
        try:
            ray._raylet.GcsClient(address=address).internal_kv_exists(b"", None, timeout=REPLY_TIMEOUT_S)
        except ray.exceptions.AuthenticationError:
            return False
        return True


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """For the length of the block nothing goes to stderr: a client of Ray's says there that it was refused."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
