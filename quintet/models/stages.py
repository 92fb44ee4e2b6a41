"""How many layers each pipeline stage is best given: the first also embeds tokens, the last has the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from quintet.models.shape import ModelShape


def balanced_stages(shape: ModelShape, stages: int) -> list[int]:
    """Return the number of layers of each stage, in the model's order, with which the stages' times are as even as can be (the sum of
    their squares the least), and then their weights. The last may have none, beside a large head; there are no fewer layers than stages.

    Time is counted in the weights that a token is multiplied by, the head's among them; of weights the embedding's count, too.
    """
    times, weights = zip(*(_of_layer(shape, layer) for layer in range(shape.layers)), strict=True)
    rows = shape.hidden_size * shape.vocab_size
    last_time, last_weights = _after_last(shape)
    time_to, weights_to = [0, *accumulate(times)], [0, *accumulate(weights)]
    most = 3 * -(-shape.layers // stages)  # of one stage; bounds the search
    best: list[tuple[int, int, list[int]]] = []
    """For each number of layers: the sums of squares, of times and of weights, and what each stage so far has."""
    for stage in range(stages):
        last = stage == stages - 1
        found: list[tuple[int, int, list[int]]] = []
        for stop in range(shape.layers + 1):
            ways = []
            starts = [0] if stage == 0 else range(max(0, stop - most), stop + last)
            for start in starts:
                before = best[start] if stage else (0, 0, [])
                if len(before[2]) < stage or (stop == start and not last):
                    continue
                time = time_to[stop] - time_to[start] + last * last_time
                held = weights_to[stop] - weights_to[start] + last * last_weights + (stage == 0) * rows
                ways.append((before[0] + time**2, before[1] + held**2, [*before[2], stop - start]))
            found.append(min(ways, default=(0, 0, [])))
        best = found
    return best[shape.layers][2]


def _after_last(shape: ModelShape) -> tuple[int, int]:
    """Of the head, and of layers for multi-token prediction with a head each: weights that a token is multiplied by, and all."""
    head = shape.hidden_size * shape.vocab_size if shape.head == "lm" else 0
    ahead = [_of_layer(shape, shape.layers + depth) for depth in range(shape.mtp_layers)]
    return head * (1 + shape.mtp_layers) + sum(time for time, _ in ahead), head + sum(
        held for _, held in ahead
    )


def _of_layer(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Weights of a layer but for its norms: those that a token is multiplied by, and all."""
    moe = replace(shape.moe, dense_layers=()) if shape.moe and shape.is_moe(layer) else None
    one, none = (replace(shape, layers=count, mtp_layers=0, moe=moe) for count in (1, 0))
    rest = none.parameter_count + 2 * shape.hidden_size
    return one.active_parameter_count - rest, one.parameter_count - rest


def slowest_over_mean(shape: ModelShape, stages: Sequence[Sequence[range]]) -> float:
    """Return the time of the stage with the most to do over the mean of all, counted as in `balanced_stages`. stages: the layers of each,
    by chunk."""
    times = [sum(_of_layer(shape, layer)[0] for chunk in stage for layer in chunk) for stage in stages]
    times[-1] += _after_last(shape)[0]
    return max(times) * len(times) / sum(times)
