"""What megatron-core 0.16.1 needs before it runs on a CPU, and without its process-global state.

Nowhere else in quintet is megatron-core adapted, or torch for longer than an import (`quintet.skip_dynamo_import`). Each
adaptation says which gap it closes and which test fails without it. `install()` runs before the first use of
megatron-core by a rank, and is idempotent. On a machine with a GPU it adapts what there is without process-global
state and without TransformerEngine, nothing of devices.

The adaptations touch named functions of megatron-core, not torch's factories: code outside megatron-core
that asks for a CUDA device on a CPU machine still gets torch's own error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quintet.engine.agree import gathered
from quintet.skip_dynamo_import import uncompiled
from quintet.typed import Typed

VERSION = "0.16.1"
_installed = False


def install() -> None:
    """Adapt megatron-core once in this process.

    Raises RuntimeError when another version of megatron-core is installed than the tested one.
    """
    global _installed
    if _installed:
        return
    _installed = True
    if not torch.cuda.is_available():
        # `jit_fuser` compiles small elementwise functions: minutes of C++ on a CPU for nothing.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _stand_in_for_cuda()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with uncompiled(), _without_what_is_not_used():
        import megatron.core

    if megatron.core.__version__ != VERSION:
        raise RuntimeError(
            f"quintet is tested with megatron-core {VERSION}, found {megatron.core.__version__}"
        )
    _provide_scratch_buffer()
    _plain_router_products()
    _sends_keep_their_data()
    _keys_as_json()
    if importlib.util.find_spec("transformer_engine") is None:
        _no_fp8_checkpoints()
    if not torch.cuda.is_available():
        _retarget_cuda_literals()
        _plain_optimizers()
        _plain_rng()
        _plain_splits()


_NOT_USED = ("wandb", "torch.utils.tensorboard", "megatron.core.distributed.fsdp.src")


@contextlib.contextmanager
def _without_what_is_not_used() -> Iterator[None]:
    """Its inference imports wandb where that is installed, 0.6 s for each rank, its timers tensorboard and its distributed room FSDP,
    0.2 s; each goes on without. So it does without torch's FSDP and checkpoints, another 0.2 s, which TransformerEngine needs on
    GPUs. (tests/test_imports.py: a process of a run starts without what it does not use)"""
    unused: dict[str, Any] = dict.fromkeys(_NOT_USED)
    if not torch.cuda.is_available():
        checkpoints = types.SimpleNamespace(default_planner=None)  # it insists on the name
        unused |= {"torch.distributed.fsdp": None, "torch.distributed.checkpoint": checkpoints}
    absent = [name for name in unused if name not in sys.modules]
    sys.modules.update({name: unused[name] for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _provide_scratch_buffer() -> None:
    """Sequence parallelism asks parallel_state for a scratch buffer, which only `initialize_model_parallel`
    makes; quintet passes process groups explicitly and never calls it. (tests/oracle: tp2-sp)"""
    from megatron.core import parallel_state

    parallel_state._set_global_memory_buffer()


def _plain_router_products() -> None:
    """The router's matrix product asks for `te_general_gemm`, a name that exists only with TransformerEngine; with it,
    fp32 scores would be computed in TF32, and near ties choose other experts than on a CPU. None takes torch's
    product. (tests/engine/test_moe.py: every case)"""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _sends_keep_their_data() -> None:
    """The interleaved schedule frees the data of an output, by swapping it, while it is still being sent: what arrives is then
    whatever has taken its place (NaN, once in thousands of steps; core mends it later by waiting). A request holds the tensor it
    was made for, so it is made for an alias, whose data nobody swaps.
    (tests/oracle/test_engines.py: what is being sent keeps its data)"""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicate: Any = P2PCommunicator._communicate

    def of_an_alias(self: Any, *, tensor_send_next: Any, **others: Any) -> Any:
        alias = None if tensor_send_next is None else tensor_send_next.detach()
        return communicate(self, tensor_send_next=alias, **others)

    P2PCommunicator._communicate = of_an_alias


_KEYS: Typed[Any] = Typed(
    list[tuple[tuple[tuple[str, float | bool | str], ...] | None, bool]],
    "the keys of a rank's parameter groups",
)


def _keys_as_json() -> None:
    """Ranks tell each other the keys of their parameter groups as pickles, over sockets that may be others' too.
    (tests/security/test_collectives.py)"""
    from megatron.core import optimizer

    def all_gather_object(found: list[Any], mine: Any) -> None:
        found[:] = gathered(_KEYS, mine)

    groups: Any = optimizer._get_param_groups
    distributed = types.SimpleNamespace(**vars(torch.distributed) | {"all_gather_object": all_gather_object})
    names = groups.__globals__ | {
        "torch": types.SimpleNamespace(**vars(torch) | {"distributed": distributed})
    }
    optimizer._get_param_groups = types.FunctionType(
        groups.__code__, names, groups.__name__, groups.__defaults__
    )


def _no_fp8_checkpoints() -> None:
    """Recompute of norms asks TransformerEngine for the FP8 state unless told None; its default is False.
    (tests/engine/test_moe.py: recompute layernorm)"""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


class _NoStream(contextlib.AbstractContextManager["_NoStream"]):
    """Stream and event of a device on which everything is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self._at = 0.0

    def __exit__(self, *args: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _NoStream()

    def record(self, *args: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, later: _NoStream) -> float:
        return (later._at - self._at) * 1e3

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait = wait_stream = wait_event = synchronize = _nothing


def _stand_in_for_cuda() -> None:
    """`torch.cuda.current_device()` is megatron-core's name for "here": on a CPU machine it is the CPU, and
    streams are nothing. Without a GPU the originals can only raise. (tests/oracle: every layout)"""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.nvtx.range_push = lambda *args: None
    cuda.nvtx.range_pop = lambda *args: None


def _retarget_cuda_literals() -> None:
    """Schedules, gradient clipping and the optimizers name the device "cuda" and compare tensor type names
    like 'torch.cuda.FloatTensor' in their code: on a CPU machine these constants are replaced in just those
    functions. (tests/oracle: every layout)"""
    from megatron.core import utils
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.pipeline_parallel import schedules

    for function in (
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
        utils.local_multi_tensor_l2_norm,
        clip_grads.get_grad_norm_fp32,
        clip_grads.clip_grad_by_total_norm_fp32,
        clip_grads.count_zeros_fp32,
        optimizer.MixedPrecisionOptimizer.__init__,
        optimizer.Float16OptimizerWithFloat16Params.__init__,
        optimizer.FP32Optimizer.__init__,
        distrib_optimizer.DistributedOptimizer.__init__,
        distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups,
    ):
        _replace_constants(function)
    # Tied embeddings over stages: `weight.data.cuda()` becomes `.contiguous()`, a meta tensor's too. (tests/oracle: pp2, tied; test_build_rank.py)
    setup: Any = LanguageModule.setup_embeddings_and_output_layer
    names = tuple("contiguous" if n == "cuda" else n for n in setup.__code__.co_names)
    setup.__code__ = setup.__code__.replace(co_names=names)


def _replace_constants(function: Callable[..., Any]) -> None:
    target: Any = getattr(function, "__func__", function)
    target = getattr(target, "__wrapped__", target)
    target.__code__ = _on_cpu(target.__code__)


def _on_cpu(constant: Any) -> Any:
    if isinstance(constant, str):
        return "cpu" if constant == "cuda" else constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(_on_cpu(c) for c in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_on_cpu(c) for c in constant.co_consts))
    return constant


def no_first_microbatch(chunk: Any) -> None:
    """Have core's schedule in FP8 tell no layer of a wrapped chunk that a micro-batch is the first, in which it would write over its gradient
    buffer (`add_gradients_in_place`); copies of weights are new in each run anyway. (tests/engine/test_engine_fp8.py: no layer is told)"""
    chunk.modules_with_is_first_microbatch = []


def _plain_optimizers() -> None:
    """torch's optimizers import its compiler to hide from it: 2,000 modules, 3 s of a rank's start. Where nothing is compiled, what
    they hide is called as it is. (tests/test_imports.py: a process of a run trains without the compiler)"""
    if os.environ["TORCHDYNAMO_DISABLE"] == "0":
        return
    for method in vars(torch.optim.Optimizer).values():
        if (hidden := getattr(method, "__wrapped__", None)) is not None:
            setattr(hidden, "__dynamo_disable", hidden)  # where `torch._compile` keeps what it made of it
    kinds: tuple[Any, ...] = (torch.optim.Adam, torch.optim.SGD)
    for kind in kinds:
        if not hasattr(kind.step, "hooked"):  # one was made before, and its step is wrapped once more
            kind.step = torch.no_grad()(kind.step.__wrapped__)


def _plain_rng() -> None:
    """Sequence-parallel blocks fork a CUDA random state for dropout. quintet trains without dropout, so on a
    CPU the fork is empty. (tests/oracle: tp2-sp)"""
    from megatron.core.tensor_parallel import random

    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    # Recompute saves and restores the device's state. (tests/engine/test_moe.py: recompute)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _plain_splits() -> None:
    """gloo cannot gather or reduce-scatter uneven parts, which experts cut over etp receive: parts are padded to the longest, or
    summed whole. (tests/engine/test_dispatch.py: etp 2)"""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, None, use_global_buffer)
        longest = max(1, *output_split_sizes)  # no token for any expert here: still one part a rank
        padded = torch.cat((x, x.new_zeros(longest - len(x), *x.shape[1:])))
        parts = gather(padded, group, None, use_global_buffer).split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])

    def scatter_uneven(
        x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, None, use_global_buffer)
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven
