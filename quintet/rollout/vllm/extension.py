"""What vLLM's workers can do besides their own: vLLM mixes `Extension` into its worker class (`worker_extension_cls`).

They are asked through vLLM, which carries bytes alone: the name of one of `VERBS` and its arguments, and back what it returns or
raised. These are JSON of the types that the method declares; what is told of tokens is too much for that, see `token_records.RecordsByRequest`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import torch

from quintet.errors import QuintetError, SyncFailure, SyncMismatch, UserError
from quintet.rollout.base import Part
from quintet.rollout.vllm import compat, runners
from quintet.rollout.vllm.token_records import RecordsByRequest, TokenRecords
from quintet.rollout.vllm.token_store import TokenStore
from quintet.rollout.vllm.worker import WeightWorker
from quintet.typed import Typed, Words

# A worker imports this before it meets the others.
compat.stores_on_loopback()

P = ParamSpec("P")
T = TypeVar("T")
ANSWER, RAISED = b"answer", b"raised"


class Extension(WeightWorker):
    """The methods that `Engine.rpc` calls in each worker. Its names are apart from those of vLLM's worker."""

    device: torch.device
    _kv_bytes: list[tuple[torch.UntypedStorage, int]]
    _buffers: dict[str, torch.Tensor]

    def called(self, message: bytes) -> bytes:
        """Call a method, and return what `answers` reads. vLLM's own way through its processes makes other things of objects,
        and text of errors."""
        runners.complete_runner(self.model_runner)
        name, _, told = message.partition(b"\n")
        try:
            verb = VERBS[name.decode()]
            value = getattr(self, verb.name)(*verb.arguments.load(told, "the rollout"))
            return ANSWER + b"\n" + verb.answer.dump(value)
        except Exception as error:
            raised = _Raised(type(error).__name__, str(error), traceback.format_exc())
            return RAISED + b"\n" + _RAISED.dump(raised)

    def fall_asleep(self, level: int) -> int:
        """Give the KV cache up, and at levels 1 and 2 on a GPU the weights: 1 copies them to the host, 2 forgets them. Bytes.

        vLLM for CPU gives nothing up. There the KV cache's memory is taken from under it, at any level; its weights stay, in
        forms of oneDNN's that nobody can take apart and put together again.

        Buffers stay as they are, at any level. vLLM 0.20.2 itself sees to those of the policy alone: a drafter that has lost its
        own drafts what is never accepted (test_drafting.py::test_sleep_that_loses_buffers_costs_no_acceptance).
        """
        if level:
            self._buffers = {
                name: one.cpu().clone() for name, one in self._models().drafter_buffers().items()
            }
        if self.device.type != "cpu":
            torch.cuda.synchronize()  # a step that was scheduled ahead may still read what is about to go
            free = torch.cuda.mem_get_info()[0]
            store = getattr(self, "_store", None)
            if isinstance(store, TokenStore):
                store.release()
            with runners.tables_kept(self.model_runner.kv_caches):
                if level:
                    self.sleep(level)  # type: ignore[attr-defined]
                else:
                    compat.release_kv_cache()
            return max(torch.cuda.mem_get_info()[0] - free, 0)
        storages = {c.untyped_storage()._cdata: c.untyped_storage() for c in self.model_runner.kv_caches}
        self._kv_bytes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._kv_bytes:
            storage.resize_(0)
        return sum(size for _, size in self._kv_bytes)

    def wake_part(self, part: Part) -> int:
        """Take the memory of one part again; bytes."""
        came = 0
        if self.device.type != "cpu":
            free = torch.cuda.mem_get_info()[0]
            self.wake_up([part])  # type: ignore[attr-defined]
            came = max(free - torch.cuda.mem_get_info()[0], 0)
        elif part == "kv_cache":
            came = sum(size for _, size in self._kv_bytes)
            for storage, size in self._kv_bytes:
                storage.resize_(size)
            for cache in self.model_runner.kv_caches:
                cache.zero_()
        if part == "weights":
            for name, buffer in self._models().drafter_buffers().items():
                buffer.copy_(self._buffers[name])
        return came


class _Verb:
    """A method that may be called, and the types of its arguments and of what it returns."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.name = method.__name__
        types = get_type_hints(method, include_extras=True)
        answer = types.pop("return")
        self.answer: Typed[Any] | RecordsByRequest = (
            RecordsByRequest()
            if answer == dict[str, TokenRecords]
            else Typed(answer, f"what {self.name} returns")
        )
        taken: Any = tuple[tuple(types.values())]  # type: ignore[misc]
        self.arguments: Typed[tuple[Any, ...]] = Typed(taken, f"what {self.name} takes")


VERBS = {
    method.__name__: _Verb(method)
    for method in (
        Extension.begin_to_draft,
        Extension.fall_asleep,
        Extension.forget_records,
        Extension.keep_records,
        Extension.listen_for_routes,
        Extension.read_fingerprints,
        Extension.read_frozen,
        Extension.take_records,
        Extension.take_weights,
        Extension.wake_part,
        Extension.wanted_weights,
    )
}


@dataclass(frozen=True)
class _Raised:
    """What a worker raised: name of the class, message, and traceback."""

    kind: str
    message: Words
    where: Words


_RAISED: Typed[_Raised] = Typed(_Raised, "an error of vLLM's worker")
_ERRORS = {kind.__name__: kind for kind in (QuintetError, SyncFailure, SyncMismatch, UserError)}
"""Errors that come back as themselves; of others it is their text."""


def message(
    verb: Callable[Concatenate[Any, P], Any], *args: P.args, **kwargs: P.kwargs
) -> tuple[str, None, tuple[bytes]]:
    """Return what vLLM's `collective_rpc` is given to have the workers call a method."""
    given = signature(verb).bind(None, *args, **kwargs).args[1:]
    told = verb.__name__.encode() + b"\n" + VERBS[verb.__name__].arguments.dump(given)
    return Extension.called.__name__, None, (told,)


def answers(verb: Callable[..., T], replies: list[bytes]) -> list[T]:
    """Return what the workers answered to a call of this method. Raises the first worker's error, with its traceback as the
    cause; QuintetError for what is no answer to it."""
    found: list[T] = []
    for rank, reply in enumerate(replies):
        which, _, told = reply.partition(b"\n")
        if which == RAISED:
            raised = _RAISED.load(told, f"vLLM's worker of rank {rank}")
            known = _ERRORS.get(raised.kind)
            error = known(raised.message) if known else RuntimeError(f"{raised.kind}: {raised.message}")
            raise error from RuntimeError(f"in vLLM's worker of rank {rank}:\n{raised.where}")
        answer: Any = VERBS[verb.__name__].answer
        found.append(answer.load(told, f"vLLM's worker of rank {rank}"))
    return found
