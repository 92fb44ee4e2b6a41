"""A batch is a value: what it says it holds, whose fields it takes, and until when its name lives."""

from __future__ import annotations

import gc

import pytest

from quintet.controller.batch_ref import BatchRef, Fields, Lease, MiniBatch
from quintet.controller.messages import SampleInfo
from quintet.controller.samples import Kept, Samples
from quintet.data.prompts import Prompt
from quintet.rewards.result import RewardResult
from quintet.train.algorithms import Refill


def batch(name: str, dropped: list[str]) -> BatchRef:
    return BatchRef(name, (MiniBatch(name, 0, 1, {"policy": 1}),), {"policy": [0]}, Lease(name, dropped))


def test_fields_are_of_their_own_batch() -> None:
    one, other = batch("one", []), batch("other", [])
    more = one | Fields("one", {"old_values": frozenset({"critic"})})
    more = more | Fields("one", {"old_values": frozenset({"policy"})})
    assert more.fields == {"old_values": frozenset({"critic", "policy"})}
    assert one.fields == {}
    with pytest.raises(ValueError, match="old_values are of the batch one, not of other"):
        other | Fields("one", {"old_values": frozenset({"critic"})})


def test_what_is_not_there_is_told() -> None:
    one = batch("one", []) | Fields("one", {"old_values": frozenset({"critic"})})
    one.need(["old_values"], "critic")
    with pytest.raises(ValueError, match="one has no old_values on the ranks of policy, only old_values"):
        one.need(["old_values"], "policy")
    with pytest.raises(ValueError, match="no ref_logprobs"):
        one.need(["ref_logprobs"], "critic")


def test_a_name_lives_as_long_as_a_value_of_it() -> None:
    dropped: list[str] = []
    one = batch("one", dropped)
    more = one | Fields("one", {})
    del one
    gc.collect()
    assert dropped == []
    del more
    gc.collect()
    assert dropped == ["one"]


def samples(rewards: list[list[float]], call: str, dropped: list[str]) -> Samples:
    """Groups of samples with these rewards."""
    flat = [(g, r) for g, group in enumerate(rewards) for r in group]
    return Samples(
        [Prompt(n, "", [1], f"{call}{n}", "", "", [], "") for n in range(len(rewards))],
        [g for g, _ in flat],
        [SampleInfo(4, 3, "stop", f"{call}{n}", None, None) for n in range(len(flat))],
        [Kept(0, call, n) for n in range(len(flat))],
        [RewardResult(r, {}) for _, r in flat],
        [7] * len(flat),
        (Lease(call, dropped),),
    )


class Given:
    """A source that gives what it is told to, and counts how much was asked for."""

    def __init__(self, *more: Samples) -> None:
        self.more_left, self.asked, self.told = list(more), [], {}

    def more(self, prompts: int) -> Samples:
        self.asked.append(prompts)
        return self.more_left.pop(0)

    def rewarded(self, samples: Samples) -> Samples:
        return samples  # they were made with rewards

    def tell(self, metric: str, value: float) -> None:
        self.told[metric] = value


def test_groups_without_signal_are_replaced() -> None:
    dropped: list[str] = []
    first = samples([[1, 1], [0, 1], [0, 0], [1, 0]], "a", dropped)
    source = Given(samples([[1, 1], [0, 1]], "b", dropped), samples([[1, 0]], "c", dropped))
    chosen = Refill(3)(first, source)
    assert source.asked == [2, 1]
    assert [p.text for p in chosen.prompts] == ["a1", "a3", "b1", "c0"]
    assert chosen.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [one.call + str(one.at) for one in chosen.place] == [
        "a2",
        "a3",
        "a6",
        "a7",
        "b2",
        "b3",
        "c0",
        "c1",
    ]
    assert chosen.versions == [7] * 8
    assert source.told == {"dapo/generated_groups": 7, "dapo/groups_with_signal": 4}
    assert chosen.groups_with_signal() == [0, 1, 2, 3]
    del first, source
    gc.collect()
    assert dropped == []  # what was selected keeps all of the calls alive
    del chosen
    gc.collect()
    assert sorted(dropped) == ["a", "b", "c"]


def test_refills_end_and_the_step_keeps_its_size() -> None:
    first = samples([[1, 1], [0, 1]], "a", [])
    source = Given(samples([[1, 1]], "b", []), samples([[0, 0]], "c", []))
    chosen = Refill(2)(first, source)
    assert source.asked == [1, 1]
    assert [p.text for p in chosen.prompts] == ["a1", "a0"]
    assert source.told["dapo/groups_with_signal"] == 1


@pytest.mark.parametrize("found", [1, 3, 4, 5, 6])
def test_mini_batches_have_as_many_groups_with_signal(found: int) -> None:
    first = samples([[0, 1]] * found + [[1, 1]] * (6 - found), "a", [])
    chosen = Refill(1, minibatches=2)(first, Given(samples([[1, 1]] * (6 - found), "b", [])))
    with_signal = [sum(half <= group < half + 3 for group in chosen.groups_with_signal()) for half in (0, 3)]
    assert sum(with_signal) == found
    assert abs(with_signal[0] - with_signal[1]) <= 1


def test_a_penalty_is_no_signal() -> None:
    first = samples([[1, 1]], "a", [])
    first.rewards[1] = RewardResult(1.0, {}, penalty=0.5)
    assert first.groups_with_signal() == []
    assert first.rewards[1].worth == 0.5
    assert first.equal_groups() == 0  # but it is learnt from


def test_groups_that_teach_nothing_are_counted() -> None:
    assert samples([[1, 1], [0, 1], [0, 0], [5, 5]], "a", []).equal_groups() == 0.75


def test_what_could_not_be_scored_is_no_signal() -> None:
    first = samples([[1, 0], [1, 0]], "a", [])
    first.rewards[1] = RewardResult(0.0, {}, failure="it raised")
    assert first.groups_with_signal() == [1]


def test_a_mini_batch_knows_what_its_batch_holds() -> None:
    one = batch("one", []) | Fields("one", {"advantages": frozenset({"policy"})})
    one.minibatches[0].need(["advantages"], "policy")
    with pytest.raises(ValueError, match="batch one has no returns on the ranks of policy, only advantages"):
        one.minibatches[0].need(["advantages", "returns"], "policy")


def test_samples_are_shown_spread_over_prompts() -> None:
    made = samples([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]], "call", [])
    assert made.spread(2) == [0, 3]
    assert made.spread(5) == [0, 3, 6, 1, 4]
    assert made.spread(0) == []
    assert sorted(made.spread()) == list(range(9))
    assert made.spread() == made.spread(99)
