"""Which weights of a run's past are still there, and what is said where nothing can be replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.controller.messages import TrainedTokens
from quintet.controller.replay import pack, replay_file, replay_of
from quintet.diagnose.find_weights import Weights, find_weights
from quintet.diagnose.mismatch import _recipe_of, diagnose
from quintet.errors import UserError
from quintet.recipe.loader import dump_resolved
from quintet.recipe.schema import BuildModel, Data, Model, Recipe, Reward, Sft
from quintet.rollout.base import Sampling
from quintet.runs.checkpoints import Checkpoints
from tests.controller.test_replay import samples
from tests.runs.test_checkpoints import save

RECIPE = Recipe(
    model=Model(build=BuildModel()), data=Data(task="addition"), reward=Reward(function="addition")
)


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").touch()
    return path


def test_a_rollout_that_dies_is_not_started_anew() -> None:
    """What it was asked to score would be missing; the run's own recipe stays as it is."""
    run = RECIPE.model_copy(deep=True)
    run.rollout.restart = True
    weights = Weights(0, Path("model"), Path("model"))
    assert not _recipe_of(run, weights).rollout.restart
    assert run.rollout.restart


def test_weights_are_found_where_they_are(tmp_path: Path) -> None:
    model = directory(tmp_path / "model")
    assert find_weights(tmp_path, RECIPE, 0) == Weights(0, model, model)
    assert find_weights(tmp_path, RECIPE, 4) is None
    saved = save(Checkpoints(tmp_path / "checkpoints"), "rl", 4)
    export = directory(tmp_path / "hf" / "step-000004")
    assert find_weights(tmp_path, RECIPE, 4) == Weights(4, saved, model, saved / "policy")
    (saved / "manifest.json").unlink()
    assert find_weights(tmp_path, RECIPE, 4) == Weights(4, export, export, merged=True)
    last = directory(tmp_path / "checkpoint")
    lines = [{"stage": "sft", "step": 9, "loss": 1}, {"stage": "rl", "step": 6, "loss": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find_weights(tmp_path, RECIPE, 6) == Weights(6, last, last, merged=True)
    assert find_weights(tmp_path, RECIPE, 5) is None
    warmed = RECIPE.model_copy(update={"sft": Sft()})
    assert find_weights(tmp_path, warmed, 0) is None
    after = save(Checkpoints(tmp_path / "checkpoints"), "sft", 9)
    assert find_weights(tmp_path, warmed, 0) == Weights(0, after, model, after / "policy")


def test_what_cannot_be_replayed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(says: str, step: int | None = None) -> None:
        with pytest.raises(UserError, match=says):
            diagnose(tmp_path, step, lambda text: None)

    fails("is no run directory")
    (tmp_path / "recipe.yaml").write_text(dump_resolved(RECIPE))
    fails("keeps no samples for replay")
    (tmp_path / "replay").mkdir()
    for step in (3, 7):
        (tmp_path / "replay" / f"step-{step:06d}.safetensors").touch()
    fails("--step 4: .*/replay has 7, 3", 4)
    fails("step 3 was generated with are not there any more.* checkpoint.every_steps", 3)
    fails("steps 7, 3 were generated with")
    directory(tmp_path / "hf" / "step-000002")
    fails("step-000003.safetensors is no replay file")
    directory(tmp_path / "hf" / "step-000006")
    fails("step-000007.safetensors is no replay file")
    fails("step-000003.safetensors is no replay file", 3)
    kept = replay_of(3, Sampling(), samples(False), {0: TrainedTokens([5, 6, 8], 2, [-0.25], [-0.375])})
    replay_file(tmp_path, 3).write_bytes(pack(kept))
    said: list[str] = []
    with pytest.raises(UserError, match=r"config\.json"):  # what these weights lack; the samples are there
        diagnose(tmp_path, None, said.append)
    assert re.search(r"step-000007.safetensors is no replay file: .*; an earlier step is looked for", said[0])
    assert said[1].startswith("step 3: 1 samples, 3 tokens, generated with ")
    assert main(["diagnose", "mismatch", str(tmp_path), "--step", "0"]) == 2
    assert "steps count from 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["diagnose", "speed", str(tmp_path)])
