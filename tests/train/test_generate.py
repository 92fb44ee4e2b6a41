"""`generate` and `eval` on one rank: in the command's own process, quickly, and to the same samples as in Ray's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cluster.cluster import Cluster
from quintet.data.prompts import alphabet_of
from quintet.data.tokenizer import build_char_tokenizer
from quintet.recipe.loader import load_recipe
from quintet.train import generate, session
from tests.patience import BUSY

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes" / "laptop_demo.yaml")
PROMPTS = ["123+456=", "7+8=", "900+1="]
WITHIN_S = 8.0
"""What two quiet cores take at most from the command to its answer. Counted is the processor's time, nearly all of it on one core,
which others on the machine lengthen less."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, as it is made."""
    from quintet.engine.weights.random_model import write_fresh_model

    directory = tmp_path_factory.mktemp("model")
    recipe = load_recipe(DEMO)
    tokenizer = build_char_tokenizer(alphabet_of(recipe.data), directory)
    ids = {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    assert recipe.model.build is not None
    write_fresh_model(recipe.model.build, directory, vocab_size=len(tokenizer), seed=1, **ids)
    return directory


def spent() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("command", ["generate", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_command_answers_soon_and_without_ray(command: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('ray is not needed')\n")
    threads = "1" if command == "generate" else "2"
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
    more = ["--prompt", PROMPTS[0]] if command == "generate" else ["train.eval_prompts=64"]
    began = spent()
    done = subprocess.run(
        [sys.executable, "-m", "quintet", command, DEMO, "model.build=null", f"model.path={model}", *more],
        capture_output=True, text=True, check=False, env=env, cwd=tmp_path,
    )  # fmt: skip
    took = spent() - began
    assert done.returncode == 0, done.stderr
    assert took < WITHIN_S * BUSY
    assert "one rank, in this process" in done.stderr  # the recipe has two
    assert ("2 threads a rank (OMP_NUM_THREADS" in done.stderr) == (threads == "2")
    if command == "generate":
        assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == PROMPTS[:1] * 8
    else:
        assert done.stdout.startswith("accuracy ")


def test_what_is_much_or_laid_out_over_ranks_has_processes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_little(command: session.Command, *overrides: str, prompts: int = 1) -> bool:
        recipe = load_recipe(DEMO, ["model.build=null", f"model.path={model}", *overrides], command=command)
        inputs = session.prepare(recipe, command, model, texts=PROMPTS[:1] * prompts)
        return session._is_little(recipe, command, inputs)

    assert is_little("generate")
    assert is_little("generate", prompts=400)  # 400 · 8 · 20 tokens
    assert not is_little("generate", prompts=410)
    assert is_little("generate", "cluster.ranks=1", prompts=410)
    assert not is_little("generate", "layout.tp=2", "rollout.layout=null")
    assert not is_little("generate", "rollout.own_processes=true")
    assert not is_little("train")
    assert is_little("eval")
    assert not is_little("eval", "train.eval_samples_per_prompt=16")
    monkeypatch.setattr(
        "torch.cuda.device_count", lambda: 1
    )  # this process sees it, whatever the ranks compute on
    assert not is_little("generate", "cluster.device=cpu")


@pytest.mark.slow
def test_one_rank_says_the_same_here_and_in_rays_process(
    model: Path, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["model.build=null", f"model.path={model}", "cluster.ranks=1"]
    recipe = load_recipe(DEMO, overrides, command="generate")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = generate.generate(recipe, PROMPTS)
    assert here == generate.generate(recipe, PROMPTS)  # again in the same process
    monkeypatch.setattr(session, "_is_little", lambda *asked: False)
    assert here == generate.generate(recipe, PROMPTS)
