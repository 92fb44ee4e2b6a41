"""Saving in the background: the state is copied to the host, and threads write it while training goes on. Whoever waits needs no such copy: what
is there is written.

A thread and not a process: a process would have to be forked, which a process that uses CUDA must not be, or started
anew and sent all bytes through shared memory (megatron-core's way: seconds before the first byte). Writing and
checksums release Python's lock.

Ranks tell rank 0 of what they wrote through the store that the process group was started with, so that no collective
runs beside those of training. That store lets anyone in who reaches its port, so what a rank tells is sealed with a key that
only the ranks have. Rank 0 then writes what makes the directory a checkpoint, or removes it.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import gathered, run_on_all_or_raise
from quintet.engine.checkpoint.format import Entry, TensorFile, publish, write_json
from quintet.engine.checkpoint.parts import Part
from quintet.engine.device import CopyAside
from quintet.errors import UserError
from quintet.typed import Typed, Words

POLL_S = 0.05
SILENCE_S = 900.0
"""Rank 0 gives up on another rank of which nothing has come, not even to the disk, for as long."""
WRITERS = 4
"""Threads that write, each a file of its own: one thread's checksums are slower than a fast disk."""
FILE_BYTES = 256 << 20
"""Less than this is not worth another file."""
SEAL_BYTES = 32
BUFFER_BYTES = 128 << 20, 1 << 30
"""Memory comes in buffers of powers of two from the first to the second, the largest that is filled, or of one tensor's size if that is
larger: torch rounds each pinned allocation up to a power of two, and what the next tensor does not fit into is lost."""
_ALIGN = 64


@dataclass(frozen=True)
class _Report:
    """What a rank tells of its part: what it wrote, or why it could not."""

    entries: list[Entry]
    problem: Words | None


_SECRETS: Typed[tuple[str, str]] = Typed(tuple[str, str], "the name of a save and its key")
_REPORT: Typed[_Report] = Typed(_Report, "what a rank tells of its part of a checkpoint")


@dataclass
class _Job:
    """One save of one rank. name, key: what the ranks know and nobody else does; the key seals what they tell. tensors: what is written of each
    part; aside: they are copies, with a storage of their own. rng: random states of this rank. state: content of state.json."""

    path: Path
    name: str
    key: str
    rank: int
    ranks: int
    parts: list[Part]
    tensors: list[Tensor]
    aside: bool
    rng: dict[str, Any]
    state: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class _Staging:
    """Copies of tensors on the host, pinned on GPU machines, in memory that is kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a copy of each on the CPU, which owns its storage; valid until the next call. Waits for what computes them.

        On a GPU machine tensors may be on either side; those on the GPU are copied on a stream of their own.
        """
        copies = self._room(tensors)
        CopyAside(zip(copies, tensors, strict=True)).wait()
        return copies

    def _room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors of the same types and sizes: buffers are filled in order, each as far as the next one fits."""
        found, number, used = [], 0, 0
        left, (least, most) = sum(tensor.nbytes for tensor in tensors), BUFFER_BYTES
        for tensor in tensors:
            size = tensor.nbytes
            while number < len(self._buffers) and used + size > len(self._buffers[number]):
                number, used = number + 1, 0
            if number == len(self._buffers):
                pinned, room = torch.cuda.is_available(), 1 << left.bit_length() >> 1
                room = max(size, least, min(room, most))
                self._buffers.append(torch.empty(room, dtype=torch.uint8, pin_memory=pinned))
                used = 0
            found.append(_owning(self._buffers[number], used, tensor))
            used += -(-size // _ALIGN) * _ALIGN
            left -= size
        return found


def _owning(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor over part of a buffer whose storage is that part alone: torch.save writes whole storages."""
    if not like.nbytes:
        return torch.empty_like(like, device="cpu")
    part: Any = buffer.numpy()[start : start + like.nbytes]
    return torch.frombuffer(part, dtype=torch.uint8).view(like.dtype).view(like.shape)


class Saver:
    """Saves of one engine, one at a time."""

    def __init__(self) -> None:
        self._staging = _Staging()
        self._job: _Job | None = None

    def start(
        self, path: Path, parts: Sequence[Part], rng: dict[str, Any], state: dict[str, Any], *, aside: bool
    ) -> None:
        """Begin to write this rank's part of a checkpoint. Collective. aside: copy it to the host first, so that what is saved may change;
        otherwise it may not before it is `finished`.

        Raises UserError when `path` exists and is not an empty directory, or cannot be made; RuntimeError when the
        last save was not waited for.
        """
        if self._job is not None:
            raise RuntimeError("the last save is not finished: call save_finished(wait=True) first")
        run_on_all_or_raise(lambda: _make(path) if dist.get_rank() == 0 else None)
        name, key = gathered(_SECRETS, (secrets.token_hex(16), secrets.token_hex(32)))[0]
        pieces = [piece for part in parts if part.saved for piece in part.pieces()]
        tensors = [piece.flat for piece in pieces]
        try:
            if aside:
                tensors = run_on_all_or_raise(lambda: self._staging.copy(tensors))
        except Exception:
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            raise
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._job = _Job(path, name, key, rank, ranks, pieces, tensors, aside, rng, state)
        store = dist.distributed_c10d._get_default_store()
        threading.Thread(target=_write, args=(self._job, store), name="checkpoint", daemon=True).start()

    def finished(self, wait: bool) -> bool:
        """Return whether this rank's part is on the disk; on rank 0, whether the whole checkpoint is. No collective.

        Raises UserError naming path and reason when it could not be written; the next save may then begin.
        """
        job = self._job
        if job is None:
            return True
        if not job.done.wait(None if wait else 0):
            return False
        self._job = None
        if job.error is not None:
            raise job.error
        return True


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(f"{path} is not empty: a checkpoint is saved to a new directory")
    except OSError as cause:
        raise _in_words(path, cause) from None


def _write(job: _Job, store: Any) -> None:
    """What the thread does. Errors are kept for `finished`."""
    try:
        entries, error = _write_part(job), None
    except Exception as cause:
        entries, error = [], _in_words(job.path, cause)
    try:
        if job.rank:
            _tell(job, store, _Report(entries, None if error is None else str(error) or repr(error)))
        else:
            error = _conclude(job, store, entries, error)
    except Exception as cause:
        error = error or _in_words(job.path, cause)
    job.error = error
    job.parts.clear()
    job.tensors.clear()
    job.done.set()


def _write_part(job: _Job) -> list[Entry]:
    """This rank's files. What was written is removed again when that fails."""
    written = list(zip(job.parts, job.tensors, strict=True))
    count = min(WRITERS, 1 + sum(tensor.nbytes for tensor in job.tensors) // FILE_BYTES)
    names = [f"__{job.rank}_{n}.distcp" for n in range(count)]
    rng = job.path / f"rng-{job.rank:05d}.json"
    try:
        with ThreadPoolExecutor(count) as pool:
            paths, shares = (job.path / name for name in names), (written[n::count] for n in range(count))
            files = pool.map(_write_file, paths, shares, [job.aside] * count)
            entries = [entry for file in files for entry in file]
        write_json(rng, job.rng)
        return entries
    except BaseException:
        for name in (*names, rng.name):
            (job.path / name).unlink(missing_ok=True)
        raise


def _write_file(path: Path, written: Sequence[tuple[Part, Tensor]], aside: bool) -> list[Entry]:
    with TensorFile(path) as file:
        for part, tensor in written:
            file.add(part.key, part.shape, part.box, tensor if aside else tensor.to("cpu", copy=True))
    return file.entries


def _conclude(job: _Job, store: Any, entries: list[Entry], error: Exception | None) -> Exception | None:
    """Rank 0, when all ranks have written theirs: publish it, or remove the directory. Returns the error there was."""
    for rank in range(1, job.ranks):
        try:
            told = _told(job, store, rank)
        except UserError as cause:
            error = error or cause
            continue
        entries = entries + told.entries
        if told.problem is not None:
            error = error or UserError(told.problem)
    if error is None:
        try:
            publish(job.path, entries, job.state)
        except Exception as cause:
            error = _in_words(job.path, cause)
    if error is not None:
        shutil.rmtree(job.path, ignore_errors=True)
    return error


def _heard(job: _Job, store: Any, rank: int) -> bool:
    """Wait for a rank's word, as long as its files grow."""
    written, since = -1, time.monotonic()
    while not store.check([_key(job, rank)]):
        time.sleep(POLL_S)
        if time.monotonic() - since > SILENCE_S:
            now = sum(one.stat().st_size for one in job.path.glob(f"__{rank}_*.distcp"))
            if now == written:
                return False
            written, since = now, time.monotonic()
    return True


def _tell(job: _Job, store: Any, report: _Report) -> None:
    data = _REPORT.dump(report)
    store.set(_key(job, job.rank), _seal(job, job.rank, data) + data)


def _told(job: _Job, store: Any, rank: int) -> _Report:
    """What a rank has told. Raises UserError where nothing comes, or what has come is not what it said."""
    if not _heard(job, store, rank):
        raise UserError(
            f"checkpoint {job.path} was not saved: nothing came from rank {rank} for {SILENCE_S:g} s; look in its log whether it "
            "ended, and at its disk"
        )
    told = store.get(_key(job, rank))
    store.delete_key(_key(job, rank))
    seal, data = told[:SEAL_BYTES], told[SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(job, rank, data)):
        raise UserError(
            f"checkpoint {job.path} was not saved: what rank 0's store has from rank {rank} was not written by that rank. Somebody "
            "else writes to the ports of this run: nobody but its nodes may reach them"
        )
    return _REPORT.load(data, f"rank {rank}")


def _seal(job: _Job, rank: int, data: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(job.key), _key(job, rank).encode() + b"\0" + data, "sha256")


def _key(job: _Job, rank: int) -> str:
    return f"quintet checkpoint {job.name} {rank}"


def _in_words(path: Path, cause: Exception) -> Exception:
    """The error of a write as the user can mend it; anything else as it is."""
    if not isinstance(cause, OSError):
        return cause
    where = cause.filename or path
    advice = {
        errno.ENOSPC: "free space there, or save to another disk",
        errno.EDQUOT: "raise the quota, or save to another disk",
        errno.EACCES: "give this user the right to write there",
        errno.EROFS: "save to a disk that can be written to",
    }.get(cause.errno or 0, "make the directory writable, or save to another one")
    return UserError(f"checkpoint {path} was not saved: {where}: {cause.strerror or cause}; {advice}")
