"""Seconds from the engine's weights to a rollout's, in processes of their own on the same GPUs.

    python -m benchmarks.sync --gpus 1                              all three models on one GPU
    python -m benchmarks.sync --gpus 8 --model qwen3-30b-a3b        one of them, another layout on either side
    python -m benchmarks.sync --gpus 8 --model qwen3-30b-a3b --whole
    python -m benchmarks.sync --device cpu --tiny --gpus 2          a dry run in seconds, writes no records

Random weights. Each GPU has two processes: a rank of the engine (the model alone, without an optimizer) and a receiver with a
model of its own in the rollout's layout; `--whole` has it take full tensors, as other engines' loaders do, and cut its part
out. What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from benchmarks.compare import compare
from benchmarks.engine_work import MODELS
from benchmarks.options import layout_name, need_gpus, need_whole, parse_layout, positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from benchmarks.sync_work import Setup, Took, serve
from quintet.sync.source import ChannelSource

GB, GIB = 1e9, float(1 << 30)
TIMEOUT_S = 540
SAMPLED_S = 0.002
BUCKET_MIB = 256


class Processes:
    """The trainer's ranks and their receivers."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._pipes: dict[str, list[Any]] = {"trainer": [], "receiver": []}
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        ports = {kind: _free_port() for kind in self._pipes}
        for rank in range(self.setup.ranks):
            lines = dict(zip(self._pipes, context.Pipe(), strict=True))
            for kind, pipes in self._pipes.items():
                ours, theirs = context.Pipe()
                arguments = (kind, rank, self.setup, ports[kind], theirs, lines[kind])
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                pipes.append(ours)
                self._processes.append(process)
                theirs.close()
            for one in lines.values():
                one.close()
        return self

    def __exit__(self, *_: object) -> None:
        for pipes in self._pipes.values():
            for pipe in pipes:
                try:
                    pipe.send(None)
                except OSError:  # it has ended already
                    continue
        for process in self._processes:
            process.join(10)
            process.kill()

    def ask(self, kind: str, method: str, *arguments: Any) -> list[Any]:
        """All of a kind at once: the same arguments."""
        self.tell(kind, method, *arguments)
        return self.answers(kind)

    def tell(self, kind: str, method: str, *arguments: Any) -> None:
        for pipe in self._pipes[kind]:
            pipe.send((method, *arguments))

    def tell_each(self, kind: str, method: str, arguments: Sequence[Any]) -> None:
        for pipe, one in zip(self._pipes[kind], arguments, strict=True):
            pipe.send((method, one))

    def answers(self, kind: str) -> list[Any]:
        """In rank order. Ends the benchmark when a process ends or is silent."""
        found: dict[Any, Any] = {}
        pipes = self._pipes[kind]
        while len(found) < len(pipes):
            ready = wait([one for one in pipes if one not in found], TIMEOUT_S)
            if not ready:
                sys.exit(f"a {kind} did not answer for {TIMEOUT_S} s")
            for pipe in ready:
                try:
                    found[pipe] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    sys.exit(f"a {kind} ended: its error is above")
        return [found[one] for one in pipes]

    def start(self) -> tuple[dict[str, tuple[int, ...]], list[ChannelSource], float]:
        """Build both sides and plan: full shapes, what each receiver takes from, and the slowest rank's seconds of planning."""
        began = time.perf_counter()
        self.tell("trainer", "build")
        self.tell("receiver", "build")
        shapes = {name: full for rank in self.answers("trainer") for name, full in rank.items()}
        wanted = self.answers("receiver")
        print(f"  built in {time.perf_counter() - began:.1f} s", flush=True)
        planned = self.ask("trainer", "plan", wanted)
        sources = [ChannelSource([ticket]) for _, ticket in planned]
        return shapes, sources, max(took.ended - took.began for took, _ in planned)

    def both(self, method: str, sources: Sequence[ChannelSource] | None = None) -> tuple[float, list[Took]]:
        """Seconds from the first that begins to the last that ends, and what each trainer's rank handed out."""
        self.tell("trainer", method)
        if sources is None:
            self.tell("receiver", method)
        else:
            self.tell_each("receiver", method, sources)
        sent, taken = self.answers("trainer"), self.answers("receiver")
        everyone = [*sent, *taken]
        return max(one.ended for one in everyone) - min(one.began for one in everyone), sent


class Memory(threading.Thread):
    """The most memory in use beyond what is in use now, of the worst GPU (on a CPU, of the machine), bytes."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(daemon=True)
        self._gpus = setup.ranks if setup.device == "cuda" else 0
        self._before = self._used()
        self._most, self._done = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(SAMPLED_S):
            now = self._used()
            self._most = max(self._most, *(n - b for n, b in zip(now, self._before, strict=True)))

    def most(self) -> int:
        self._done.set()
        self.join()
        return self._most

    def _used(self) -> list[int]:
        if not self._gpus:
            return [psutil.virtual_memory().used]
        free = [torch.cuda.mem_get_info(gpu) for gpu in range(self._gpus)]
        return [total - left for left, total in free]


def layouts(model: str, gpus: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of training and of the rollout: another one on either side where there are several GPUs."""
    if gpus == 1:
        return {}, {}
    shape = MODELS[model].shape
    if shape.moe is not None:
        return {"ep": gpus}, {"tp": min(gpus, shape.kv_heads), "sp": True}
    return {"tp": 2, "sp": True}, {}


def case_of(setup: Setup) -> str:
    """The record's case: what is not the model's own on so many GPUs is named."""
    train, rollout = layouts(setup.model, setup.ranks)
    parts = [f"{setup.model}/{setup.ranks}{'gpu' if setup.device == 'cuda' else 'cpu'}"]
    for side, layout, own in (("train", setup.train, train), ("rollout", setup.rollout, rollout)):
        if layout != own:
            parts.append(f"{side}-{layout_name(layout) or 'dp'}")
    if setup.bucket_mib != BUCKET_MIB:
        parts.append(f"buckets{setup.bucket_mib}")
    return "/".join(parts + ["whole"] * setup.whole)


def measure(setup: Setup, rounds: int, serial_rounds: int) -> list[dict[str, Any]]:
    """One model: the records."""
    case = case_of(setup)
    records: list[dict[str, Any]] = []

    def tell(metric: str, value: float, unit: str, baseline: float | None = None) -> None:
        beside = "" if baseline is None else f"   serial {baseline:.4f}"
        print(f"{case:<28}{metric:<20}{value:>12.4f} {unit}{beside}", flush=True)
        records.append(record("sync", case, metric, value, unit, baseline=baseline))

    print(f"{case}: trains in {setup.train or 'dp'}, generates in {setup.rollout or 'dp'}", flush=True)
    with Processes(setup) as processes:
        shapes, sources, planning = processes.start()
        first, handed = processes.both("sync", sources)
        timed = [processes.both("sync", sources)[0] for _ in range(rounds)]
        seconds = statistics.median(timed)
        print("  rounds: " + " ".join(f"{one:.4f}" for one in [first, *timed]), flush=True)
        memory = Memory(setup)
        processes.both("sync", sources)
        extra = memory.most()
        differences = compare(
            processes.ask("trainer", "fingerprints"), processes.ask("receiver", "fingerprints"), shapes
        )
        if differences:
            sys.exit(f"{case}: {len(differences)} tensors differ, the first: {differences[0]}")
        rate = min(processes.ask("trainer", "copy_rate", (1 << 30) if setup.device == "cuda" else (1 << 24)))
        serial = min(processes.both("serial")[0] for _ in range(serial_rounds))
        tell("seconds", seconds, "s", serial)
        moved, most = sum(one.bytes for one in handed), max(one.bytes for one in handed)
        tell("gb_s", moved / GB / seconds, "GB/s", moved / GB / serial)
        # Every byte is copied twice on its GPU: into a bucket, and out of it.
        tell("copy_limit_share", 2 * most / rate / seconds, "fraction", 2 * most / rate / serial)
        tell("copy_rate", rate / GB, "GB/s")
        tell("peak_extra_gib", extra / GIB, "GiB")
        tell("first_seconds", first, "s")
        tell("plan_seconds", planning, "s")
    return records


def in_turns(setup: Setup, repeats: int, rounds: int) -> list[tuple[float, float]]:
    """GB/s of syncs and of the serial way by repeat: the median of `rounds` syncs, then once serially; after one of each that is
    not counted."""
    found = []
    with Processes(setup) as processes:
        _, sources, _ = processes.start()
        for repeat in range(repeats + 1):
            timed = [processes.both("sync", sources) for _ in range(rounds)]
            seconds, moved = statistics.median(s for s, _ in timed), sum(one.bytes for one in timed[0][1])
            serial = processes.both("serial")[0]
            print(f"  {seconds:.4f} s beside {serial:.4f} s serially", flush=True)
            found += [(moved / GB / seconds, moved / GB / serial)] if repeat else []
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=[m for m in MODELS if m != "tiny"])
    parser.add_argument("--gpus", type=positive_int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--whole", action="store_true", help="receivers want full tensors")
    parser.add_argument("--train", type=parse_layout, help="the training layout, such as tp=2,sp=true")
    parser.add_argument("--rollout", type=parse_layout, help="the rollout's layout")
    parser.add_argument("--bucket-mib", type=positive_int, default=BUCKET_MIB)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--serial-rounds", type=positive_int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "sync.json")
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus(args.gpus, "--tiny --device cpu")
    models = ["tiny"] if args.tiny else args.model or ["qwen2.5-1.5b", "qwen3-8b", "qwen3-30b-a3b"]
    for model in models:
        train, rollout = layouts(model, args.gpus)
        need_whole(args.train or train, args.gpus)
        need_whole(args.rollout or rollout, args.gpus)
        setup = Setup(
            model,
            args.device,
            args.gpus,
            train if args.train is None else args.train,
            rollout if args.rollout is None else args.rollout,
            args.whole,
            1 if args.tiny else args.bucket_mib,
        )
        records = measure(setup, args.rounds, args.serial_rounds)
        if not args.tiny:
            write_records(args.out, merged(args.out, records))
            print(f"written to {args.out}", flush=True)


if __name__ == "__main__":
    main()
