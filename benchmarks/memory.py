"""Memory of one rank by part: the formula of `quintet.plan` beside what is measured.

    python -m benchmarks.memory                                     Qwen2.5-1.5B on one GPU, each way of recomputing
    python -m benchmarks.memory --backend te --tokens 32768 --recompute full
    torchrun --nproc-per-node 4 -m benchmarks.memory --model qwen3-8b --layout tp=2,sp=true
    python -m benchmarks.memory --tiny                              a dry run in seconds, on a CPU

A case trains two steps of one packed micro-batch and looks at the second. Parameters, gradients and optimizer state are
the bytes of their storages. Activations are, on a GPU, what is allocated when the layers have run beyond what is there
between steps; on a CPU, the storages that autograd keeps. The peak is the allocator's. In the records the formula's
number is the baseline. Then everything is offloaded and reloaded: seconds, and what it freed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine_work import MODELS
from benchmarks.options import layout_name, parse_layout, positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from benchmarks.timing import timed
from quintet.data.batch import make_batch
from quintet.engine.engine import Engine
from quintet.engine.layers.specs import choose_backend
from quintet.packing.plan import RankCell
from quintet.plan.memory import Memory, rank_memory
from quintet.plan.setup import Setup
from quintet.recipe import schema

BACKENDS = {"te": "transformer_engine", "portable": "portable", "auto": "auto"}
RECOMPUTE = ("none", "selective", "full")
MIB, GIB = float(1 << 20), float(1 << 30)


class MeanNll:
    """Mean negative log-likelihood of one micro-batch."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs.logprobs.sum() / self.tokens, {}


def measure(setup: Setup, lengths: list[int]) -> dict[str, float]:
    """Bytes by part on this rank, and what offload came to. Collective."""
    on_gpu = setup.device == "cuda"
    engine = Engine(
        setup.shape, setup.layout, engine=setup.engine, optimizer=setup.optimizer, dtype=setup.dtype
    )
    engine.start_optimizer(setup.optimizer, 1)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, setup.shape.vocab_size, (n,), generator=generator) for n in lengths]
    batch = make_batch(samples, [1] * len(samples))
    cell = RankCell(list(range(len(samples))), engine.layout.cp, engine.mesh.at("cp"))
    loss = MeanNll(sum(lengths))

    engine.forward_backward(batch, [cell], loss)
    engine.optimizer_step()
    found = dict(zip(("parameters", "gradients", "optimizer"), _static(engine), strict=True))
    if on_gpu:
        before, at_head = torch.cuda.memory_allocated(), []
        engine.model.decoder.register_forward_hook(lambda *_: at_head.append(torch.cuda.memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(batch, [cell], loss)
        engine.optimizer_step()
        hidden = setup.tokens_between_blocks * setup.shape.hidden_size * setup.width  # the decoder's output
        found["activations"] = at_head[0] - before - hidden
        found["peak"] = torch.cuda.max_memory_allocated() - before + sum(_static(engine))
    else:
        seen: dict[int, Any] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _see(t, seen), lambda t: t):
            micro, packed = next(engine._pipeline.rows(batch, [cell]))
            engine._wrapped[0](micro.input_ids, packed)
        known = _storages(p for chunk in engine.chunks for p in chunk.parameters())
        found["activations"] = sum(s.nbytes() for key, s in seen.items() if key not in known)
        seen.clear()
    return found | _offload(engine, on_gpu)


def _see(tensor: Tensor, seen: dict[int, Any]) -> Tensor:
    storage = tensor.untyped_storage()
    seen.setdefault(storage._cdata, storage)
    return tensor


def _static(engine: Engine) -> list[int]:
    """Bytes on the device of parameters, gradients, and optimizer state."""
    parameters = [p for chunk in engine._wrapped for p in chunk.parameters()]
    kinds = [_storages(parameters), _storages(p.main_grad for p in parameters)]
    state = []
    for one in engine._optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                held = [p, *one.optimizer.state.get(p, {}).values()]
                state += [t for t in held if torch.is_tensor(t) and t.dim() and t.device == p.device]
    others = _storages(state)
    kinds.append({key: n for key, n in others.items() if not any(key in kind for kind in kinds)})
    return [sum(kind.values()) for kind in kinds]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _offload(engine: Engine, on_gpu: bool) -> dict[str, float]:
    """The second time: the first allocates host memory."""
    found: dict[str, float] = {}
    device = torch.device("cuda" if on_gpu else "cpu")
    for _ in range(2):
        before = torch.cuda.memory_allocated() if on_gpu else sum(_static(engine))
        found["offload_s"] = timed(lambda: engine.offload(params=1.0, grads=1.0, optimizer=1.0), device)[0]
        found["freed"] = before - (torch.cuda.memory_allocated() if on_gpu else sum(_static(engine)))
        found["reload_s"] = timed(engine.reload, device)[0]
    return found


def main() -> None:
    """Measure every case that was asked for, print a table, and write the records."""
    args = _arguments()
    on_gpu = torch.cuda.is_available()
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    records = []
    for recompute in args.recompute:
        setup, lengths = _setup(args, recompute)
        measured = measure(setup, lengths)
        gc.collect()  # the engine is full of cycles
        if on_gpu:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            records += _tell(_case(args, setup, recompute), measured, rank_memory(setup))
    if dist.get_rank() == 0 and not args.tiny:
        write_records(args.out, merged(args.out, records))
    dist.destroy_process_group()


def _setup(args: argparse.Namespace, recompute: str) -> tuple[Setup, list[int]]:
    model = MODELS[args.model]
    layout = schema.Layout(**args.layout)
    tokens = args.tokens or model.tokens
    lengths = model.lengths.row(tokens * layout.cp, random.Random(0))
    backend = choose_backend(BACKENDS[args.backend])
    on_gpu = torch.cuda.is_available()
    setup = Setup(
        model.shape,
        layout,
        dist.get_world_size(),
        engine=schema.Engine(
            tokens_per_microbatch_per_rank=tokens, backend=BACKENDS[args.backend], recompute=recompute
        ),
        optimizer=schema.Optimizer(lr=1e-5, cpu_fraction=args.cpu_fraction),
        dtype="bf16",
        device="cuda" if on_gpu else "cpu",
        backend=backend,
        trained_tokens=(sum(lengths) - len(lengths)) // layout.cp,
        microbatches=1,
    )
    return setup, lengths


def _case(args: argparse.Namespace, setup: Setup, recompute: str) -> str:
    parts = [args.model, {"transformer_engine": "te"}.get(setup.backend, setup.backend)]
    if args.layout or setup.ranks > 1:
        parts.append("-".join(filter(None, [f"gpus{setup.ranks}", layout_name(args.layout)])))
    if args.cpu_fraction:
        parts.append(f"cpu{args.cpu_fraction:g}")
    return "/".join([*parts, f"{setup.tokens}-tokens", f"recompute-{recompute}"])


def _tell(case: str, measured: dict[str, float], formula: Memory) -> list[dict[str, Any]]:
    """Print a case, and its records."""
    print(f"{case}\n  {'MiB':<12}{'formula':>12}{'measured':>12}{'ratio':>8}")
    records = []
    for part, value in measured.items():
        if part.endswith("_s"):
            print(f"  {part:<12}{'':>12}{value:>10.3f} s")
            records.append(record("memory", case, part, value, "s"))
            continue
        said = formula.static if part == "freed" else getattr(formula, part)
        ratio = said / value if value else float("nan")
        print(f"  {part:<12}{said / MIB:>12.2f}{value / MIB:>12.2f}{ratio:>8.3f}")
        records.append(record("memory", case, f"{part}_gib", value / GIB, "GiB", baseline=said / GIB))
    sys.stdout.flush()
    return records


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-1.5b")
    parser.add_argument("--backend", choices=list(BACKENDS), default="auto")
    parser.add_argument("--recompute", choices=RECOMPUTE, nargs="+", default=list(RECOMPUTE))
    parser.add_argument(
        "--layout", type=parse_layout, default={}, help="such as tp=2,sp=true; the rest is dp"
    )
    parser.add_argument(
        "--tokens", type=positive_int, help="of the micro-batch on a rank; the model's own unless given"
    )
    parser.add_argument("--cpu-fraction", type=float, default=0.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; no records are written")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    args = parser.parse_args()
    if args.tiny:
        args.model = "tiny"
    return args


if __name__ == "__main__":
    main()
