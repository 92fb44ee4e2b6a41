"""What one rank computes to plan a weight sync, by the number of ranks: no GPU, no weights, one process.

    python -m benchmarks.sync_plan                          Qwen3-30B-A3B on 8, 16, 32 and 64 ranks
    python -m benchmarks.sync_plan --ranks 4 8 --write      records too

Every rank is a thread that runs the whole `WeightServer.plan` over shards without memory, and its collectives with the others; what is
told is the thread's own CPU time outside of collectives, which are messages of a few MB. Two ways to grow: the experts go over all ranks (`ep`), or
copies of 8 ranks are trained side by side (`dp`). The rollouts are of tp 4, one receiver a rank.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.engine_work import MODELS
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from quintet.engine.copies import without_collections
from quintet.engine.mesh import Mesh, Sizes
from quintet.engine.weights.shards import Shard, _cut
from quintet.models import ModelShape, Weight, table_of
from quintet.rollout.base import Wanted
from quintet.sync.server import ReceiverSpec, WeightServer

T = TypeVar("T")
MODEL = "qwen3-30b-a3b"


def in_threads(world: int, work: Callable[[int], T]) -> list[T]:
    """Return what `work` returns on each of so many ranks, threads of this process with a default process group; raises what one of
    them raised first."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: list[Any] = [None] * world
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
        try:
            found[rank] = work(rank)
        except BaseException as error:
            failures.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise failures[0]
    return found


@functools.cache
def table(shape: ModelShape) -> list[Weight]:
    """The family's weights of a model."""
    return list(table_of(shape))


def shards(shape: ModelShape, sizes: Sizes, rank: int) -> list[Shard]:
    """The shards of a rank, without memory."""
    mesh = Mesh(sizes, rank, None)  # type: ignore[arg-type]
    found = []
    for weight in table(shape):
        if _is_here(weight, shape, mesh):
            tensor = torch.empty(_local(weight, mesh), dtype=torch.bfloat16, device="meta")
            found += _cut(weight, tensor, shape, mesh)
    return found


def _is_here(weight: Weight, shape: ModelShape, mesh: Mesh) -> bool:
    parts = weight.name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return mesh.first_stage if parts[0] == "embedding" else mesh.last_stage
    if int(parts[2]) * mesh.sizes.pp // shape.layers != mesh.at("pp"):
        return False
    if not weight.split.startswith("expert_"):
        return True
    assert shape.moe is not None
    expert = int(parts[parts.index("experts") + 1])
    return expert * mesh.sizes.ep // shape.moe.experts == mesh.at("ep")


def _local(weight: Weight, mesh: Mesh) -> tuple[int, ...]:
    parts = mesh.sizes.etp if weight.split.startswith("expert_") else mesh.sizes.tp
    split = weight.split.removeprefix("expert_")
    rows, *columns = sum(one[0] for one in weight.shapes), *weight.shapes[0][1:]
    if split == "columns":
        columns[0] //= parts
    elif split != "replicated":
        rows = math.ceil(rows / parts)
    return rows, *columns


def plan(shape: ModelShape, train: Sizes, rollout: Sizes, bucket_mib: float = 256) -> list[tuple[float, Any]]:
    """Plan on every rank, for a receiver beside it: the CPU seconds it took there, and the plan (`Export`)."""
    receivers = [shards(shape, rollout, rank) for rank in range(rollout.ranks)]
    wanted = [
        [Wanted(one.name, one.box) for one in receivers[rank % rollout.ranks]] for rank in range(train.ranks)
    ]
    held = [shards(shape, train, rank) for rank in range(train.ranks)]

    def work(rank: int) -> tuple[float, Any]:
        server = WeightServer(
            lambda: held[rank], shape, torch.bfloat16, torch.device("cpu"), bucket_mib, timeout_s=60.0
        )
        dist.barrier()
        _communicated.seconds, began = 0.0, time.thread_time()
        server.plan([ReceiverSpec(f"receiver {rank}", wanted[rank], True)])
        seconds, export = time.thread_time() - began - _communicated.seconds, server._export
        server.close()
        return seconds, export

    # One collector looks at all ranks' objects; a rank has its own.
    with without_collections(), _apart():
        return in_threads(train.ranks, work)


_communicated = threading.local()
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce")


@contextmanager
def _apart() -> Iterator[None]:
    """Count a thread's time in collectives: whoever comes last does the work of all."""

    def timed(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        found = collective(*args, **kwargs)
        _communicated.seconds = getattr(_communicated, "seconds", 0.0) + time.thread_time() - began
        return found

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(
                mock.patch.object(dist, name, functools.partial(timed, getattr(dist, name)))
            )
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--write", action="store_true", help="write records")
    parser.add_argument("--out", type=Path, default=RESULTS / "sync_plan_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape, records = MODELS[MODEL].shape, []
    print(f"{'layout':<16}{'ranks':>6}{'median s':>10}{'slowest s':>11}{'parts':>8}{'turns':>7}{'rounds':>8}")
    for grows in ("ep", "dp"):
        for ranks in args.ranks:
            ep = ranks if grows == "ep" else 8
            train = Sizes(dp=ranks, ep=ep)
            planned = plan(shape, train, Sizes(tp=4, etp=4))
            seconds = [took for took, _ in planned]
            export = planned[0][1]
            rounds = [one for turn in export._rounds for one in turn]
            parts = sum(len(one.own) + len(one.receiving) for one in rounds)
            middle, worst = statistics.median(seconds), max(seconds)
            print(
                f"ep{ep} dp{ranks // ep:<10}{ranks:>6}{middle:>10.3f}{worst:>11.3f}{parts:>8}{export.count:>7}{len(rounds):>8}",
                flush=True,
            )
            case = f"{MODEL}/plan/ep{ep}/{ranks}ranks"
            records.append(record("sync", case, "plan_cpu_seconds_per_rank", worst, "s"))
    if args.write:
        write_records(args.out, merged(args.out, records))
        print(f"written to {args.out}")


if __name__ == "__main__":
    main()
