"""SGLang's versions: which is supported, and every place where quintet relies on how it is made inside.

Nothing else in quintet imports SGLang or looks at its version. What is said of its inside was read in the source of 0.5.17.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.metadata
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from quintet.errors import UserError
from quintet.install import with_extra

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUPPORTED = ("0.5.17",)
"""The versions of the distribution `sglang` that quintet was written for."""
TRANSFORMERS = "5.12"
"""The versions of transformers with which it can be imported: later ones have names that it registers itself."""

_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"

_ENVIRONMENT = {
    # The context is a few tokens longer than a sample, as SGLang keeps some back; a model's limit counts without those.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Its processes are `python -c`, which would look for modules in the working directory first.
    "PYTHONSAFEPATH": "1",
}


def installed() -> str | None:
    """Return the version of the SGLang that is installed, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require() -> str:
    """Return the version of the installed SGLang. Raises UserError where there is none, or one that is not supported."""
    supported, found = ", ".join(SUPPORTED), installed()
    if found is None:
        raise UserError(
            f"rollout.backend=sglang: SGLang is not installed; supported is sglang {supported}: "
            f"{with_extra('sglang')}, on a machine with NVIDIA GPUs. Or use rollout.backend=native"
        )
    # A local part names a build, not a version.
    if found.split("+")[0] not in SUPPORTED:
        raise UserError(
            f"rollout.backend=sglang: sglang {found} is installed, and not supported; supported is sglang {supported}. Install "
            "that, or use rollout.backend=native"
        )
    beside = importlib.metadata.version("transformers")
    if not beside.startswith(f"{TRANSFORMERS}."):
        raise UserError(
            f"rollout.backend=sglang: sglang {found} needs transformers {TRANSFORMERS}, and {beside} is installed, with which it "
            f"cannot be imported: pip install 'transformers=={TRANSFORMERS}.*', or use rollout.backend=native"
        )
    return found


def prepare(device: str) -> None:
    """Set what SGLang reads from the environment when it is imported, where the user has not.

    Raises UserError where there are no GPUs, and for a setting under which it tells other log-probs than training needs.
    """
    require()
    if device == "cpu":
        raise UserError(
            "rollout.backend=sglang needs NVIDIA GPUs; use rollout.backend=native, or cluster.device=cuda"
        )
    if os.environ.get(_ORIGINAL, "").lower() in ("1", "true", "yes", "y"):
        raise UserError(
            f"{_ORIGINAL} is set: SGLang would tell log-probs of temperature 1, and training needs those of "
            "rollout.temperature; unset it"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def free_share(devices: int) -> float:
    """Return which share of the fullest of this process's first devices nobody has: SGLang takes its own of what is free there.

    The others than the first are looked at from outside, for CUDA would take memory of each to tell.
    """
    from torch import cuda

    free, total = cuda.mem_get_info(0)
    used = [cuda.device_memory_used(n) for n in range(devices)] if devices > 1 else [0]
    return (free - max(used) + used[0]) / total


def used_bytes(devices: int) -> int:
    """Return the bytes in use on this process's first devices, by all processes: see `free_share`."""
    from torch import cuda

    free, total = cuda.mem_get_info(0)
    return total - free + sum(map(cuda.device_memory_used, range(1, devices)))


@contextlib.contextmanager
def _put_back(names: MutableMapping[str, Any]) -> Iterator[None]:
    """After the block a mapping is what it was; it is never empty in between, for other threads read it."""
    before = dict(names)
    try:
        yield
    finally:
        for name in names.keys() - before.keys():
            del names[name]
        names.update(before)


@contextlib.contextmanager
def for_its_processes(meeting: Path) -> Iterator[None]:
    """Set in the block what the processes of an engine are to find; afterwards this process is as it was, although SGLang changes
    its environment, its logging, and how processes and event loops begin.

    They unpickle what they say to each other, and so talk where nobody else listens: ranks meet in a file, where a store of torch's
    would listen on all addresses, and their gloo is on loopback. meeting: that file, for as long as they live.
    """
    import torch

    root = logging.getLogger()
    with _put_back(os.environ), contextlib.ExitStack() as after:
        after.callback(setattr, root, "handlers", root.handlers[:])
        after.callback(root.setLevel, root.level)
        after.callback(multiprocessing.set_start_method, multiprocessing.get_start_method(True), force=True)
        after.callback(asyncio.set_event_loop_policy, asyncio.get_event_loop_policy())
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{meeting}"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Its memory saver, preloaded, links with CUDA's runtime, which pip keeps where the loader does not look.
        files = Path(torch.__file__).parents[1].glob("nvidia/*/lib/libcudart.so*")
        libraries = [os.environ.get("LD_LIBRARY_PATH", ""), *sorted({str(one.parent) for one in files})]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments" in os.environ.get(name, ""):
                del os.environ[name]  # memory that it gives up lies in segments that do not grow
        yield


def make_engine(arguments: Mapping[str, Any], meeting: Path) -> Any:
    """Return SGLang's offline engine. Its event loop is `loop`, which is that of the calling thread. meeting: a file of its ranks' own."""
    with for_its_processes(meeting):
        from sglang.srt.entrypoints.engine import Engine  # sets how event loops begin

        engine: Any = Engine.__new__(Engine)
        engine.run_scheduler_process_func = run_scheduler
        try:
            engine.__init__(**arguments)
        finally:  # at the end of this process it would stop all that this process has started
            atexit.unregister(engine.shutdown)
    # Quintet watches the processes itself, and tells which died; this one would end the process that made them.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def run_scheduler(*arguments: Any) -> None:
    """Be a scheduler of SGLang, in a process of its own, that draws with quintet's noise.

    The noise of 0.5.17 (srt/layers/sampler.py: `multinomial_with_seed`) has 32 bits, and a token whose bits are all ones is drawn
    whatever its probability: of 152k tokens one, at every 28,000th draw (test_sglang.py::test_it_draws_with_quintets_noise).
    """
    from sglang.srt.layers import sampler
    from sglang.srt.managers.scheduler import run_scheduler_process

    sampler.multinomial_with_seed = _draw
    run_scheduler_process(*arguments)


def _draw(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a place from each row, int64 [n, 1]."""
    from quintet.rollout.noise import draw_tokens

    return draw_tokens(logprobs, seeds, positions.long())[:, None]


def room(engine: Any) -> int:
    """Return how long a sequence may be: the context's length, or what the KV cache holds if that is less."""
    return int(engine.tokenizer_manager.max_req_input_len) + 6  # srt/managers/tp_worker.py: get_worker_info


def end(engine: Any) -> None:
    """Stop an engine's processes, and wait until their devices are free. `Engine.shutdown` stops all that this process has started."""
    found: list[psutil.Process] = []
    for pid in engine.get_all_child_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            found += [*one.children(recursive=True), one]
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(found, timeout=60)


def was_aborted(error: BaseException) -> bool:
    """Return whether this is how SGLang ends a request that is aborted before its scheduler has it."""
    return type(error).__name__ == "RequestAbortedError"


def abort_all(engine: Any) -> None:
    """Give up everything that SGLang has. To be called in its loop. Engine itself has no such method."""
    engine.tokenizer_manager.abort_request(abort_all=True)


async def flush(engine: Any, timeout_s: float) -> bool:
    """Empty the prefix cache; False where the scheduler is not idle within that time."""
    return bool((await engine.tokenizer_manager.flush_cache(timeout_s=timeout_s)).success)


async def release(engine: Any, parts: Sequence[str]) -> None:
    """Give up memory. The scheduler dies of it where it is not idle: `flush` tells."""
    from sglang.srt.managers import io_struct

    asked = io_struct.ReleaseMemoryOccupationReqInput(tags=list(parts))
    await engine.tokenizer_manager.release_memory_occupation(asked, None)


async def restore(engine: Any, parts: Sequence[str]) -> None:
    """Take memory again that was given up: the scheduler dies of a part that was not."""
    from sglang.srt.managers import io_struct

    asked = io_struct.ResumeMemoryOccupationReqInput(tags=list(parts))
    await engine.tokenizer_manager.resume_memory_occupation(asked, None)


@contextlib.contextmanager
def _devices_by_uuid() -> Iterator[None]:
    """In the block CUDA's handles name a device by what it is, not by its number, which SGLang's processes may have otherwise. What SGLang
    puts in the place of torch's functions for that can pickle no tensor of the host: afterwards they are torch's again."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from torch.multiprocessing import reductions

    try:
        with _put_back(vars(reductions)):
            monkey_patch_torch_reductions()
            yield
    finally:
        reductions.init_reductions()


async def load(
    engine: Any,
    flat: Tensor,
    entries: Sequence[tuple[str, tuple[int, ...], torch.dtype, int, int]],
    ranks: int,
) -> tuple[bool, str]:
    """Hand a bucket to the workers: bytes on a GPU, of which each entry says name, shape, dtype, start and end.

    Each rank gets a handle of its own, and gives it back when its model has taken the tensors. Whether that went well, and
    what SGLang says of it. The prefix cache stays as it is.
    """
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, stop, stop - start)
        for name, shape, dtype, start, stop in entries
    ]
    # Of gpt-oss all ranks but the first fill this one with zeros where they were handed it (srt/models/gpt_oss.py: _load_normal_weights).
    written = any(name.endswith(".experts.down_proj_bias") for name, *_ in entries)
    flats = [flat, *(flat.clone() if written else flat for _ in range(1, ranks))]
    with _devices_by_uuid():
        buckets = [{"flattened_tensor": one, "metadata": metadata} for one in flats]
        handles = [MultiprocessingSerializer.serialize(bucket) for bucket in buckets]
    asked = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=handles, load_format="flattened_bucket", flush_cache=False
    )
    success, message = await engine.tokenizer_manager.update_weights_from_tensor(asked, None)
    return success, message
