"""The work both sides of the rollout benchmark do: model shapes, prompts, and how long each response is.

Imports without torch: the parent process plans with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_work import MODELS, Lengths

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": MODELS["qwen2.5-1.5b"].config,
    "qwen3-8b": MODELS["qwen3-8b"].config,
    # 1.0M parameters: what a CPU generates with in seconds. Heads of 32: vLLM's attention on CPU has none smaller.
    "laptop": MODELS["tiny"].config
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
    },
    "tiny": MODELS["tiny"].config
    | {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512},
    # Half of its layers: 31 GB in bf16, which are written to a disk.
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"].config | {"num_hidden_layers": 24},
    "tiny-moe": MODELS["qwen3-30b-a3b"].config
    | {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class Case:
    """Prompts and responses of one call of `generate`. responses: a length for all, or their distribution."""

    name: str
    prompts: int
    samples_per_prompt: int
    prompt_tokens: int
    responses: int | Lengths

    @property
    def longest(self) -> int:
        """Most tokens of a response."""
        return self.responses if isinstance(self.responses, int) else self.responses.longest

    def prompt_ids(self, vocab_size: int) -> list[list[int]]:
        """Random tokens, the same at each call."""
        generator = random.Random(0)
        return [
            [generator.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)
        ]

    def response_tokens(self) -> list[tuple[int, ...]]:
        """How long each sample of each prompt is made, the same at each call."""
        drawn = self._lengths()
        return [tuple(next(drawn) for _ in range(self.samples_per_prompt)) for _ in range(self.prompts)]

    def _lengths(self) -> Iterator[int]:
        generator = random.Random(1)
        while True:
            yield self.responses if isinstance(self.responses, int) else self.responses.one(generator)


LONG_TAIL = Lengths(median=256, sigma=0.8, shortest=32, longest=2048)
LAPTOP_TAIL = Lengths(median=64, sigma=0.8, shortest=8, longest=256)
SMALL_TAIL = Lengths(median=16, sigma=0.8, shortest=4, longest=64)

_TINY = (Case("", 8, 4, 16, 16), Case("long-tail", 8, 4, 16, SMALL_TAIL))
_OF_SMALL = {
    "laptop": (Case("", 32, 8, 64, 64), Case("long-tail", 32, 8, 64, LAPTOP_TAIL)),
    "tiny": _TINY,
    "tiny-moe": _TINY,
}


def cases_of(shape: str) -> tuple[Case, ...]:
    """The work that a shape is measured with."""
    real = (Case("", 128, 4, 256, 512), Case("long-tail", 128, 4, 256, LONG_TAIL))
    return _OF_SMALL.get(shape, real)
