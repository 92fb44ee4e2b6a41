"""Where the native rollout keeps keys and values: slots or pages, by what a decode step of attention costs.

    python benchmarks/kv_cache.py [--out FILE]

One layer's attention of one decode step, Qwen2.5-1.5B's heads (12 query, 2 KV, 128 wide), bf16 on a GPU and fp32 on a
CPU; sequence lengths uniform between 1/8 of the context and all of it. Variants:

- slots-masked: a slot a sequence, SDPA under a mask over the longest length
- slots-flash: a slot a sequence, the flash kernel told each length (GPU only; what the native rollout uses there)
- pages-gather: pages of 64 tokens, gathered by the page table, SDPA under a mask
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.records import record, write_records
from benchmarks.timing import timed
from quintet.engine.layers.attention_backends import AttentionParams
from quintet.rollout.native.cache import SlotCache

HEADS, KV_HEADS, WIDTH, PAGE = 12, 2, 128, 64


class _Layer:
    layer_number = 1
    scale = None


def slots(cache: SlotCache, q: torch.Tensor, kv: torch.Tensor, flash: bool) -> torch.Tensor:
    keys, values = cache.keys[1], cache.values[1]
    flat = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
    for store in flat:
        store.index_copy_(0, cache._write, kv)
    if flash:
        return cache._flash(q, *flat, AttentionParams())
    n = cache._length
    return cache._masked(q, keys[: len(q), :n], values[: len(q), :n], AttentionParams())


def pages(
    store: torch.Tensor,
    table: torch.Tensor,
    write: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """store: [2, pages, PAGE, kv heads, width]; table: [sequences, pages of the longest]."""
    for side in store:
        side.view(-1, KV_HEADS, WIDTH).index_copy_(0, write, kv)
    k, v = (side[table].flatten(1, 2).transpose(1, 2) for side in store)
    grouped = q.view(len(q), KV_HEADS, HEADS // KV_HEADS, WIDTH)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(len(q), HEADS, WIDTH)


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median, after three calls that are not counted."""
    return 1e3 * statistics.median([timed(call, device)[0] for _ in range(repeats + 3)][3:])


def measure(sequences: int, context: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds by variant; the variants' outputs are compared first."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(context // 8, context + 1, (sequences,), generator=generator)
    positions = (lengths - 1).to(device)
    cache = SlotCache([1], sequences, context, KV_HEADS, WIDTH, dtype, device)
    for store in (cache.keys[1], cache.values[1]):
        store.normal_()
    cache.decode(positions, int(lengths.max()))
    q = torch.randn(sequences, HEADS, WIDTH, device=device, dtype=dtype)
    kv = torch.randn(sequences, KV_HEADS, WIDTH, device=device, dtype=dtype)
    per = -(-context // PAGE)
    table = torch.randperm(sequences * per, generator=generator).view(sequences, per).to(device)
    store = torch.zeros(2, sequences * per, PAGE, KV_HEADS, WIDTH, device=device, dtype=dtype)
    for side, kept in zip(store, (cache.keys[1], cache.values[1]), strict=True):
        side[table.flatten()] = kept.reshape(sequences * per, PAGE, KV_HEADS, WIDTH)
    used = table[:, : -(-int(lengths.max()) // PAGE)]
    write = table[torch.arange(sequences), positions // PAGE] * PAGE + positions % PAGE
    steps = torch.arange(used.shape[1] * PAGE, device=device)
    mask = (steps[None] <= positions[:, None])[:, None, None]
    calls = {
        "slots-masked": lambda: slots(cache, q, kv, False),
        "pages-gather": lambda: pages(store, used, write, q, kv, mask),
    }
    if device.type == "cuda":
        calls["slots-flash"] = lambda: slots(cache, q, kv, True)
    expected = calls["slots-masked"]()
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, rtol=2e-2, atol=2e-2, msg=lambda m, n=name: f"{n}: {m}")
    return {name: milliseconds(call, device, repeats) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write benchmark records to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [(256, 2048), (256, 8192), (64, 32768)] if device.type == "cuda" else [(256, 64), (64, 512)]
    records = []
    for sequences, context in sizes:
        found = measure(sequences, context, device, 50 if device.type == "cuda" else 10)
        print(
            f"{sequences} sequences, context {context}: "
            + ", ".join(f"{k} {v:.3f} ms" for k, v in found.items())
        )
        for name, value in found.items():
            case = f"{sequences}x{context}/{name}"
            records.append(record("kv_cache", case, "decode_ms", value, "ms", baseline=found["pages-gather"]))
    if arguments.out:
        write_records(arguments.out, records)


if __name__ == "__main__":
    main()
