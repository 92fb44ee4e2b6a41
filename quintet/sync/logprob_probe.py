"""The proof where weights cannot be read back: both sides say how likely fixed tokens are, and must agree.

The tokens are drawn once from the vocabulary, the same on every machine. They are random, so nearly every row of the embedding is
another and all experts get some: a part that is wrong shows in the log-probs of the tokens that pass it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from quintet.errors import SyncMismatch

if TYPE_CHECKING:
    from quintet.engine.engine import Engine


LONG, SHORT = (8, 64), (64, 16)
"""So many sequences of so many tokens, where the model and the rollout take that many. Short ones with
experts: where a router sends one token elsewhere, all tokens after it in its sequence move, so that of few sequences one such token
may spoil an eighth."""
SEED = 20
TOLERANCES = {"fp32": 0.002, "bf16": 0.25}
"""Largest difference of a log-prob that rounding explains, of a token that both sides send to the same experts."""
OF_EIGHT_BITS = 1.0
"""Where the rollout rounds weights and activations to 8 bits and the trainer does not. Not measured: nothing that was run so
could not be read back."""

STILL = 0.04
"""How far the trainer's log-probs may go, as a share of the tolerance, while a rollout's do not move at all."""

Scores = list[list[float]]
"""Of each sequence, the log-probs of its tokens but the first."""


class Limits(NamedTuple):
    """What the log-probs of a rollout with the trainer's weights keep within.

    tolerance: most that a token's may differ, but for the share `beyond` of tokens, which may by any number. mean: most that all
    may differ in the mean, each counted as the tolerance at most, as a share of it: rounding moves few tokens far, wrong weights move
    most.
    """

    tolerance: float
    beyond: float = 0.0
    mean: float = 0.2


PARTED = Limits(TOLERANCES["bf16"], beyond=0.1, mean=0.3)
"""With experts in bf16, which routers choose on each side: a token between two of them may be sent to the other, and be off by any
number. vLLM for CPU beside engines of one rank and of tp 2 · ep 2, eight trained models of three layers: up to 0.044 of the tokens
beyond, 0.18 in the mean, one token 7.7 nats off; with two of eight experts of a layer in one another's place at least 0.19 and 0.35."""


def limits(tolerance: float | None, dtype: str, *, experts: bool, quantized: bool) -> Limits:
    """Return the limits of a model's probe. tolerance: recipe key rollout.probe_tolerance. dtype: fp32 or bf16."""
    if tolerance is None:
        tolerance = OF_EIGHT_BITS if quantized else TOLERANCES[dtype]
    return PARTED._replace(tolerance=tolerance) if experts and dtype == "bf16" else Limits(tolerance)


def sequences(vocab_size: int, most_tokens: int, *, experts: bool) -> list[list[int]]:
    """Return the fixed sequences that both sides score. most_tokens: that the rollout takes at once, at least 2. experts: whether the
    model has some."""
    drawn, (count, tokens) = random.Random(SEED), SHORT if experts else LONG
    each = range(min(tokens, most_tokens))
    return [[drawn.randrange(vocab_size) for _ in each] for _ in range(count)]


def engine_scores(engine: Engine, sequences: Sequence[list[int]]) -> Scores | None:
    """Return what the engine says of sequences, all ranks of it the same ones. Ranks of the last stage return it, others None.
    Collective."""
    from quintet.data.batch import make_batch
    from quintet.packing.align import alignment_of
    from quintet.packing.plan import RankCell

    cp, place = engine.mesh.sizes.cp, engine.mesh.at("cp")
    budget = engine.recipe.tokens_per_microbatch_per_rank * cp
    aligned = alignment_of(engine.layout, cp, engine.recipe)
    together = max(budget // aligned.row([max(map(len, sequences))]), 1)
    order = list(range(len(sequences)))
    cells = [RankCell(order[i : i + together], cp, place) for i in range(0, len(order), together)]
    batch = make_batch(list(sequences), [1] * len(sequences))
    found = engine.forward(batch, cells)
    if found is None:
        return None
    flat, scores = found.logprobs.tolist(), []
    for one in sequences:
        scores.append(flat[1 : len(one)])  # the first token has none
        flat = flat[len(one) :]
    return scores


def check(
    engine: Scores, rollout: Scores, sequences: Sequence[list[int]], limits: Limits, name: str
) -> float:
    """Return the largest difference of a log-prob between engine and rollout.

    Raises SyncMismatch saying where it is, when differences are above the limits or one is no number. name: the rollout's.
    """
    apart = [
        (_distance(a, b), number, at)
        for number, (mine, its) in enumerate(zip(engine, rollout, strict=True))
        for at, (a, b) in enumerate(zip(mine, its, strict=True))
    ]
    largest, number, at = max(apart)
    tolerance, most = limits.tolerance, int(limits.beyond * len(apart))
    mean = sum(min(one, tolerance) for one, _, _ in apart) / len(apart)
    above = sum(one > tolerance for one, _, _ in apart)
    if above <= most and mean <= limits.mean * tolerance and largest < math.inf:
        return largest
    raise SyncMismatch(
        f"{name} does not compute what the trainer computes after the sync: of {len(apart)} fixed tokens the log-probs of "
        f"{above} differ by more than {tolerance:g} (rollout.probe_tolerance), where {most} may, and all by {mean:.3g} in the mean "
        f"(each counted as {tolerance:g} at most), where {limits.mean * tolerance:.3g} is the most. The largest difference is "
        f"{largest:.3g}, in sequence {number} at position {at + 1} (token {sequences[number][at + 1]}): {engine[number][at]:.4f} of the "
        f"trainer, {rollout[number][at]:.4f} of the rollout. Weights that it keeps in a form of its own did not arrive as they "
        "were sent, or its kernels compute something else"
    )


class Movement:
    """A check of whether rollouts that are brought new weights compute something new: one that never loads them agrees for many
    small steps."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[Scores, Scores]] = {}

    def check(self, engine: Scores, rollout: Scores, tolerance: float, name: str) -> None:
        """Raise SyncMismatch when the trainer has moved since this rollout last did, which tells the very same."""
        before = self._moved.get(name)
        if before is None or before[1] != rollout:
            self._moved[name] = engine, rollout
            return
        pairs = zip(chain(*before[0]), chain(*engine), strict=True)
        moved = max(_distance(a, b) for a, b in pairs)
        if moved > STILL * tolerance:
            raise SyncMismatch(
                f"{name} did not load what it was brought: its log-probs of the fixed tokens are the very same as before, while the "
                f"trainer's have moved by up to {moved:.3g}"
            )


def _distance(a: float, b: float) -> float:
    """|a - b|, infinite where either is no number."""
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart
