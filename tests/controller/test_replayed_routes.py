"""Routes from a rollout, or from the pass before, to the updates that replay them: over stages, mini-batches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet.cluster.cluster import Cluster
from quintet.controller.batch_ref import Placement
from quintet.controller.controller import Controller
from quintet.controller.held_batches import HeldBatches
from quintet.controller.messages import Assignment, joined
from quintet.controller.sample_store import SampleStore
from quintet.controller.scatter import Scatterer
from quintet.data.batch import select, tokens
from quintet.data.routes import RouteSizes
from quintet.data.tokenizer import build_char_tokenizer
from quintet.engine.routes import BatchRoutes
from quintet.errors import QuintetError
from quintet.models import trained_shape
from quintet.packing.plan import Cell
from quintet.recipe import schema
from quintet.rewards.result import RewardResult
from quintet.rollout.base import Request, Sample, Sampling
from quintet.train.algorithms import algorithm_of
from quintet.train.steps import Step
from tests.controller.test_cells import prompt
from tests.oracle.models import save


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save("deepseek_v3", tmp_path_factory.mktemp("model"))
    build_char_tokenizer("0123456789", made)
    return made


def recipe_of(path: Path, replay: str | None, layout: dict[str, Any]) -> schema.Recipe:
    return schema.Recipe(
        cluster=schema.Cluster(ranks=2, device="cpu"),
        model=schema.Model(path=path),
        layout=schema.Layout(**layout),
        rollout=schema.Rollout(
            layout=schema.RolloutLayout(tp=1), samples_per_prompt=2, return_routes=replay == "rollout"
        ),
        engine=schema.Engine(
            tokens_per_microbatch_per_rank=32, distributed_optimizer=False, replay_routes=replay
        ),
        optimizer=schema.Optimizer(lr=3e-2, eps=1e-4),
        train=schema.Train(mini_batches_per_step=2, prompts_per_step=5, steps=2),
    )


def step_of(cluster: Cluster, recipe: schema.Recipe) -> tuple[Step, Step]:
    """A step of training, in two mini-batches."""
    assert recipe.model.path is not None
    controller = Controller(cluster, recipe, recipe.model.path, trained_shape(recipe.model.path))
    with controller.workers:
        algorithm = algorithm_of(recipe, controller.roles)
        controller.start_optimizer(recipe.optimizer, 4)
        with controller.generating():
            sampling = Sampling(max_response_tokens=6)
            samples = controller.generate([prompt(n, []) for n in range(5)], sampling, 2, "seed")
        samples.rewards = [RewardResult(float(n % 3), {}) for n in range(10)]
        batch = controller.scatter(samples)
        for score in algorithm.scores:
            batch = batch | score(batch)
        batch = batch | algorithm.advantages(batch)
        first, second = Step(1), Step(2)
        for mini, step in zip(batch.minibatches, (first, second), strict=True):
            for role, objective in algorithm.updates(1):
                step.add(role.name, role.forward_backward(mini, objective), role.optimizer_step())
    return first, second


@pytest.mark.parametrize(
    ("replay", "layout"),
    [
        ("rollout", {"pp": 2, "vpp": 2}),
        pytest.param("rollout", {"pp": 2, "stage_layers": [3, 1]}, marks=pytest.mark.slow),
        pytest.param("rollout", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("old", {"pp": 2}, marks=pytest.mark.nightly),
        pytest.param("old", {"cp": 2}, marks=pytest.mark.nightly),  # each sample is padded to a multiple of 4
        pytest.param("rollout", {"cp": 2, "dynamic_cp": True}, marks=pytest.mark.nightly),
        pytest.param("old", {"cp": 2, "dynamic_cp": True}, marks=pytest.mark.slow),
    ],
)
def test_updates_replay_what_was_chosen_before(ray_cluster: Cluster, path: Path, replay, layout) -> None:
    first, second = (one.updates["policy"] for one in step_of(ray_cluster, recipe_of(path, replay, layout)))
    assert list(first.parted) == [1, 2, 3]  # of all stages; the first layer is dense
    # On the weights that chose them, tokens choose the same; a step later some would choose others.
    assert first.metrics["routes/parted"] == 0
    assert 0 < second.metrics["routes/parted"] < 0.8
    assert second.metrics["routes/parted_3"] == second.parted[3][0] / second.parted[3][1]
    # Of the first four samples all tokens, or with a rollout's routes all but the last; no padding.
    assert {total for _, total in first.parted.values()} == {32 if replay == "rollout" else 36}


@pytest.mark.slow
def test_layers_of_a_stage_in_another_order_are_seen(
    ray_cluster: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage has the layers 1 and 3, in two chunks."""
    ordered = Scatterer._layers

    def turned(self: Scatterer, placement: Placement) -> list[list[int] | None]:
        return [layers and layers[::-1] for layers in ordered(self, placement)]

    monkeypatch.setattr(Scatterer, "_layers", turned)
    first, _ = step_of(ray_cluster, recipe_of(path, "rollout", {"pp": 2, "vpp": 2}))
    parted = first.updates["policy"].metrics
    assert min(parted["routes/parted_1"], parted["routes/parted_3"]) > 0.3


@pytest.mark.parametrize(
    ("replay", "scoring", "update"),
    [(None, None, None), ("old", "record", "recorded"), ("rollout", "rollout", "rollout")],
)
def test_the_policy_alone_replays(path: Path, replay, scoring, update) -> None:
    """Not the reference policy, nor the critic."""
    ppo = schema.Algorithm(name="ppo", kl_coef=0.05, kl_in="reward")
    recipe = recipe_of(path, replay, {}).model_copy(update={"algorithm": ppo})
    roles: dict[str, Any] = {name: object() for name in ("policy", "reference", "critic")}
    algorithm = algorithm_of(recipe, roles)
    told = {score.field: score.routes for score in algorithm.scores}
    assert told == {"old_logprobs": scoring, "ref_logprobs": None, "old_values": None}
    critic, policy = (one.objective for one in algorithm.trained)
    assert (critic.routes, policy.routes) == (None, update)
    assert ("routes" in policy.reads) == (replay is not None)


def test_counts_of_ranks_are_summed_by_layer():
    assert joined({3: (1, 4), 1: (0, 4)}, {3: (2, 5), 2: (1, 1)}) == {1: (0, 4), 2: (1, 1), 3: (3, 9)}


SIZES = RouteSizes(layers=3, experts=8, top_k=2)


def kept(lengths: list[int], routes: RouteSizes | None = SIZES) -> SampleStore:
    """Samples of one token of prompt and so many tokens in all, with routes."""
    store, generator = SampleStore(0, routes), np.random.default_rng(0)
    requests = [Request([n]) for n in range(len(lengths))]
    told = [generator.random((n - 1, 3, 8)).argsort(-1)[..., :2].astype(np.int16) for n in lengths]
    answered = [
        [Sample(list(range(1, n)), None, [-1.0] * (n - 1), None, "stop", routes=one)]
        for n, one in zip(lengths, told, strict=True)
    ]
    store.put("call", requests, answered)
    return store


def assigned(numbers: list[int]) -> Assignment:
    cells = [[Cell([at], range(1))] for at in range(len(numbers))]
    return Assignment(cells, numbers, [9], len(numbers))


def test_each_stage_gets_its_own_layers_and_looks_at_the_seals():
    store = kept([5, 3, 5])
    places = [("call", 0), ("call", 2)]
    _, first, second, plain = store.slice_for([places, places, places], [[0], [1, 2], None])
    whole = store.of("call")
    assert whole is not None
    assert torch.equal(tokens(first, "routes"), tokens(select(whole, [0, 2]), "routes")[:, :1])
    assert tokens(second, "routes").shape == (8, 2, 2)
    assert tokens(second, "routes").dtype == torch.uint8
    assert not {"routes", "route_seals"} & set(plain.keys())

    held = HeldBatches()
    put = {"place": 0, "scored": None, "aggregation": "token_mean"}
    held.put(("batch", "policy"), [([second], assigned([7, 4])), ([], assigned([]))], **put)
    full, empty = held["batch", "policy"].minis
    assert isinstance(full.routes("rollout"), BatchRoutes)
    assert isinstance(empty.routes("rollout"), BatchRoutes)  # of padding alone
    assert full.routes(None) is None
    with pytest.raises(AssertionError, match="has recorded its routes"):
        full.routes("recorded")

    flat = tokens(second, "routes")  # of two samples of one length
    flat[:4], flat[4:] = flat[4:].clone(), flat[:4].clone()
    with pytest.raises(QuintetError, match="sample 7: its routes are not those"):
        held.put(("batch", "policy"), [([second], assigned([7, 4]))], **put)
    held.put(("batch", "policy"), [([plain], assigned([7, 4]))], **put)
    with pytest.raises(KeyError, match="routes"):  # nothing falls back to choosing by itself
        held["batch", "policy"].minis[0].routes("rollout")


def test_a_sample_without_routes_ends_the_call():
    requests, sample = [Request([1])], Sample([2, 3], None, [-1.0, -1.0], None, "stop")
    with pytest.raises(QuintetError, match="call x, sample 0: the rollout told no routes of it"):
        SampleStore(0, SIZES).put("x", requests, [[sample]])
    SampleStore(0).put("x", requests, [[sample]])
    sample.finish = "abort"  # which ends the step by itself
    store = SampleStore(0, SIZES)
    store.put("x", requests, [[sample]])
    made = store.of("x")
    assert made is not None
    assert "routes" not in made
