"""The proof of a sync, from the controller: what ends a run, what warns, and when log-probs are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quintet.cluster.verbs import Asked
from quintet.controller.weight_check import Proof
from quintet.errors import SyncMismatch
from quintet.models.mcore import whole_box
from quintet.recipe.schema import Recipe, Rollout
from quintet.rollout.base import Fingerprints
from quintet.sync.rank_fingerprints import INDEX, RankFingerprints, RankIndexer
from tests.cluster.asked import AskedRanks

SHAPES = {"model.norm.weight": (4,), "model.layers.0.mlp.experts.1.up_proj.weight": (4, 2)}
NORM, EXPERT = SHAPES
BOXES = {name: whole_box(shape) for name, shape in SHAPES.items()}


class Ranks:
    """Ranks that hold these fingerprints. They note who tells of what they are."""

    def __init__(self, held: list[tuple[Fingerprints, list[str]]], shapes: Any = None) -> None:
        self.held, self.shapes = held, shapes
        self.indexers = [RankIndexer() for _ in held]
        self.told: list[int] = []

    def fingerprints(self) -> list[RankFingerprints]:
        each = zip(self.indexers, self.held, strict=True)
        found = [one.tell(prints, self.shapes, names) for one, (prints, names) in each]
        self.told += [rank for rank, one in enumerate(found) if one.parts]
        return found


class Policy(AskedRanks):
    """Trainer ranks that hold the same whole tensors and score every token alike."""

    n_ranks = 2

    def __init__(self) -> None:
        self.prints = {(NORM, BOXES[NORM]): 5, (EXPERT, BOXES[EXPERT]): 7}
        self.master, self.logprob, self.dtype = 1, -1.0, "fp32"
        self.called: list[str] = []
        self.ranks = Ranks([(self.prints, [])] * 2, SHAPES)

    def submit(self, asked: Asked) -> Any:
        self.called.append(asked.verb.__name__)
        return super().submit(asked)

    def answer(self, name: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        if name == "fingerprints":
            if rank == 0:
                self.vectors = self.ranks.fingerprints()
            return self.vectors[rank]
        if name == "masters":
            return self.master
        if name == "parameter_type":
            return self.dtype
        return [[self.logprob] * (len(one) - 1) for one in args[0]] if rank else None


class Held:
    """Copies of a rollout."""

    def __init__(self, copies: dict[str, list[tuple[Fingerprints, list[str]]]]) -> None:
        self.copies = {name: Ranks(held) for name, held in copies.items()}

    def fingerprints(self, beside: Any) -> dict[str, list[RankFingerprints]]:
        return {name: ranks.fingerprints() for name, ranks in self.copies.items()}


def proof(policy: Policy, said: list[str], **rollout: Any) -> Proof:
    group: Any = policy
    shape: Any = SimpleNamespace(vocab_size=100, moe=True if policy.dtype == "bf16" else None)
    return Proof(group, Recipe(rollout=Rollout(**rollout)), shape, said.append)


def of(one: Proof, copies: dict[str, Any]) -> float | None:
    """Prove, and tell whether masters changed alone; None where that is not told."""
    return one.of(Held(copies).fingerprints).get("sync/masters_alone")


def test_what_differs_ends_the_run_by_name_whichever_copy_it_is() -> None:
    policy, said = Policy(), list[str]()
    one = proof(policy, said)
    right = dict(policy.prints)
    of(one, {"rollout-0": [(right, [])], "rollout-1": [(right, [])]})
    assert one.sequences == []
    wrong = {**right, (EXPERT, BOXES[EXPERT]): 8}
    with pytest.raises(SyncMismatch, match=rf"rollout-1 does not hold .* {EXPERT} \(expert\): other values"):
        of(one, {"rollout-0": [(right, [])], "rollout-1": [(wrong, [])]})
    del wrong[EXPERT, BOXES[EXPERT]]
    with pytest.raises(SyncMismatch, match=rf"rollout-0 .* {EXPERT} \(expert\): missing on the rollout"):
        of(one, {"rollout-0": [(wrong, [])]})


def test_what_cannot_be_read_back_is_proved_by_log_probs() -> None:
    policy = Policy()
    one = proof(policy, [], backend="sglang")
    of(one, {"rollout-0": [({}, [NORM, EXPERT])]})
    assert one.sequences
    scores = [[-1.0] * (len(ids) - 1) for ids in one.sequences]
    assert one.of_probe({"rollout-0": scores}) == {"sync/probe_gap": 0.0}
    scores[3][2] -= 0.01
    with pytest.raises(SyncMismatch, match="rollout-0 does not compute"):
        one.of_probe({"rollout-0": scores})
    with pytest.raises(SyncMismatch, match=rf"{EXPERT} \(expert\): missing on the rollout"):
        of(one, {"rollout-0": [({}, [NORM])]})  # what did not come is no tensor that cannot be read


def test_one_copy_that_cannot_be_read_back_is_enough_for_the_probe() -> None:
    policy = Policy()
    one = proof(policy, [], backend="vllm")
    readable: Any = [(dict(policy.prints), [])]
    of(one, {"rollout-0": [({}, [NORM, EXPERT])], "rollout-1": readable})
    assert one.sequences
    of(one, {"rollout-0": readable, "rollout-1": readable})
    assert one.sequences == []


def test_a_copy_that_stands_still_while_the_trainer_moves_ends_the_run() -> None:
    policy = Policy()
    one = proof(policy, [], backend="vllm", probe_tolerance=1.0)
    for logprob in (-1.0, -1.1):  # within the tolerance of what the copy tells each time
        policy.logprob = logprob
        of(one, {"rollout-0": [({}, [NORM, EXPERT])]})
        still = [[-1.0] * (len(ids) - 1) for ids in one.sequences]
        if logprob == -1.0:
            one.of_probe({"rollout-0": still})
    with pytest.raises(SyncMismatch, match="rollout-0 did not load what it was brought"):
        one.of_probe({"rollout-0": still})


def test_of_experts_in_bf16_few_tokens_may_be_far_off_and_stale_weights_not() -> None:
    policy = Policy()
    policy.dtype = "bf16"
    one, copies = proof(policy, [], backend="vllm"), {"rollout-0": [({}, [NORM, EXPERT])]}
    of(one, copies)
    scores = [[-7.0 if at == 9 else -1.02 for at in range(len(ids) - 1)] for ids in one.sequences]
    assert one.of_probe({"rollout-0": scores}) == {"sync/probe_gap": 6.0}
    policy.logprob = -1.005  # too little to be told from rounding
    of(one, copies)
    one.of_probe({"rollout-0": scores})
    policy.logprob = -1.02
    of(one, copies)
    with pytest.raises(SyncMismatch, match=r"did not load what it was brought.* up to 0\.02"):
        one.of_probe({"rollout-0": scores})  # all within the limits, but those of before
    moved = [[value - 0.1 for value in row] for row in scores]
    with pytest.raises(SyncMismatch, match=r"of 960 fixed tokens .* 64 differ by more than 0\.25"):
        one.of_probe({"rollout-0": moved})


def test_masters_that_change_alone_warn() -> None:
    policy, said = Policy(), list[str]()
    one = proof(policy, said)
    for master, changed, alarm in ((1, 0, None), (1, 0, 0.0), (2, 0, 1.0), (3, 1, 0.0)):
        policy.master = master
        policy.prints[NORM, BOXES[NORM]] += changed
        one.changed()
        for _ in range(2):  # an evaluation between two steps has the same weights brought once more
            assert of(one, {"rollout-0": [(dict(policy.prints), [])]}) == alarm
    assert len(said) == 1
    assert "master weights of 2 of 2 ranks" in said[0]


def test_without_proofs_nothing_is_asked_for() -> None:
    policy = Policy()
    one = proof(policy, [], sync_proof=False)
    one.changed()
    assert not one.asked
    assert one.of(Held({"rollout-0": [({}, [])]}).fingerprints) == {}
    assert policy.called == []


def test_parts_are_told_once_and_anew_only_where_they_have_changed() -> None:
    policy = Policy()
    one = proof(policy, [])

    held = Held({"rollout-0": [(dict(policy.prints), [])]})

    def proved(first: Fingerprints, *, anew: bool = False) -> tuple[list[int], list[int]]:
        """Who of the trainer and of the rollout told of its parts."""
        nonlocal held
        held = Held({"rollout-0": [({}, [])]}) if anew else held
        ours, theirs = policy.ranks, held.copies["rollout-0"]
        ours.told, theirs.told, theirs.held = [], [], [(dict(first), [])]
        one.of(held.fingerprints)
        return ours.told, theirs.told

    same = policy.prints
    assert proved(same) == ([0, 1], [0])
    for _ in range(2):
        same[NORM, BOXES[NORM]] += 1
        assert proved(same) == ([], [])
    # It is cut elsewhere.
    halves = {(NORM, ((0, 2),)): 3, (NORM, ((2, 4),)): same[NORM, BOXES[NORM]] - 3} | {
        key: value for key, value in same.items() if key[0] != NORM
    }
    for cut in (halves, same, halves):  # what was forgotten meanwhile is told again
        assert proved(cut) == ([], [0])
    assert proved(halves, anew=True) == ([], [0])  # it was made anew
    halves[NORM, ((2, 4),)] += 1
    with pytest.raises(SyncMismatch, match=rf"rollout-0 does not hold .* {NORM} \(norm\): other values"):
        proved(halves)
    del policy.prints[NORM, BOXES[NORM]]
    policy.ranks.shapes = {EXPERT: SHAPES[EXPERT]}
    assert proved(same) == ([0, 1], [0])
    policy.ranks.held[1] = {**same, (EXPERT, BOXES[EXPERT]): 9}, []
    with pytest.raises(SyncMismatch, match="the trainer's ranks hold different copies of"):
        proved(same)


def test_an_index_that_another_rank_has_told_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    load = INDEX.load
    monkeypatch.setattr(INDEX, "load", lambda told, source: (read.append(told), load(told, source))[1])
    policy = Policy()
    right = dict(policy.prints)
    of(proof(policy, []), {f"rollout-{n}": [(right, [])] * 3 for n in range(2)})
    assert len(read) == 2  # the trainer's, and the rollouts'


def test_the_rank_that_parted_from_those_that_tell_the_same_is_named() -> None:
    policy = Policy()
    one = proof(policy, [])
    right = dict(policy.prints)
    wrong = {**right, (NORM, BOXES[NORM]): 6}
    said = r"rollout-1 .* copies of \[0:4\]: rank 2 other than ranks 0, 1, 3$"
    with pytest.raises(SyncMismatch, match=said):
        of(
            one,
            {
                "rollout-0": [(right, [])] * 4,
                "rollout-1": [(one, []) for one in (right, right, wrong, right)],
            },
        )
    policy.ranks.held = [(right, []), (wrong, [])]
    with pytest.raises(
        SyncMismatch, match=r"the trainer's ranks hold different copies .* rank 0 other than rank 1$"
    ):
        of(one, {"rollout-0": [(right, [])]})
