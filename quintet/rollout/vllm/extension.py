"""What vLLM's workers can do besides their own: vLLM mixes `Extension` into its worker class (`worker_extension_cls`)."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import torch

from quintet.rollout.base import Part
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.worker import WeightWorker

EXTENSION = f"{__name__}.Extension"


class Extension(WeightWorker):
    """Called by `Engine.rpc`, in each worker. Its names are apart from those of vLLM's worker."""

    device: torch.device
    _kv_bytes: list[tuple[torch.UntypedStorage, int]]

    def called(self, message: bytes) -> bytes:
        """Call a method: (name, arguments) and the answer, or what it raised and where, are pickled. vLLM's own way through
        its processes makes other things of objects, and text of errors."""
        compat.complete_runner(self.model_runner)
        name, arguments = pickle.loads(message)
        try:
            return pickle.dumps((getattr(self, name)(*arguments), None, ""))
        except Exception as error:
            return pickle.dumps((None, error, traceback.format_exc()))

    def fall_asleep(self, level: int) -> None:
        """Give the KV cache up, and at levels 1 and 2 on a GPU the weights: 1 copies them to the host, 2 forgets them.

        vLLM for CPU gives nothing up. There the KV cache's memory is taken from under it, at any level; its weights stay, in
        forms of oneDNN's that nobody can take apart and put together again.
        """
        if self.device.type != "cpu":
            torch.cuda.synchronize()  # a step that was scheduled ahead may still read what is about to go
            with compat.tables_kept(self.model_runner.kv_caches):
                if level:
                    self.sleep(level)  # type: ignore[attr-defined]
                else:
                    compat.release_kv_cache()
            return
        storages = {c.untyped_storage()._cdata: c.untyped_storage() for c in self.model_runner.kv_caches}
        self._kv_bytes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._kv_bytes:
            storage.resize_(0)

    def wake_part(self, part: Part) -> None:
        """Take the memory of one part again."""
        if self.device.type != "cpu":
            self.wake_up([part])  # type: ignore[attr-defined]
        elif part == "kv_cache":
            for storage, size in self._kv_bytes:
                storage.resize_(size)
            for cache in self.model_runner.kv_caches:
                cache.zero_()


def call(name: str, arguments: tuple[Any, ...]) -> bytes:
    """The message that has `called` call a method."""
    return pickle.dumps((name, arguments))


def answers(replies: list[bytes]) -> list[Any]:
    """What the workers answered. Raises the first worker's error, with its traceback as the cause."""
    found = [pickle.loads(reply) for reply in replies]
    for rank, (_, error, where) in enumerate(found):
        if error is not None:
            raise error from RuntimeError(f"in vLLM's worker of rank {rank}:\n{where}")
    return [value for value, _, _ in found]
