"""Parameters that come after the step are there for whoever reads them, however late they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from quintet.errors import UserError
from quintet.recipe import schema
from quintet.rollout.base import Request, Sampling
from tests.oracle.cases import GATHER, Case
from tests.oracle.gather_mistakes import gather_late
from tests.oracle.lora import written
from tests.oracle.ranks import Training, evaluate, pieces

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, where there are some")
CASE = Case("qwen3", dp=2, **GATHER)
Way = Callable[[Training, Path, Path], list[Tensor]]


def _live(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]


def _shards(training: Training, *_: Path) -> list[Tensor]:
    return [data for _, _, data in pieces(training.engine, "param")]


def _saved(training: Training, path: Path, directory: Path) -> list[Tensor]:
    training.engine.save(directory)
    other = Training(replace(training.case, overlap_param_gather=False), path)
    other.engine.load(directory)
    return _shards(other)


def _evaluated(training: Training, *_: Path) -> list[Tensor]:
    return list(evaluate(training.engine, training.case).outputs or ())


def _offloaded(training: Training, *_: Path) -> list[Tensor]:
    training.engine.offload(params=1.0)
    training.engine.reload()
    return _live(training.engine)


def _started_anew(training: Training, *_: Path) -> list[Tensor]:
    training.engine.start_optimizer(training.case.optimizer_recipe, 2)
    training.step(1)
    return _shards(training)


def _loaded_anew(training: Training, path: Path, _: Path) -> list[Tensor]:
    training.engine.load_hf(path)
    return _live(training.engine)


def _resumed(training: Training, _: Path, directory: Path) -> list[Tensor]:
    training.engine.save(directory)
    training.step(1)
    training.engine.load(directory)
    return _live(training.engine)


def _trained_on(training: Training, *_: Path) -> list[Tensor]:
    training.step(1)
    return _shards(training)


def _kept(training: Training, *_: Path) -> list[Tensor]:
    shards = training.engine.shard_map()
    training.step(1)
    training.engine.wait_for_parameters()
    return [one.read().clone() for one in shards]


def _of_a_rollout(
    training: Training, path: Path, _: Path, layout: schema.RolloutLayout | None = None
) -> list[Tensor]:
    from quintet.controller.in_process_rollout import InProcessRollout
    from quintet.engine.weights.shards import shard_map

    recipe = training.case.recipe(path)
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"layout": layout})})
    rollout = InProcessRollout(training.engine, recipe, str, lambda done: None)
    training.step(1)
    rollout.update_weights()
    return [one.read().clone() for one in shard_map([rollout.model], training.engine.shape, rollout.mesh)]


def _generated(training: Training, path: Path, _: Path) -> list[Tensor]:
    """By a rollout on the engine's weights, which nobody tells of new ones."""
    from quintet.controller.in_process_rollout import InProcessRollout

    rollout = InProcessRollout(training.engine, training.case.recipe(path), str, lambda done: None)
    training.step(1)
    (told,) = rollout.stream([Request([3, 5, 7])], Sampling(temperature=0.0, max_response_tokens=4))
    return [torch.tensor(sample.policy_logprobs) for sample in told[1]]


WAYS: dict[str, Way] = {
    "shards": _shards,
    "saved": _saved,
    "evaluated": _evaluated,
    "offloaded": _offloaded,
    "started anew": _started_anew,
    "loaded anew": _loaded_anew,
    "resumed": _resumed,
    "trained on": _trained_on,
    "kept": _kept,
    "generated": _generated,
    "a rollout on them": _of_a_rollout,
    "a rollout of its own": partial(_of_a_rollout, layout=schema.RolloutLayout(tp=2)),
}


def found(case: Case, path: Path, way: str, directory: Path, waits: bool = True) -> list[Tensor]:
    training = Training(case, path)
    gather_late(training.engine._gather._buckets)
    training.step(0)
    if waits:
        return WAYS[way](training, path, directory)
    with mock.patch("quintet.engine.engine.Engine.wait_for_parameters"):
        return WAYS[way](training, path, directory)


@pytest.mark.parametrize("way", WAYS)
def test_who_reads_them_waits(pool, tmp_path, way):
    path = written(CASE, tmp_path)
    plain = replace(CASE, overlap_param_gather=False)
    wanted = pool.run(found, 2, plain, path, way, tmp_path / "plain")
    late = pool.run(found, 2, CASE, path, way, tmp_path / "late")
    rounding = 1e-3 if torch.cuda.is_available() else 0.0
    for mine, theirs in zip(wanted, late, strict=True):
        assert len(mine) == len(theirs) > 0
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(other, one, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "way",
    ["shards", "saved", "kept", "a rollout on them", "a rollout of its own"]
    + ["generated"] * (not torch.cuda.is_available()),
)
def test_who_does_not_wait_is_seen(pool, tmp_path, way):
    path = written(CASE, tmp_path)
    wanted, stale = (
        pool.run(found, 2, CASE, path, way, tmp_path / str(waits), waits)[0] for waits in (True, False)
    )
    assert not all(torch.equal(one, other) for one, other in zip(wanted, stale, strict=True))


def diverged(path: Path) -> list[Tensor]:
    training = Training(CASE, path)
    training.step(0)
    next(training.engine.model.parameters()).main_grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        training.engine.optimizer_step()
    training.engine.wait_for_parameters()
    return _live(training.engine)


def test_ranks_are_alike_after_a_step_that_fails(pool, tmp_path):
    one, other = pool.run(diverged, 2, written(CASE, tmp_path))
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True)


def exchanges_apart(path: Path) -> bool:
    training = Training(replace(CASE, family="qwen3_moe", ep=2), path)
    groups = training.engine.mesh.groups
    gathers = {buffer.data_parallel_group for chunk in training.engine._wrapped for buffer in chunk.buffers}
    return groups.ep is groups.dp_cp and groups.ep not in gathers


def test_gathers_do_not_stand_before_the_exchanges_of_layers(pool, tmp_path):
    assert all(pool.run(exchanges_apart, 2, written(Case("qwen3_moe"), tmp_path)))


def without_the_optimizer_that_is_cut(path: Path) -> None:
    with pytest.raises(UserError, match="needs engine"):
        Training(replace(CASE, distributed_optimizer=False), path)


def test_without_the_distributed_optimizer_it_is_refused(pool, tmp_path):
    pool.run(without_the_optimizer_that_is_cut, 2, written(CASE, tmp_path))
