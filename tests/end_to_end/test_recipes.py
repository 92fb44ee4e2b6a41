"""The recipes that come with quintet do what they say. Slow: each is a whole run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(directory: Path, *arguments: str) -> dict:
    """Run `quintet train` and return its summary."""
    subprocess.run(
        [sys.executable, "-m", "quintet", "train", *arguments, f"run.dir={directory}"], cwd=ROOT, check=True
    )
    (run,) = directory.iterdir()
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_gsm8k_on_a_laptop(tmp_path):
    """Two full steps and an evaluation on rows of GSM8K's form."""
    rng = random.Random(0)
    for name, count in (("train", 40), ("test", 80)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                a, b = rng.randrange(2, 1500), rng.randrange(2, 1500)
                answer = f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b:,}"
                row = {
                    "question": f"Ann has {a} apples and gets {b} more. How many are there?",
                    "answer": answer,
                }
                file.write(json.dumps(row) + "\n")
    summary = train(
        tmp_path / "runs",
        "recipes/laptop_gsm8k.yaml",
        f"data.train_path={tmp_path / 'train.jsonl'}",
        f"data.eval_path={tmp_path / 'test.jsonl'}",
        "train.eval_prompts=16",
    )
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert summary["eval_after"] is not None


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path, seed):
    """Held-out accuracy rises by 25 points, greedy does not fall, and answers were well-formed before RL."""
    summary = train(tmp_path / "runs", "recipes/laptop_demo.yaml", f"run.seed={seed}")
    assert summary["eval_after"] - summary["eval_before"] >= 0.25
    assert summary["greedy_after"] >= summary["greedy_before"]
    assert summary["well_formed_before"] >= 0.95


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_other_algorithms_learn(tmp_path, algorithm, seed):
    """Held-out accuracy rises by 15 points on the demo's task."""
    summary = train(tmp_path / "runs", f"recipes/laptop_{algorithm}.yaml", f"run.seed={seed}")
    assert summary["eval_after"] - summary["eval_before"] >= 0.15
