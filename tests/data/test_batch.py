"""The Batch keeps every value with its sample through select, concat, pickling; and nothing it does is done sample by sample."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.data.batch import (
    Batch,
    concat,
    lengths,
    make_batch,
    sample_ids,
    select,
    set_tokens,
    token_count,
    tokens,
)

# (prompt length, response length) of each sample; responses may be empty.
shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12)


def build(shape: list[tuple[int, int]], start: int = 0) -> Batch:
    """A batch in which every value is unique and tells its sample and position."""
    ids = [[1000 * (start + i) + t for t in range(p + r)] for i, (p, r) in enumerate(shape)]
    return make_batch(
        ids,
        [p for p, _ in shape],
        old_logprobs=[[-float(t) for t in row] for row in ids],
        rollout_logprobs=[[-float(t) for t in row[p:]] for row, (p, _) in zip(ids, shape, strict=True)],
        routes=[torch.tensor(row).view(-1, 1, 1).expand(-1, 2, 3) for row in ids],
        prompt_id=[start + i for i in range(len(shape))],
        advantages=[0.5 * (start + i) for i in range(len(shape))],
    )


def with_routes(shape: list[tuple[int, int]], start: int = 0) -> Batch:
    """With small integers of two dims a token, in all fields that may have them; of samples' last tokens none in one."""
    sizes = [p + r for p, r in shape]

    def of(sample: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.arange(tokens * 6) + 37 * (start + sample)
        return (flat % 251).to(dtype).view(tokens, 2, 3)

    batch = make_batch(
        [[7] * n for n in sizes],
        [p for p, _ in shape],
        routes=[of(i, n - 1, torch.uint8) for i, n in enumerate(sizes)],
        wide=[of(i, n, torch.int16).numpy() for i, n in enumerate(sizes)],
    )
    flat = torch.cat([of(i, n - 1, torch.int8) for i, n in enumerate(sizes)])
    other = make_batch([[7] * n for n in sizes], [p for p, _ in shape])
    set_tokens(other, "routes", flat)
    assert tokens(other, "routes").dtype == torch.int8
    assert torch.equal(tokens(other, "routes").view(torch.uint8), tokens(batch, "routes"))
    return batch


@settings(max_examples=15)
@given(shapes, shapes, st.data())
def test_small_integers_with_dims_of_their_own_keep_type_and_place(shape, more, data) -> None:
    both = [with_routes(shape), with_routes(more, len(shape))]
    one = concat([pickle.loads(pickle.dumps(batch)) for batch in both])
    assert (tokens(one, "routes").dtype, tokens(one, "wide").dtype) == (torch.uint8, torch.int16)
    assert tokens(one, "routes").shape == (token_count(one) - len(shape + more), 2, 3)
    assert tokens(one, "wide").shape == (token_count(one), 2, 3)
    want = [row for batch in both for row in rows(batch)]
    assert rows(one) == want
    index = data.draw(st.lists(st.integers(0, len(want) - 1)))
    assert rows(select(one, index)) == [rows(one)[i] for i in index]


def test_other_integers_are_int64_and_fields_of_a_wrong_length_are_refused() -> None:
    batch = make_batch([[1, 2, 3]], [1], numbers=[torch.tensor([1, 2, 3], dtype=torch.int32)], count=[4])
    assert {tokens(batch, "numbers").dtype, batch["count"].dtype} == {torch.int64}
    assert make_batch([torch.zeros(3, dtype=torch.uint8)], [1])["input_ids"].dtype == torch.int64
    with pytest.raises(ValueError, match="rows of lengths"):
        make_batch([[1, 2, 3, 4]], [2], numbers=[[1, 2, 3]])  # of a field that has one a token
    with pytest.raises(ValueError, match="numbers has 2 values, but the batch has 3 tokens"):
        set_tokens(batch, "numbers", torch.zeros(2))
    short, whole = (make_batch([[1, 2, 3]], [1], routes=[[1] * n]) for n in (2, 3))
    with pytest.raises(ValueError, match="routes has all tokens in some batches"):
        concat([short, whole])


def rows(batch: Batch) -> list[dict[str, object]]:
    """A naive reading, sample by sample, in plain Python."""
    fields = dict(batch.items())
    per_field = {name: [v.tolist() for v in fields[name].unbind()] for name in fields}
    return [{name: values[i] for name, values in per_field.items()} for i in range(batch.batch_size[0])]


@settings(max_examples=40)
@given(shapes)
def test_make(shape: list[tuple[int, int]]) -> None:
    batch = build(shape)
    assert lengths(batch) == [p + r for p, r in shape]
    assert token_count(batch) == sum(p + r for p, r in shape)
    for i, ((p, r), row) in enumerate(zip(shape, rows(batch), strict=True)):
        ids = [1000 * i + t for t in range(p + r)]
        assert row["input_ids"] == ids
        assert row["loss_mask"] == [0.0] * p + [1.0] * r
        assert row["rollout_logprobs"] == [0.0] * p + [-float(t) for t in ids[p:]]
        assert row["routes"] == [[[t] * 3] * 2 for t in ids]
        assert row["prompt_length"] == p
        assert row["sample_index"] == i
    assert batch["input_ids"].dtype == torch.int64
    assert batch["old_logprobs"].dtype == torch.float32


@settings(max_examples=40)
@given(shapes, st.data())
def test_select(shape: list[tuple[int, int]], data: st.DataObject) -> None:
    batch = build(shape)
    pick = data.draw(st.lists(st.integers(0, len(shape) - 1), max_size=15))
    chosen = select(batch, pick)
    everything = rows(batch)
    assert rows(chosen) == [everything[i] for i in pick]
    if pick:
        chosen["old_logprobs"].values().fill_(7.0)
        assert rows(batch) == everything, "select must not share memory"


@settings(max_examples=40)
@given(st.lists(shapes, min_size=1, max_size=4))
def test_concat_and_back(parts: list[list[tuple[int, int]]]) -> None:
    batches = [build(shape, start=100 * k) for k, shape in enumerate(parts)]
    whole = concat(batches)
    assert rows(whole) == [row for batch in batches for row in rows(batch)]
    first = 0
    for batch in batches:
        n = batch.batch_size[0]
        assert rows(select(whole, range(first, first + n))) == rows(batch)
        first += n


@settings(max_examples=40)
@given(shapes)
def test_fields_combine_after_anything(shape: list[tuple[int, int]]) -> None:
    """Jagged fields share one offsets tensor: elementwise operations on nested tensors raise otherwise."""
    made = build(shape)
    for batch in (
        made,
        select(made, [0]),
        concat([made, made]),
        pickle.loads(pickle.dumps(made)),
        made.clone(),
    ):
        product = batch["old_logprobs"] * batch["loss_mask"]
        assert torch.equal(product.values(), tokens(batch, "old_logprobs") * tokens(batch, "loss_mask"))
        set_tokens(batch, "ref_logprobs", torch.ones(token_count(batch)))
        assert torch.equal((batch["ref_logprobs"] * batch["loss_mask"]).values(), tokens(batch, "loss_mask"))


@settings(max_examples=40)
@given(shapes)
def test_pickle(shape: list[tuple[int, int]]) -> None:
    batch = build(shape)
    assert rows(pickle.loads(pickle.dumps(batch))) == rows(batch)


def test_helpers() -> None:
    batch = build([(1, 2), (2, 0), (1, 1)])
    assert sample_ids(batch).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert {name for name, value in batch.items() if value.is_nested} == {
        "input_ids",
        "loss_mask",
        "old_logprobs",
        "rollout_logprobs",
        "routes",
    }
    assert rows(select(batch, []).clone()) == []
    one = make_batch([torch.tensor([5])], [1])
    assert lengths(one) == [1]
    assert tokens(one, "loss_mask").tolist() == [0.0]


def test_errors() -> None:
    with pytest.raises(ValueError, match="sample 1 has 2 tokens but prompt_length 3"):
        make_batch([[1], [1, 2]], [1, 3])
    with pytest.raises(ValueError, match="old_logprobs has rows of lengths"):
        make_batch([[1, 2, 3]], [1], old_logprobs=[[0.0, 0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="advantages has shape"):
        make_batch([[1, 2, 3]], [1], advantages=[0.0, 1.0])
    batch = build([(1, 1), (1, 1)])
    with pytest.raises(IndexError):
        select(batch, [2])
    with pytest.raises(IndexError):
        select(batch, [-1])
    with pytest.raises(ValueError, match="only one of them has: routes"):
        concat([batch, batch.exclude("routes")])
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    with pytest.raises(ValueError, match="the batch has 4 tokens"):
        set_tokens(batch, "x", torch.zeros(3))


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, it calls."""
    count = 0

    def told(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(told)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_nothing_is_per_sample() -> None:
    """512 samples take the calls that 64 take: none is made for each."""
    counts = []
    for samples in (8, 64, 512):  # the first calls of all load what they need
        batch = build([(10 + i % 7, i % 40) for i in range(samples)])
        parts = [select(batch, range(i, i + samples // 8)) for i in range(0, samples, samples // 8)]
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
        wire = pickle.dumps(batch)
        works: list[Callable[[], object]] = [
            lambda batch=batch, order=order: select(batch, order),
            lambda parts=parts: concat(parts),
            lambda batch=batch: pickle.dumps(batch),
            lambda wire=wire: pickle.loads(wire),
        ]
        counts.append([calls(work) for work in works])
    assert counts[1] == counts[2]


@pytest.mark.parametrize(("prompt_lengths", "mask"), [([1, 0], None), ([1, 1], [[0.0, 1.0], [0.5, 1.0]])])
def test_a_first_token_cannot_be_trained(prompt_lengths: list[int], mask: list[list[float]] | None) -> None:
    fields = {} if mask is None else {"loss_mask": mask}
    with pytest.raises(ValueError, match="sample 1: its first token has loss_mask"):
        make_batch([[5, 6], [7, 8]], prompt_lengths, **fields)


def test_a_sample_without_tokens_has_no_first_token() -> None:
    assert lengths(make_batch([[5, 6], []], [1, 0])) == [2, 0]
