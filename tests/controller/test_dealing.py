"""Requests dealt to rollouts by the length that is expected of them, and what their slots' time at a call's end came to."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.controller.dealing import SlotTime, deal, slot_time
from quintet.controller.samples import Samples
from quintet.train.session import Session
from tests.train.runs import run

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def written(shares: list[list[int]], lengths: list[int], slots: int) -> list[list[float]]:
    """When each sequence of each rollout is done, where each slot takes the next request as it falls free, a token a second."""
    finished = []
    for share in shares:
        free, times = [0.0] * slots, []
        for number in share:
            times.append(heapq.heappop(free) + lengths[number])
            heapq.heappush(free, times[-1])
        finished.append(times)
    return finished


def counted(shares: list[list[int]], lengths: list[int], slots: int) -> SlotTime:
    """The same as `slot_time`, second by second: who waits, who writes, and which slots stand empty."""
    waiting = [[lengths[number] for number in share] for share in shares]
    width = [min(slots, len(share)) for share in shares]
    writing: list[list[int]] = [[] for _ in shares]
    idle = total = 0
    while True:
        for queue, active, most in zip(waiting, writing, width, strict=True):
            while queue and len(active) < most:
                active.append(queue.pop(0))
        if not any(writing):
            return SlotTime(idle, total)
        for k, active in enumerate(writing):
            idle += width[k] - len(active)
            total += width[k]
            writing[k] = [left - 1 for left in active if left > 1]


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5))
def test_slot_time_is_what_a_look_every_second_counts(lengths: list[int], rollouts: int, slots: int) -> None:
    for expected in (None, [float(one) for one in lengths], [51.0 - one for one in lengths]):
        shares = deal(len(lengths), rollouts, expected)
        assert slot_time(written(shares, lengths, slots), slots) == counted(shares, lengths, slots)


def test_slot_time_by_hand() -> None:
    assert slot_time([[1.0, 2.0, 3.0, 4.0]], slots=2) == (1.0, 8.0)
    assert slot_time([[4.0, 1.0], [1.0, 1.0]], slots=2) == (9.0, 16.0), "each waits for the last of all"
    assert slot_time([[14.0, 11.0], [11.0, 11.0]], 2, 10.0) == (9.0, 16.0), "of a call that began later"
    assert slot_time([[3.0], []], slots=8) == (0.0, 3.0), "slots that nothing was there for at any time"
    assert slot_time([], slots=8) == slot_time([[]], slots=8) == (0.0, 0.0)


@given(LENGTHS, st.integers(1, 4))
def test_a_deal_is_of_each_request_once_and_even(lengths: list[int], rollouts: int) -> None:
    shares = deal(len(lengths), rollouts, [float(one) for one in lengths])
    assert sorted(number for share in shares for number in share) == list(range(len(lengths)))
    for share in shares:
        assert [lengths[number] for number in share] == sorted(
            (lengths[number] for number in share), reverse=True
        )
    loads = [sum(lengths[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)
    assert shares == deal(len(lengths), rollouts, [float(one) for one in lengths])


def test_where_nothing_is_expected_the_order_is_that_of_requests() -> None:
    assert deal(5, 2, None) == [[0, 2, 4], [1, 3]]
    assert deal(5, 2, [7.0] * 5) == [[0, 2, 4], [1, 3]]
    assert deal(1, 3, [2.0]) == [[0], [], []]
    assert deal(4, 2, [0.0] * 4) == [[0, 2], [1, 3]]


def test_prompts_in_an_order_of_length_are_shared_out_where_nothing_is_expected() -> None:
    """Of a file that goes from easy to hard, the last rollout does not have all the long ones."""
    lengths = [10 * n for n in range(1, 65)]
    for planted in (lengths, lengths[::-1]):
        loads = [sum(planted[number] for number in share) for share in deal(64, 4, None)]
        assert max(loads) - min(loads) < max(lengths)


def test_a_long_one_is_weighed_against_many_short_ones() -> None:
    assert deal(10, 2, [1.0] * 9 + [9.0]) == [[9], [0, 1, 2, 3, 4, 5, 6, 7, 8]]


def test_the_planted_order_leaves_more_slots_empty() -> None:
    """A long tail: the longest is six times the median."""
    lengths = [int(8 * 1.06**n) for n in range(64)]
    share = {}
    for name, expected in {
        "longest": lengths,
        "none": None,
        "shortest": [3000 - one for one in lengths],
    }.items():
        found = slot_time(written(deal(64, 2, expected), lengths, 8), 8)
        share[name] = found.idle / found.total
    assert share["longest"] < 0.5 * share["none"]
    assert share["longest"] < 0.5 * share["shortest"]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "where",
    [
        ["cluster.ranks=1"],
        pytest.param(["cluster.ranks=2", "rollout.own_processes=true"], marks=pytest.mark.nightly),
    ],
    ids=["in-process", "own"],
)
def test_ranks_measure_it_and_no_token_depends_on_the_order(tmp_path: Path, where: list[str]) -> None:
    with run(tmp_path, "rollout.sequences_per_rank=6", *where) as s:
        plain, longest, shortest = (generate(s, order) for order in (0, 1, -1))
    for other, _ in (longest, shortest):
        assert [one.text for one in other.generated] == [one.text for one in plain[0].generated]
        assert other.place != plain[0].place
    shares = plain[1], longest[1], shortest[1]
    assert all(0 < share < 1 for share in shares), shares
    if "cluster.ranks=1" in where:  # two ranks' speeds differ on a machine that has more to do
        assert longest[1] < 0.6 * shortest[1], shares  # 0.02 and 0.32 where every token takes as long


def generate(s: Session, order: int) -> tuple[Samples, float]:
    """A response to each of 16 prompts, and the idle share that is told of it. order: 1 expects their lengths, -1 the contrary, 0
    nothing."""
    assert s.inputs.train is not None
    prompts, lengths = list(s.inputs.train)[:16], [12 + 3 * (n + 1) ** 2 // 2 for n in range(16)]
    sampling = replace(s.sampling(), ignore_end=True, max_response_tokens=396)
    expected = [500.0 + order * one for one in lengths] if order else None
    with s.controller.generating():
        samples = s.controller.generate(
            prompts, sampling, 1, "seed", [[one] for one in lengths], expected=expected
        )
    s.controller.reward(samples)
    return samples, s.controller.counted()["rollout/tail_idle_fraction"]
