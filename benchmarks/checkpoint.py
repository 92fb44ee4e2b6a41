"""Weights and checkpoints to and from the disk, beside what the disk does and beside transformers' `from_pretrained`.

    python -m benchmarks.checkpoint --device cuda                   Qwen2.5-1.5B's shape on one GPU
    python -m benchmarks.checkpoint --device cpu                    the same weights; training state of a few layers
    python -m benchmarks.checkpoint --device cpu --tiny             a dry run in seconds, writes no records

Everything happens under --dir, which is the disk that is measured. `cold` means that the files were written out and
dropped from the page cache (posix_fadvise) before each reading, `warm` that they were read just before.

The disk's rate is that of plain writes with an fsync and of plain reads by as many threads as a load has, both
of one file. On a CPU both sides of a load also go once over every weight: transformers maps files into memory there, and
would else be timed without reading them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_work import recut, write_model
from benchmarks.engine_work import MODELS
from benchmarks.memory import MeanNll
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from quintet.data.batch import make_batch
from quintet.engine.engine import Engine
from quintet.engine.weights.hf_read import CHUNK_BYTES, THREADS
from quintet.models import ModelShape, read_shape
from quintet.packing.plan import RankCell
from quintet.recipe import schema

GB = 1e9
LAYERS_ON_CPU = 2
"""Of which a CPU's training state is made: that of the whole model is 22 GB."""


class Bench:
    """What every measurement shares: the device, the disk, and the records."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.device, self.place, self.rounds = (
            torch.device(args.device),
            place,
            1 if args.tiny else args.rounds,
        )
        self.case = f"{'tiny' if args.tiny else args.model}/{args.device}"
        self.records: list[dict[str, Any]] = []

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, until the GPU has done its part."""
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def tell(
        self, metric: str, seconds: float, nbytes: int = 0, *, baseline: float | None = None, case: str = ""
    ) -> None:
        """Record seconds, and GB/s of what moved in them. baseline: seconds of what it is compared with."""
        case = self.case + case
        self._add(case, f"{metric}_s", seconds, "s", baseline)
        if nbytes:
            rates = [nbytes / GB / one if one else None for one in (seconds, baseline)]
            self._add(case, f"{metric}_gb_s", float(rates[0] or 0), "GB/s", rates[1])

    def _add(self, case: str, metric: str, value: float, unit: str, baseline: float | None) -> None:
        beside = "" if baseline is None else f"   beside {baseline:.3f}"
        print(f"{case:<34}{metric:<34}{value:>10.3f} {unit}{beside}", flush=True)
        self.records.append(record("checkpoint", case, metric, value, unit, baseline=baseline))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def touch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Go over every weight, where a load may have left it on the disk."""
        if self.device.type == "cpu":
            for one in parameters:
                one.detach().sum()


def drop(path: Path) -> None:
    """Write a file or the files of a directory out, and drop them from the page cache."""
    for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_disk(bench: Bench, nbytes: int) -> tuple[float, float]:
    """Bytes a second of plain writes and of plain cold reads."""
    file, block = bench.place / "disk", memoryview(os.urandom(CHUNK_BYTES))
    count = nbytes // CHUNK_BYTES

    def write() -> None:
        with file.open("wb", buffering=0) as out:
            for _ in range(count):
                out.write(block)
            os.fsync(out.fileno())

    def read() -> None:
        with file.open("rb", buffering=0) as source, ThreadPoolExecutor(THREADS) as pool:
            buffers = [bytearray(CHUNK_BYTES) for _ in range(THREADS)]
            lanes = range(THREADS)
            list(
                pool.map(
                    lambda lane: [
                        os.preadv(source.fileno(), [buffers[lane]], at * CHUNK_BYTES)
                        for at in range(lane, count, THREADS)
                    ],
                    lanes,
                )
            )

    writing = bench.seconds(write)
    drop(file)
    reading = bench.seconds(read)
    file.unlink()
    bench.tell("disk_write", writing, count * CHUNK_BYTES)
    bench.tell("disk_read", reading, count * CHUNK_BYTES)
    return count * CHUNK_BYTES / writing, count * CHUNK_BYTES / reading


def engine_of(shape: ModelShape, optimizer: bool) -> Engine:
    """One rank's engine in bf16."""
    return Engine(
        shape,
        schema.Layout(),
        engine=schema.Engine(tokens_per_microbatch_per_rank=256),
        optimizer=schema.Optimizer(lr=1e-5) if optimizer else None,
        dtype="bf16",
    )


def measure_hf(bench: Bench, path: Path) -> None:
    """Loading a Hugging Face directory, cold and warm, by quintet and by transformers; and writing one."""
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    engines: list[Engine] = []

    def build() -> None:
        engines[:] = [engine_of(read_shape(path), optimizer=False)]

    def load() -> None:
        engines[0].load_hf(path)
        bench.touch(p for chunk in engines[0].chunks for p in chunk.parameters())

    def theirs() -> None:
        bench.touch(_from_pretrained(path, bench.device).parameters())

    building = bench.seconds(build)
    _from_pretrained(path, bench.device)  # what it imports at first is not timed
    for state in ("cold", "warm"):
        taken: dict[Callable[[], None], list[float]] = {load: [], theirs: []}
        if state == "warm":
            load()
        for _ in range(bench.rounds):
            for call, seconds in taken.items():
                if state == "cold":
                    drop(path)
                gc.collect()
                seconds.append(bench.seconds(call))
        ours, other = (statistics.median(one) for one in taken.values())
        bench.tell(f"hf_load_{state}", ours, nbytes, baseline=other)
        bench.tell(f"hf_build_and_load_{state}", building + ours, baseline=other)
    out = bench.place / "saved"
    bench.tell("hf_save", bench.seconds(lambda: engines[0].save_hf(out, path)), nbytes)
    shutil.rmtree(out)


def _from_pretrained(path: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    if importlib.util.find_spec("accelerate"):  # device_map needs it
        return AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=torch.bfloat16, device_map=str(device)
        )
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, dtype=torch.bfloat16).to(
        device
    )


def measure_state(bench: Bench, shape: ModelShape, disk: tuple[float, float], tiny: bool) -> None:
    """Saving and loading what training holds: weights, master weights and both moments."""
    engine = engine_of(shape, optimizer=True)
    engine.start_optimizer(schema.Optimizer(lr=1e-5), 100)
    ids = torch.randint(
        0, shape.vocab_size, (64 if tiny else 256,), generator=torch.Generator().manual_seed(0)
    )
    batch, loss = make_batch([ids], [1]), MeanNll(len(ids) - 1)

    def step() -> None:
        engine.forward_backward(batch, [RankCell([0])], loss)
        engine.optimizer_step()

    step()
    plain = statistics.median(bench.seconds(step) for _ in range(3))
    first, second, other = (bench.place / name for name in ("first", "second", "other"))
    saving = bench.seconds(lambda: engine.save(first))
    nbytes = sum(file.stat().st_size for file in first.iterdir())
    case = f"/{shape.layers}-layers"
    bench.tell("save", saving, nbytes, baseline=nbytes / disk[0], case=case)

    start = time.perf_counter()
    call = bench.seconds(lambda: engine.save(second, wait=False))
    stepping = bench.seconds(step)
    engine.save_finished(wait=True)
    bench.tell("async_save_call", call, case=case)
    bench.tell("async_save_step_during", stepping, baseline=plain, case=case)
    bench.tell("async_save_blocks_step", max(call + stepping - plain, 0.0), case=case)
    bench.tell(
        "async_save_on_disk", time.perf_counter() - start, nbytes, baseline=nbytes / disk[0], case=case
    )
    shutil.rmtree(second)

    for state in ("cold", "warm"):
        if state == "cold":
            drop(first)
        bench.tell(
            f"load_{state}",
            bench.seconds(lambda: engine.load(first)),
            nbytes,
            baseline=nbytes / disk[1],
            case=case,
        )
    recut(first, other, shape, schema.Layout(tp=2, pp=2))
    shutil.rmtree(first)
    drop(other)
    bench.tell(
        "load_other_layout_cold",
        bench.seconds(lambda: engine.load(other)),
        nbytes,
        baseline=nbytes / disk[1],
        case=f"{case}/from-tp2-pp2",
    )


def main() -> None:
    """Measure, print a line a number, and write the records."""
    args = _arguments()
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29513",
    }.items():
        os.environ.setdefault(key, value)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    place = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=args.dir))
    bench = Bench(args, place)
    try:
        config = MODELS["tiny" if args.tiny else args.model].config
        disk = measure_disk(bench, (64 << 20) if args.tiny else (4 << 30))
        write_model(place / "model", config, bench.device)
        measure_hf(bench, place / "model")
        shape = read_shape(place / "model")
        shutil.rmtree(place / "model")
        layers = args.state_layers or (LAYERS_ON_CPU if args.device == "cpu" else shape.layers)
        gc.collect()  # engines are full of cycles
        if args.device == "cuda":
            torch.cuda.empty_cache()
        measure_state(bench, replace(shape, layers=min(layers, shape.layers)), disk, args.tiny)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not args.tiny:
        write_records(args.out, merged(args.out, bench.records))
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-1.5b")
    parser.add_argument(
        "--state-layers",
        type=positive_int,
        help=f"layers of the training state (default: all; {LAYERS_ON_CPU} on a CPU)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="loads of each kind; the median counts"
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to measure; 55 GB for 1.5B")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoint.json")
    parser.add_argument("--tiny", action="store_true", help="a dry run; writes no records")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here: use --device cpu")
    if args.device == "cpu" and torch.cuda.is_available():
        sys.exit("an engine uses the GPU where there is one: hide it with CUDA_VISIBLE_DEVICES=")
    return args


if __name__ == "__main__":
    main()
