"""Roles on the same ranks, each in its own layout: what the critic of one layout says is what that of another says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.progress import turn
from quintet.controller.controller import Controller
from quintet.controller.engines import Engines
from quintet.controller.worker import PolicyWorker
from quintet.errors import WorkerFailure
from quintet.models import trained_shape
from quintet.recipe import schema
from quintet.recipe.offload import KINDS
from quintet.rewards.result import RewardResult
from quintet.rollout.base import Sampling
from quintet.train.algorithms import algorithm_of
from quintet.train.ppo import learn
from quintet.train.steps import Step
from tests.controller.test_cells import model_dir, prompt  # noqa: F401  (a fixture)
from tests.engine.storage import held
from tests.oracle.pool import Pool, PoolError


def recipe_of(
    path: Path,
    critic: dict[str, Any] | None,
    lora: schema.Lora | None = None,
    policy: dict[str, Any] | None = None,
    **engine: float,
) -> schema.Recipe:
    return schema.Recipe(
        cluster=schema.Cluster(ranks=2, device="cpu"),
        layout=schema.Layout(**policy or {}),
        model=schema.Model(path=path),
        rollout=schema.Rollout(layout=schema.RolloutLayout(tp=1), samples_per_prompt=2),
        algorithm=schema.Algorithm(name="ppo", kl_coef=0.05, kl_in="reward", kl_estimator="k1"),
        critic=schema.Critic(layout=None if critic is None else schema.Layout(**critic)),
        lora=lora,
        engine=schema.Engine(
            **{"tokens_per_microbatch_per_rank": 32, "distributed_optimizer": False} | engine  # type: ignore[arg-type]
        ),
        optimizer=schema.Optimizer(lr=1e-2, eps=1e-4),
        train=schema.Train(mini_batches_per_step=2, prompts_per_step=6, steps=3),
    )


def two_steps(cluster: Cluster, recipe: schema.Recipe) -> tuple[list[float], Controller]:
    """Losses, gradient norms and explained variance of both roles over two steps on the same samples."""
    assert recipe.model.path is not None
    controller = Controller(cluster, recipe, recipe.model.path, trained_shape(recipe.model.path))
    algorithm, told = algorithm_of(recipe, controller.roles), []
    for one in algorithm.trained:
        controller.start_optimizer(one.optimizer, 10, one.role.name)
    for number in (1, 2):
        with controller.generating():
            sampling = Sampling(max_response_tokens=6)
            samples = controller.generate([prompt(n, []) for n in range(6)], sampling, 2, "seed")
        samples.rewards = [RewardResult(float(n % 5), {}) for n in range(12)]
        batch = controller.scatter(samples)
        assert batch.versions == [number - 1] * 12
        step = Step(number)
        learn(algorithm, batch, step)
        controller.policy.publish()
        for role in ("policy", "critic"):
            update = step.updates[role]
            told += [update.loss, update.grad_norm]
        told.append(step.updates["critic"].tally.means()["returns"])
    return told, controller


@pytest.fixture(scope="module")
def of_one_layout(ray_cluster: Cluster, model_dir: Path) -> list[float]:  # noqa: F811
    """What two steps tell where the critic has the policy's layout."""
    told, controller = two_steps(ray_cluster, recipe_of(model_dir, None))
    controller.workers.close()
    return told


@pytest.mark.parametrize(
    "critic",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.slow, id="tp2"),
        pytest.param({"cp": 2}, marks=pytest.mark.nightly, id="cp2"),
        pytest.param({"pp": 2}, marks=pytest.mark.nightly, id="pp2"),
        pytest.param({"cp": 2, "dynamic_cp": True}, marks=pytest.mark.nightly, id="dynamic_cp2"),
    ],
)
def test_a_critic_of_another_layout(
    ray_cluster: Cluster,
    model_dir: Path,  # noqa: F811
    of_one_layout: list[float],
    critic: dict[str, Any],
) -> None:
    found, controller = two_steps(ray_cluster, recipe_of(model_dir, critic, offload_optimizer=1.0))
    with controller.workers:
        assert found == pytest.approx(of_one_layout, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_advantages_of_a_rank_are_of_its_neighbours_cells_too(
    ray_cluster: Cluster,
    model_dir: Path,  # noqa: F811
    of_one_layout: list[float],
) -> None:
    """Values and log-probs are known of all of a dp rank's samples, whichever of its ranks computed them: whitening counts them all."""
    cells = {"cp": 2, "dynamic_cp": True}
    recipe = recipe_of(model_dir, None, policy=cells, tokens_per_microbatch_per_rank=16)
    found, controller = two_steps(ray_cluster, recipe)
    with controller.workers:
        assert found == pytest.approx(of_one_layout, rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_a_critic_of_another_layout_with_adapters(
    ray_cluster: Cluster,
    model_dir: Path,  # noqa: F811
    of_one_layout: list[float],
) -> None:
    """Both roles train adapters, the critic its value head too; the reference is the policy without them."""
    lora = schema.Lora(rank=4, alpha=8.0)
    expected, same = two_steps(ray_cluster, recipe_of(model_dir, None, lora))
    same.workers.close()
    found, controller = two_steps(ray_cluster, recipe_of(model_dir, {"tp": 2}, lora, offload_optimizer=1.0))
    with controller.workers:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert expected != of_one_layout


@pytest.mark.slow
def test_two_batches_and_mistakes_with_them(ray_cluster: Cluster, model_dir: Path) -> None:  # noqa: F811
    recipe = recipe_of(model_dir, None)
    controller = Controller(ray_cluster, recipe, model_dir, trained_shape(model_dir))
    with controller.workers:
        algorithm, policy = algorithm_of(recipe, controller.roles), controller.policy
        for one in algorithm.trained:
            controller.start_optimizer(one.optimizer, 10, one.role.name)
        batches = []
        with controller.generating():
            for n in range(2):
                asked = [prompt(n * 2, []), prompt(n * 2 + 1, [])]
                samples = controller.generate(asked, Sampling(max_response_tokens=6), 2, "seed")
                samples.rewards = [RewardResult(float(n + k), {}) for k in range(4)]
                batches.append(samples)
        # Both alive at once, the first scored after the second was sent.
        first, second = (controller.scatter(samples) for samples in batches)
        first = first | policy.forward(first, "old_logprobs")
        with pytest.raises(ValueError, match="no old_logprobs on the ranks of policy"):
            controller.replayed(second)
        told = controller.replayed(first)
        assert {n: one.ids for n, one in told.items()} == {
            n: made.kept.ids for n, made in enumerate(batches[0].generated) if made.kept and n in told
        }
        with pytest.raises(ValueError, match="has no old_values"):
            algorithm.advantages(first)
        with pytest.raises(ValueError, match="not of"):
            second | policy.forward(first, "old_logprobs")

        for score in algorithm.scores:
            first = first | score(first)
        first = first | algorithm.advantages(first)
        objective = {role.name: one for role, one in algorithm.updates(1)}["policy"]
        policy.forward_backward(first.minibatches[0], objective)
        with pytest.raises(WorkerFailure, match="policy: forward_backward before optimizer_step"):
            policy.forward_backward(first.minibatches[1], objective)


def step_without_gradients(recipe: schema.Recipe, path: Path) -> None:
    Engines(recipe, trained_shape(path), path, "train", "fp32").optimizer_step("critic")


def test_a_step_needs_gradients(pool: Pool, model_dir: Path) -> None:  # noqa: F811
    with pytest.raises(PoolError, match="critic: optimizer_step without forward_backward"):
        pool.run(step_without_gradients, 2, recipe_of(model_dir, None), model_dir)


def what_moves(recipe: schema.Recipe, path: Path) -> None:
    engines = Engines(recipe, trained_shape(path), path, "train", "bf16")
    whole = {role: held(engines.behind(role)) for role in ("critic", "policy") if engines.whole(role)}
    assert min(whole["policy"]["optimizer"], whole["critic"]["optimizer"]) > 0
    engines.offload(KINDS)
    rank: Any = SimpleNamespace(roles=engines)
    assert PolicyWorker.onload(rank) == whole["policy"]["params"]  # gradients come without a copy
    for role in ("policy", "reference", "critic"):  # they score
        engines.use(role)
        assert held(engines.behind(role))["params"] > 0
        assert held(engines.policy)["optimizer"] == held(engines.behind("critic"))["optimizer"] == 0, role
    for role, other in (("critic", "policy"), ("policy", "critic")):  # they train
        engines._trained(role)
        assert held(engines.behind(role)) == whole[role]
        assert held(engines.behind(other)) == {"params": 0, "grads": 0, "optimizer": 0}


def test_who_scores_brings_its_parameters_alone(pool: Pool, model_dir: Path) -> None:  # noqa: F811
    shares = {f"offload_{kind}": 1.0 for kind in KINDS}
    pool.run(what_moves, 2, recipe_of(model_dir, None, **shares), model_dir)


def tells_turns(recipe: schema.Recipe, path: Path) -> bool:
    engines = Engines(recipe, trained_shape(path), path, "train", "fp32")
    told = [engines[role]._pipeline.turn for role in ("policy", "critic")]  # type: ignore[union-attr]
    return told == [turn, turn]


def test_every_role_tells_which_micro_batch_it_comes_to(pool: Pool, model_dir: Path) -> None:  # noqa: F811
    assert pool.run(tells_turns, 2, recipe_of(model_dir, None), model_dir) == [True, True]


def describes(recipe: schema.Recipe, path: Path) -> list[str]:
    shape = trained_shape(path)
    engines = Engines(recipe, shape, path, "train", "fp32")
    rank: Any = SimpleNamespace(recipe=recipe, shape=shape, roles=engines, engine=engines.policy)
    rank.device, rank.device_name, rank._kernels = "cpu", lambda: "cpu", None
    return PolicyWorker.describe(rank)


def test_a_rank_describes_the_layouts_of_all_roles(pool: Pool, model_dir: Path) -> None:  # noqa: F811
    """A run's first lines. The reference policy has the policy's layout, of which all is said."""
    cells = {"cp": 2, "dynamic_cp": True}
    planned = "planned by default constants: none were measured on cpu for this shape"
    first, own = pool.run(describes, 2, recipe_of(model_dir, cells), model_dir)[0]
    assert "for a row" not in first
    assert planned not in first
    assert own == (
        "Layout of the critic: 2 ranks = dp 1 × cp 2 (dynamic: 1, 2 for each micro-batch) × tp 1 × pp 1. Micro-batches: up to 64 "
        f"tokens on 2 ranks, each sample padded to a multiple of 4; less of both on fewer ranks. Dynamic cp: {planned} "
        "· groups of 2 ranks for a row"
    )
    (first,) = pool.run(describes, 2, recipe_of(model_dir, None, policy=cells), model_dir)[0]
    assert first.endswith(f" · groups of 2 ranks for a row · {planned}")
