"""The work of the benchmark of drafts: a language of known entropy, the model that learns it, and how many sequences of what length.

Imports without torch: the parent process plans with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

LIKELY = 0.75
"""Probability of the token that most often follows another; a greedy draft of a layer that has learnt the language is
accepted so often, if those before it were."""


@dataclass(frozen=True)
class Language:
    """Each of `words` token ids is followed by one certain other with probability LIKELY, else by any of them."""

    words: int

    @cached_property
    def followers(self) -> list[int]:
        """Return what most often follows each word: one cycle through all, so that no text is caught in a short one."""
        order = list(range(self.words))
        random.Random(0).shuffle(order)
        follows = [0] * self.words
        for word, following in zip(order, order[1:] + order[:1], strict=True):
            follows[word] = following
        return follows

    def text(self, tokens: int, seed: int) -> list[int]:
        """Return a text of so many tokens."""
        draw, follows = random.Random(seed), self.followers
        found = [draw.randrange(self.words)]
        while len(found) < tokens:
            found.append(follows[found[-1]] if draw.random() < LIKELY else draw.randrange(self.words))
        return found

    @property
    def entropy(self) -> float:
        """Nats a token."""
        rest = (1 - LIKELY) / self.words
        likely = LIKELY + rest
        return -likely * math.log(likely) - (self.words - 1) * rest * math.log(rest)


@dataclass(frozen=True)
class Shape:
    """Sizes of a MiMo, of its training, and of what it then generates.

    Heads are of 64 (32 for hidden sizes under 256), a quarter as many for keys and values. tokens: of a micro-batch, of which a step
    has four. steps, lr: of training.
    """

    hidden: int
    layers: int
    ffn: int
    vocab: int
    language: Language
    tokens: int
    steps: int
    lr: float
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    response: int

    def at(self, sequences: Sequence[int] | None, contexts: Sequence[int] | None) -> Shape:
        """Return the same model with other cases, those that are given."""
        return replace(
            self,
            sequences=tuple(sequences or self.sequences),
            contexts=tuple(contexts or self.contexts),
        )

    def build(self) -> dict[str, Any]:
        """Return the recipe's section `model.build`."""
        heads = self.hidden // (64 if self.hidden >= 256 else 32)
        return {
            "family": "mimo",
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "layers": self.layers,
            "heads": heads,
            "kv_heads": max(1, heads // 4),
            "head_dim": self.hidden // heads,
            "max_position_embeddings": max(self.contexts) + 2 * self.response,
            "tied_embeddings": False,
        }


SHAPES = {
    # 445M parameters.
    "400m": Shape(
        1024, 24, 4096, 32768, Language(4096), 16384, 120, 5e-4, (1, 8, 32, 64, 256), (512, 4096), 256
    ),
    "laptop": Shape(128, 4, 384, 512, Language(256), 2048, 120, 2e-3, (1, 8, 32), (64, 256), 48),
    "tiny": Shape(128, 2, 256, 256, Language(64), 512, 60, 2e-3, (1, 4), (32,), 16),
}
