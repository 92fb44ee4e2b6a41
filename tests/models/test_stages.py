"""What pipeline stages are best given, against all ways to cut a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.models import MlaShape, ModelShape, MoeShape
from quintet.models.stages import balanced_stages

DENSE = ModelShape("qwen3", 8, 64, 192, 4, 2, 16, 512, 256, False, 1e-6)
EXPERTS = MoeShape(experts=8, top_k=2, ffn_hidden_size=48, dense_layers=(0, 1))
DEEPSEEK_V3 = ModelShape(
    "deepseek_v3",
    *(61, 7168, 18432, 128, 128, 192, 129280, 163840, False, 1e-6),
    moe=MoeShape(256, 8, 2048, 2048, (0, 1, 2)),
    mla=MlaShape(1536, 512, 128, 64, 128),
)


def squares(shape: ModelShape, counts: list[int]) -> int:
    """The sum over stages of the squares of the weights that a token is multiplied by: a plain recount."""
    first, total = 0, 0
    head = shape.hidden_size * (shape.vocab_size if shape.head == "lm" else 0)
    for number, count in enumerate(counts):
        rest = replace(shape, layers=0, vocab_size=0, mtp_layers=0, tied_embeddings=True)
        norm, weights = rest.active_parameter_count, 0
        for layer in range(first, first + count):
            dense = () if shape.is_moe(layer) else (0,)
            moe = shape.moe and replace(shape.moe, dense_layers=dense)
            alone = replace(rest, layers=1, moe=moe)
            weights += alone.active_parameter_count - norm - 2 * shape.hidden_size
        weights += head if number == len(counts) - 1 else 0
        first, total = first + count, total + weights**2
    return total


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4000),
    st.sampled_from([None, EXPERTS]),
    st.sampled_from(["lm", "value"]),
)
def test_no_other_cut_is_more_even(
    layers: int, stages: int, vocab: int, moe: MoeShape | None, head: str
) -> None:
    shape = replace(DENSE, layers=layers, vocab_size=vocab, moe=moe, head=head)  # type: ignore[arg-type]
    if stages > layers:
        return
    found = balanced_stages(shape, stages)
    assert (len(found), sum(found)) == (stages, layers)
    assert 0 not in found[:-1]
    for cuts in combinations(range(1, layers + 1), stages - 1):
        ends = [0, *cuts, layers]
        other = [stop - start for start, stop in pairwise(ends)]
        assert squares(shape, found) <= squares(shape, other)


@pytest.mark.parametrize(
    ("shape", "stages", "counts"),
    [
        (replace(DENSE, vocab_size=1), 4, [2, 2, 2, 2]),
        (
            replace(DENSE, vocab_size=4000),
            4,
            [2, 3, 3, 0],
        ),  # embedding and head are as much as four layers each
        (DEEPSEEK_V3, 12, [6, *[5] * 9, 6, 4]),
    ],
)
def test_known_models(shape: ModelShape, stages: int, counts: list[int]) -> None:
    assert balanced_stages(shape, stages) == counts
