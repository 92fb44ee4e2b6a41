"""One rank of one side of the engine benchmark, told by its parent what to run: a line of JSON in, a line out.

    {"do": "burst", "warmup": 1, "steps": 3} → {"steps": [...], "seconds": [...], "losses": [...], "norms": [...], "peak_gib": ...}
    {"do": "profile"}                        → {"table": "..."}
    {"do": "quit"}

Between two commands a worker leaves the GPU alone and holds no memory there but its model and optimizer state.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from benchmarks.engine_recipe import needs_of
from benchmarks.engine_work import TRAINED_FROM, Setup
from benchmarks.records import device_name
from benchmarks.sides import FAILED
from benchmarks.timing import launch_us, timed
from quintet.cluster.device_memory import device_held
from quintet.controller.objective import sft_objective
from quintet.data.batch import make_batch, set_tokens
from quintet.data.batch import tokens as flat
from quintet.engine.build import mesh_of
from quintet.engine.config import fused_kernels
from quintet.engine.engine import Engine
from quintet.engine.layers.specs import choose_backend
from quintet.engine.weights.shards import Shard, shard_map
from quintet.models import ModelShape
from quintet.packing.plan import RankCell
from quintet.plan.kernels import with_kernels
from quintet.plan.out_of_memory import out_of_memory, says_no_memory
from quintet.recipe import schema
from quintet.runs.process import cores_here

OPTIMIZER = schema.Optimizer(lr=1e-5)
INITIAL_STD = 0.02


class QuintetLoop:
    """One rank of quintet's engine. `step(k)` trains step k and returns this rank's share of the mean loss, and the
    gradient norm."""

    def __init__(self, setup: Setup, optimizer: schema.Optimizer, device: torch.device) -> None:
        self.setup, self.objective = setup, sft_objective()
        layout = schema.Layout(**setup.layout)
        without = ("moe_router_fusion",) if setup.balance == "forced" else ()
        engine, self.kernels = as_runs_take(setup.engine_recipe, layout, setup.shape, "bf16", without)
        self.engine = Engine(
            setup.shape,
            layout,
            engine=engine,
            optimizer=optimizer,
            dtype="bf16",
        )
        fill(self.engine.shard_map(), device)
        if setup.balance == "forced":
            deal(self.engine.chunks)
        self.engine.start_optimizer(optimizer, total_steps=1)
        self.dp_rank = self.engine.mesh.at("dp")
        self.steps: dict[int, tuple[Any, list[RankCell]]] = {}

    def prepare(self, step: int, tokens: list[list[Tensor]]) -> None:
        """tokens: the rank's rows as lists of sequences, on the CPU."""
        samples = [sequence for row in tokens for sequence in row]
        batch = make_batch(samples, [TRAINED_FROM] * len(samples))
        set_tokens(batch, "weights", flat(batch, "loss_mask") / self.setup.trained(step))
        numbers = iter(range(len(samples)))
        cp, place = self.engine.layout.cp, self.engine.mesh.at("cp")
        self.steps[step] = (batch, [RankCell(list(islice(numbers, len(row))), cp, place) for row in tokens])

    def step(self, step: int) -> tuple[float, float]:
        batch, cells = self.steps[step]
        result = self.engine.forward_backward(batch, cells, self.objective)
        norm = self.engine.optimizer_step()["grad_norm"]
        return result.loss if result is not None and self.engine.mesh.owns_output else 0.0, norm


def as_runs_take(
    engine: schema.Engine, layout: schema.Layout, shape: ModelShape, dtype: Any, without: Sequence[str] = ()
) -> tuple[schema.Engine, str]:
    """The section with the kernels of experts that a run takes here, and a sentence of which and why. without: none of these."""
    installed = set(fused_kernels(choose_backend(engine.backend))) - set(without)
    told = schema.Recipe(engine=engine, layout=layout, model=schema.Model(dtype=dtype))
    chosen, why = with_kernels(told, shape, device_name(), installed)
    return chosen.engine, why


def fill(shards: list[Shard], device: torch.device) -> None:
    """Write initial weights: matrices normal, norms 1, biases 0. What a rank gets depends on the part it holds alone,
    so both sides start from the same weights, and so do ranks that hold the same part."""
    for shard in shards:
        if len(shard.shape) == 1:
            shard.write(torch.full(shard.box_shape, float("norm" in shard.name), device=device))
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{shard.name} {shard.box}".encode()))
        shard.write(torch.empty(shard.box_shape, device=device).normal_(0, INITIAL_STD, generator=generator))


class Dealt:
    """Experts dealt to the tokens of a rank in turn, so that each gets as many, by megatron-core's name for what answers a router. The
    router's own choice is computed all the same, and its weights are of the experts that were dealt."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Values and experts [T, top-k]: a token's are next to each other in a drawn order of all, so on as many ranks as by chance."""
        choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        tokens, experts = scores.shape
        places = torch.arange(tokens * topk, device=scores.device) % experts
        chosen = _drawn(experts, scores.device)[places].view(tokens, topk)
        return scores.gather(1, chosen), chosen


@cache
def _drawn(experts: int, device: torch.device) -> Tensor:
    """All experts in a drawn order. Kept: bringing it to a GPU holds the host."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(0)).to(device)


def deal(modules: Iterable[torch.nn.Module]) -> None:
    """Have every router of these modules answered by `Dealt`."""
    routers = [one for module in modules for one in module.modules() if isinstance(one, TopKRouter)]
    if any(router.config.moe_router_fusion for router in routers):
        raise SystemExit("--balance forced: the router of megatron.moe_router_fusion=true cannot be answered")
    for router in routers:

        def dealt(*given: Any, router: Any = router, own: Any = router.routing, **named: Any) -> Any:
            router.router_replay = Dealt()
            return own(*given, **named)

        router.routing = dealt  # type: ignore[method-assign]


def _tokens(setup: Setup, step: int, dp_rank: int) -> list[list[Tensor]]:
    """Random tokens of a dp rank's rows: the same on both sides."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    vocabulary = setup.shape.vocab_size
    return [
        [torch.randint(0, vocabulary, (n,), generator=generator) for n in row]
        for row in setup.rows(step)[dp_rank]
    ]


def serve(side: str, setup: Setup, answers: TextIO) -> None:
    """Answer the parent's commands until it says quit, or until there is no memory left: then that is the answer."""
    with no_memory_told("setup", setup, answers):
        device = join()
        if setup.cpu_fraction:
            torch.set_num_threads(max(1, cores_here() // setup.gpus))  # as a run gives such a rank
        optimizer = OPTIMIZER.model_copy(update={"cpu_fraction": setup.cpu_fraction})
        loop = _loop(side, setup, optimizer, device)
        for step in range(setup.steps):
            loop.prepare(step, _tokens(setup, step, loop.dp_rank))
        order = cycle(range(setup.steps))
        settle(device)
        ready = {
            "versions": _versions(setup),
            "launch_us": launch_us(device),
            "kernels": getattr(loop, "kernels", ""),
        }
    print(json.dumps(ready), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        with no_memory_told(command["do"], setup, answers):
            if command["do"] == "burst":
                answer = _burst(loop, order, command, device)
            else:
                answer = {"table": _profile(loop, next(order), device)}
            settle(device)
        print(json.dumps(answer), file=answers)
    dist.destroy_process_group()


@contextmanager
def no_memory_told(phase: str, setup: Setup, answers: TextIO) -> Iterator[None]:
    """Answer with what a run would say of memory that does not suffice, and end."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = says_no_memory(error)
        if said is None:
            raise
        device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        needs = needs_of(setup, device)
        print(json.dumps({FAILED: out_of_memory(phase, said, device_held(device), needs)}), file=answers)
        raise SystemExit(1) from None


def join() -> torch.device:
    """Join the group of all ranks; this rank's device."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _loop(side: str, setup: Setup, optimizer: schema.Optimizer, device: torch.device) -> Any:
    if side == "quintet":
        return QuintetLoop(setup, optimizer, device)
    from megatron.core import parallel_state

    from benchmarks.engine_raw import RawLoop

    parallel_state.destroy_global_memory_buffer()  # quintet made one; the raw loop's own initialisation does, too
    mesh = mesh_of(schema.Layout(**setup.layout), setup.gpus)
    raw = RawLoop(setup, optimizer, device, lambda model: fill(shard_map([model], setup.shape, mesh), device))
    if setup.balance == "forced":
        deal([raw.model])
    return raw


def settle(device: torch.device) -> None:
    """Wait for the device and all ranks, and give back what is only cached."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()


def timed_together(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds and result of one step that all ranks begin together."""
    dist.barrier()
    return timed(call, device)


def _burst(loop: Any, order: Any, command: dict[str, Any], device: torch.device) -> dict[str, Any]:
    for _ in range(command["warmup"]):
        loop.step(next(order))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, list[Any]] = {"steps": [], "seconds": [], "losses": [], "norms": []}
    for step in islice(order, command["steps"]):
        second, (loss, norm) = timed_together(partial(loop.step, step), device)
        for name, value in zip(found, (step, second, loss, norm), strict=True):
            found[name].append(value)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {**found, "peak_gib": peak / 2**30}


def _profile(loop: Any, step: int, device: torch.device) -> str:
    """Kernels by time, what the host waited for, and how long the device had nothing to do."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    loop.step(step)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        seconds, _ = timed_together(partial(loop.step, step), device)
    events = [e for e in found.key_averages() if not e.is_user_annotation]
    host = [e for e in events if e.device_type == DeviceType.CPU]
    kernels = [(e.self_device_time_total, e) for e in events if e.device_type != DeviceType.CPU]
    ranked = sorted(kernels if on_gpu else [(e.self_cpu_time_total, e) for e in host], key=lambda k: -k[0])
    total = sum(spent for spent, _ in ranked) or 1.0
    lines = [f"one step under the profiler: {1e3 * seconds:.1f} ms, of which busy {total / 1e3:.1f} ms"]
    lines += [
        f"host: {e.key}: {e.count} calls, {e.self_cpu_time_total / 1e3:.1f} ms"
        for e in host
        if "Synchronize" in e.key
        or e.key.startswith(("cudaMemcpy", "cudaMalloc", "aten::_local_scalar_dense"))
    ]
    lines += [f"{'ms':>9} {'share':>6} {'calls':>7}  name"]
    lines += [
        f"{spent / 1e3:9.2f} {100 * spent / total:5.1f}% {e.count:7}  {e.key[:130]}"
        for spent, e in ranked[:60]
    ]
    return "\n".join(lines)


def _versions(setup: Setup) -> dict[str, str]:
    found = {}
    if setup.backend == "transformer_engine":
        import transformer_engine

        found["transformer-engine"] = str(transformer_engine.__version__)
    if torch.cuda.is_available():
        import triton

        found["triton"] = str(triton.__version__)
    return found
