"""Train the model of the benchmark of drafts from scratch, and time what its layer for multi-token prediction costs.

    python -m benchmarks.mtp_train --shape tiny --model /tmp/tiny      a dry run in seconds, on a CPU

Two engines in one process learn the same batches of the language (`mtp_work.Language`), one with the layer and one without; they take
turns, a few steps each. Prints one line of JSON: tokens/s of both, over the last half of their steps; how many FLOPs the layer and its head add;
how far both losses are from the language's entropy. The model with the layer is written as a Hugging Face directory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.engine_work import REAL, TRAINED_FROM
from benchmarks.mtp_work import SHAPES, Shape
from benchmarks.options import positive_int
from benchmarks.sides import answer_stream
from quintet.controller.objective import sft_objective
from quintet.data.batch import make_batch, set_tokens
from quintet.data.batch import tokens as flat
from quintet.engine.ahead import ahead_losses
from quintet.engine.engine import Engine
from quintet.engine.weights.random_model import write_fresh_model
from quintet.models import ModelShape, read_shape
from quintet.packing.plan import RankCell, target_counts
from quintet.recipe import schema

TURN = 5
"""Steps of a turn."""
MICROBATCHES = 4


def main(argv: list[str] | None = None) -> None:
    """Train both, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="400m")
    parser.add_argument("--model", type=Path, required=True, help="a directory that is made")
    parser.add_argument("--contexts", type=positive_int, nargs="+", help="of what is generated later")
    args = parser.parse_args(argv)
    answers = answer_stream()
    print(json.dumps(train(SHAPES[args.shape].at(None, args.contexts), args.model)), file=answers)


def train(shape: Shape, path: Path) -> dict[str, float]:
    """Let both engines take turns, write the one with the layer, and return what is told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    build, words = schema.BuildModel.model_validate(shape.build()), shape.vocab
    start = path.with_name(f"{path.name}-start")
    write_fresh_model(build, start, vocab_size=words, eos_id=0, pad_id=0, seed=0, mtp_layers=1)
    quiet_layers(start / "model.safetensors")
    without, ahead = Loop(shape, start, None), Loop(shape, start, schema.Mtp())
    lengths = random.Random(0)
    seen = []
    for first in range(0, shape.steps, TURN):
        steps = range(first, min(first + TURN, shape.steps))
        rows = [[REAL.row(shape.tokens, lengths) for _ in range(MICROBATCHES)] for _ in steps]
        seen += [n for step in rows for row in step for n in row]
        batches = [batch_of(shape, row, step) for row, step in zip(rows, steps, strict=True)]
        for loop in (without, ahead):
            for batch in batches:
                loop.step(*batch)
            print(f"step {steps[-1]}: loss {loop.losses[-1]:.3f}, {loop.seconds[-1]:.3f} s", flush=True)
    ahead.engine.save_hf(path, start)
    context = sum(n * n / 2 for n in seen) / sum(seen)  # keys a query sees, in the mean
    dist.destroy_process_group()
    found = {name: loop.tokens_per_s(shape) for name, loop in (("with", ahead), ("without", without))}
    return found | {
        "flop_share": flop_share(ahead.shape, context),
        "entropy": shape.language.entropy,
        "loss": ahead.losses[-1],
        "loss_without": without.losses[-1],
        "loss_ahead": ahead.metrics["mtp/loss_1"],
        "accuracy_ahead": ahead.metrics["mtp/accuracy_1"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }


def quiet_layers(file: Path) -> None:
    """Let layers begin by adding nothing to the residual stream: a deep model learns what follows a word in fewer steps so."""
    tensors = load_file(file)
    quiet = {
        n: torch.zeros_like(t)
        for n, t in tensors.items()
        if n.endswith(("o_proj.weight", "down_proj.weight"))
    }
    save_file(tensors | quiet, file, metadata={"format": "pt"})


def batch_of(shape: Shape, rows: list[list[int]], step: int) -> tuple[Any, list[RankCell], list[int]]:
    """Return a step's batch, its cells, and how many targets each head has. rows: lengths of sequences, by micro-batch."""
    lengths = [n for row in rows for n in row]
    samples = [
        torch.tensor(shape.language.text(n, seed=1000 * step + number)) for number, n in enumerate(lengths)
    ]
    prompts = [TRAINED_FROM] * len(samples)
    counts = target_counts(lengths, prompts, (1, 2))
    batch = make_batch(samples, prompts)
    set_tokens(batch, "weights", flat(batch, "loss_mask") / counts[0])
    numbers = iter(range(len(samples)))
    return batch, [RankCell(list(islice(numbers, len(row))), 1, 0) for row in rows], counts


def flop_share(shape: ModelShape, context: float) -> float:
    """Return the FLOPs that layers for multi-token prediction add, over those of the model without: a layer with its projection, and
    the head once more, of whose weight no gradient is taken."""
    trunk = shape.without_mtp()
    head = shape.vocab_size * shape.hidden_size
    attention = 6.0 * shape.heads * (shape.head_dim + shape.v_head_dim) * context
    layers = 6.0 * (shape.parameter_count - trunk.parameter_count) + shape.mtp_layers * (
        attention + 4.0 * head
    )
    return layers / trunk.flops_per_token(context)


class Loop:
    """One engine, with the layer or, if `mtp` is None, without."""

    def __init__(self, shape: Shape, path: Path, mtp: schema.Mtp | None) -> None:
        self.shape = read_shape(path) if mtp else read_shape(path).without_mtp()
        self.mtp, self.objective = mtp, sft_objective()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        optimizer = schema.Optimizer(lr=shape.lr, warmup_steps=10)
        self.engine = Engine(
            self.shape,
            schema.Layout(),
            engine=schema.Engine(tokens_per_microbatch_per_rank=shape.tokens, recompute="none"),
            optimizer=optimizer,
            dtype="bf16" if self.device.type == "cuda" else "fp32",
            total_steps=shape.steps,
            mtp=mtp,
        )
        self.engine.load_hf(path)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}

    def step(self, batch: Any, cells: list[RankCell], counts: list[int]) -> None:
        """Train one step, and keep how long it took and what it said."""
        start = time.perf_counter()
        losses = ahead_losses(self.mtp, counts)
        result = self.engine.forward_backward(batch, cells, self.objective, ahead=losses)
        self.engine.optimizer_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        assert result is not None
        self.losses.append(result.loss)
        self.metrics = result.tally.means()

    def tokens_per_s(self, shape: Shape) -> float:
        """Of the later half of its steps, in the median; a turn's first is left out."""
        steady = [s for n, s in enumerate(self.seconds) if n >= len(self.seconds) // 2 and n % TURN]
        return MICROBATCHES * shape.tokens / statistics.median(steady)


if __name__ == "__main__":
    main()
