"""How many tokens to draft ahead, by what was measured: `rollout.draft_tokens=auto`.

A step that verifies k drafted tokens costs more than one that draws one token, and brings more. What it costs depends on how many
sequences are decoded at once, on their length and on the device; what it brings, on how often drafts are accepted. A table has
both (benchmarks/mtp.py measures it): the speed with k over that without, and the acceptance at which that was. From these
follows the speed at another acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.recipe.vllm import draft_lengths

TABLE = Path(__file__).with_name("draft_speed.json")
ASSUMED_ACCEPTANCE = 0.6
"""Of the first drafted token, where nothing is known of the model: low for layers that were trained with it."""


@dataclass(frozen=True)
class Measured:
    """One measurement. device: as torch names it, or cpu. sequences: decoded at once. context_tokens: of a sequence, in the mean.
    speedup: tokens/s over those without drafts in the same run. accepted: tokens of a draft that were, in the mean."""

    device: str
    sequences: int
    context_tokens: int
    draft_tokens: int
    accepted: float
    speedup: float

    def speedup_at(self, acceptance: float) -> float:
        """Return the speedup where each drafted token is accepted with this probability if those before it were."""
        length = 1 + sum(acceptance**n for n in range(1, self.draft_tokens + 1))
        return self.speedup * length / (1 + self.accepted)


@dataclass(frozen=True)
class Choice:
    """How many tokens to draft, and why."""

    draft_tokens: int
    why: str


def read_table(path: Path = TABLE) -> list[Measured]:
    """Return what was measured."""
    return [Measured(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def drafts_of(recipe: schema.Recipe, layers: int, device: str) -> Choice:
    """Return how many tokens a rollout of a recipe drafts, and why: `rollout.draft_tokens`, or what was measured where it is auto.
    layers: the model's, for multi-token prediction. device: as torch names it, or cpu."""
    rollout = recipe.rollout
    if rollout.draft_tokens != "auto":
        return Choice(rollout.draft_tokens, f"rollout.draft_tokens={rollout.draft_tokens}")
    samples = recipe.train.prompts_per_step * rollout.samples_per_prompt
    sequences = min(rollout.sequences_per_rank, -(-samples // max(1, placement_of(recipe).copies)))
    context = recipe.data.max_prompt_tokens + rollout.max_response_tokens // 2
    return choose(read_table(), device, sequences, context, draft_lengths(layers))


def choose(
    table: Iterable[Measured],
    device: str,
    sequences: int,
    context_tokens: int,
    lengths: Iterable[int],
    acceptance: float = ASSUMED_ACCEPTANCE,
) -> Choice:
    """Return the draft length that is fastest for so many sequences of this length on this device, 0 where none is faster than
    none.

    lengths: those that the model can draft. A length counts by the worst of the measurements next to the place asked for, below
    and above it in both directions; it does not count beyond what was measured, nor where one of these was slower than none as it
    was measured, or would be at this acceptance.
    """
    here = [one for one in table if one.device == device and one.draft_tokens in set(lengths)]
    what = f"{sequences} sequences of {context_tokens} tokens on {device}"
    found: dict[int, float] = {}
    known = "nothing was measured"
    if here:
        most, longest = max(one.sequences for one in here), max(one.context_tokens for one in here)
        if sequences > most or context_tokens > longest:
            known += f", the table ends at {most} sequences and {longest} tokens"
        else:
            known = "the places around were not all measured"
    for length in sorted({one.draft_tokens for one in here}):
        corners = _corners([one for one in here if one.draft_tokens == length], sequences, context_tokens)
        if corners:
            known = f"none was measured faster, at an acceptance of {acceptance:.0%}"
        if corners and min(one.speedup for one in corners) > 1:
            found[length] = min(one.speedup_at(acceptance) for one in corners)
    best = max(found, key=lambda length: found[length], default=0)
    if not best or found[best] <= 1:
        return Choice(0, f"no drafts: for {what} {known}")
    return Choice(
        best,
        f"{best} drafted tokens: for {what} that was measured {found[best]:.2f} times as fast as none, at an acceptance of "
        f"{acceptance:.0%}",
    )


def _corners(rows: list[Measured], sequences: int, context_tokens: int) -> list[Measured]:
    """The measurements next to a place: [] where it is beyond them, or one of them is missing."""
    sides = (
        _around(sorted({one.sequences for one in rows}), sequences),
        _around(sorted({one.context_tokens for one in rows}), context_tokens),
    )
    corners = [one for one in rows if one.sequences in sides[0] and one.context_tokens in sides[1]]
    places = {(one.sequences, one.context_tokens) for one in corners}
    return corners if len(places) == len(sides[0]) * len(sides[1]) else []


def _around(measured: list[int], value: int) -> set[int]:
    """The next of these below a value and above it, or the value itself; nothing where it is above them all. Fewer sequences and
    shorter ones than any that were measured are like the fewest and shortest: drafts gain most there."""
    above = next((one for one in measured if one >= value), None)
    if above is None:
        return set()
    return {above, max((one for one in measured if one <= value), default=above)}
