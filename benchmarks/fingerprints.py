"""What the proof of a sync costs: fingerprints of all weights of a model on one device.

    python -m benchmarks.fingerprints [--out FILE]

The tensors of one rank, as the shard map sees them, in bf16 on a GPU: Qwen2.5-1.5B's, Qwen3-8B's, and Qwen3-30B-A3B's experts of one
rank in eight. On a CPU two layers of the first stand for all. Metrics: seconds, which is launch to the numbers on the host; GB/s; and as
baseline of both what a kernel of torch that reads the same bytes once and keeps one number a tensor takes (an int64 sum).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.records import record, write_records
from quintet.engine.weights.fingerprint import fingerprints
from quintet.models.mcore import Box, whole_box

Item = tuple[str, tuple[int, ...], Box, torch.Tensor]


def items(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, device: str) -> Iterator[Item]:
    """A dense model's. q, k and v are views of one parameter; gate and up the halves of another."""
    d = 128

    def made(name: str, *shape: int) -> Item:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        return name, shape, whole_box(shape), tensor

    yield made("embed", vocab, hidden)
    for i in range(layers):
        _, _, _, qkv = made("", kv, heads // kv + 2, d, hidden)
        for name, view in (("q", qkv[:, :-2]), ("k", qkv[:, -2]), ("v", qkv[:, -1])):
            shape = (view.numel() // hidden, hidden)
            yield f"{i}.{name}", shape, ((0, shape[0]), (0, hidden)), view
        _, _, _, gate_up = made("", 2 * ffn, hidden)
        for name, view in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            yield f"{i}.{name}", (ffn, hidden), ((0, ffn), (0, hidden)), view
        yield made(f"{i}.o", hidden, heads * d)
        yield made(f"{i}.down", hidden, ffn)
        yield made(f"{i}.norm", hidden)


def experts(layers: int, count: int, hidden: int, ffn: int, device: str) -> Iterator[Item]:
    """Of one rank: three matrices an expert, of which two are halves of one in memory."""
    for i in range(layers):
        first = torch.empty(count, 2 * ffn, hidden, dtype=torch.bfloat16, device=device).normal_()
        second = torch.empty(count, hidden, ffn, dtype=torch.bfloat16, device=device).normal_()
        for e in range(count):
            for name, view in zip(("gate", "up"), first[e].chunk(2), strict=True):
                yield f"{i}.{e}.{name}", (ffn, hidden), ((0, ffn), (0, hidden)), view
            yield f"{i}.{e}.down", (hidden, ffn), ((0, hidden), (0, ffn)), second[e]


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds. The call itself waits for the device."""
    samples = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


def measure(held: list[Item], repeats: int) -> tuple[float, float, int]:
    """Seconds of fingerprints and of sums, and the bytes."""

    def sums() -> list[int]:
        found = [one[3].view(torch.int16).sum(dtype=torch.int64) for one in held]
        return torch.stack(found).tolist()

    nbytes = sum(one[3].nbytes for one in held)
    return timed(lambda: fingerprints(held), repeats), timed(sums, repeats), nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write benchmark records to this file")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    cases: dict[str, Callable[[], Iterator[Item]]] = {
        "qwen2.5-1.5b/1gpu": lambda: items(28, 1536, 8960, 12, 2, 151936, device),
        "qwen3-8b/1gpu": lambda: items(36, 4096, 12288, 32, 8, 151936, device),
        "qwen3-30b-a3b/experts-of-1-in-8": lambda: experts(48, 16, 2048, 768, device),
    }
    if not gpu:
        cases = {"qwen2.5-1.5b/2-layers": lambda: items(2, 1536, 8960, 12, 2, 1000, device)}
    records = []
    for case, make in cases.items():
        held = list(make())
        seconds, plain, nbytes = measure(held, 20 if gpu else 3)
        rates = nbytes / seconds / 1e9, nbytes / plain / 1e9
        print(f"{case}: {len(held)} tensors, {nbytes / 1e9:.2f} GB in {1e3 * seconds:.1f} ms, {rates[0]:.0f} GB/s "
              f"(sums: {1e3 * plain:.1f} ms, {rates[1]:.0f} GB/s)")  # fmt: skip
        records.append(record("fingerprints", case, "seconds", seconds, "s", baseline=plain))
        records.append(record("fingerprints", case, "gb_s", rates[0], "GB/s", baseline=rates[1]))
        del held
    if arguments.out:
        write_records(arguments.out, records)


if __name__ == "__main__":
    main()
