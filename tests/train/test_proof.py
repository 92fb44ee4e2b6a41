"""The proof of a sync, from the controller: what ends a run, what warns, and when log-probs are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quintet.errors import SyncMismatch
from quintet.models.mcore import whole_box
from quintet.recipe import Recipe
from quintet.recipe.schema import Rollout
from quintet.train.messages import EngineWeights
from quintet.train.proof import Proof

SHAPES = {"model.norm.weight": (4,), "model.layers.0.mlp.experts.1.up_proj.weight": (4, 2)}
NORM, EXPERT = SHAPES
BOXES = {name: whole_box(shape) for name, shape in SHAPES.items()}


class Policy:
    """Trainer ranks that hold the same whole tensors and score every token alike."""

    def __init__(self) -> None:
        self.prints = {(NORM, BOXES[NORM]): 5, (EXPERT, BOXES[EXPERT]): 7}
        self.master, self.logprob = 1, -1.0
        self.called: list[str] = []

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.called.append(method)
        if method == "weights":
            return [EngineWeights(dict(self.prints), SHAPES)] * 2
        if method == "masters":
            return [self.master] * 2
        if method == "parameter_type":
            return "fp32"
        return [None, [[self.logprob] * (len(one) - 1) for one in options["sequences"]]]


def proof(policy: Policy, said: list[str], **rollout: Any) -> Proof:
    group: Any = policy
    shape: Any = SimpleNamespace(vocab_size=100, moe=None)
    return Proof(group, Recipe(rollout=Rollout(**rollout)), shape, said.append)


def test_what_differs_ends_the_run_by_name_whichever_copy_it_is() -> None:
    policy, said = Policy(), list[str]()
    one = proof(policy, said)
    right = dict(policy.prints)
    assert one.of({"rollout-0": [(right, [])], "rollout-1": [(right, [])]}) == {"sync/masters_alone": 0.0}
    assert one.sequences == []
    wrong = {**right, (EXPERT, BOXES[EXPERT]): 8}
    with pytest.raises(SyncMismatch, match=rf"rollout-1 does not hold .* {EXPERT} \(expert\): other values"):
        one.of({"rollout-0": [(right, [])], "rollout-1": [(wrong, [])]})
    del wrong[EXPERT, BOXES[EXPERT]]
    with pytest.raises(SyncMismatch, match=rf"rollout-0 .* {EXPERT} \(expert\): missing on the rollout"):
        one.of({"rollout-0": [(wrong, [])]})


def test_what_cannot_be_read_back_is_proved_by_log_probs() -> None:
    policy = Policy()
    one = proof(policy, [], backend="sglang")
    one.of({"rollout-0": [({}, [NORM, EXPERT])]})
    assert one.sequences
    scores = [[-1.0] * (len(ids) - 1) for ids in one.sequences]
    assert one.of_probe({"rollout-0": scores}) == {"sync/probe_gap": 0.0}
    scores[3][2] -= 0.01
    with pytest.raises(SyncMismatch, match="rollout-0 does not compute"):
        one.of_probe({"rollout-0": scores})
    with pytest.raises(SyncMismatch, match=rf"{EXPERT} \(expert\): missing on the rollout"):
        one.of({"rollout-0": [({}, [NORM])]})  # what did not come is no tensor that cannot be read


def test_one_copy_that_cannot_be_read_back_is_enough_for_the_probe() -> None:
    policy = Policy()
    one = proof(policy, [], backend="vllm")
    readable: Any = [(dict(policy.prints), [])]
    one.of({"rollout-0": [({}, [NORM, EXPERT])], "rollout-1": readable})
    assert one.sequences
    one.of({"rollout-0": readable, "rollout-1": readable})
    assert one.sequences == []


def test_a_copy_that_stands_still_while_the_trainer_moves_ends_the_run() -> None:
    policy = Policy()
    one = proof(policy, [], backend="vllm", probe_tolerance=1.0)
    for logprob in (-1.0, -1.1):  # within the tolerance of what the copy tells each time
        policy.logprob = logprob
        one.of({"rollout-0": [({}, [NORM, EXPERT])]})
        still = [[-1.0] * (len(ids) - 1) for ids in one.sequences]
        if logprob == -1.0:
            one.of_probe({"rollout-0": still})
    with pytest.raises(SyncMismatch, match="rollout-0 did not load what it was brought"):
        one.of_probe({"rollout-0": still})


def test_masters_that_change_alone_warn() -> None:
    policy, said = Policy(), list[str]()
    one = proof(policy, said)
    for master, changed, alarm in ((1, 0, 0.0), (1, 0, 0.0), (2, 0, 1.0), (3, 1, 0.0)):
        policy.master = master
        policy.prints[NORM, BOXES[NORM]] += changed
        one.changed()
        assert one.of({"rollout-0": [(dict(policy.prints), [])]}) == {"sync/masters_alone": alarm}
    assert len(said) == 1
    assert "master weights of 2 of 2 ranks" in said[0]


def test_without_proofs_nothing_is_asked_for() -> None:
    policy = Policy()
    one = proof(policy, [], sync_proof=False)
    one.changed()
    assert not one.asked
    assert policy.called == []
