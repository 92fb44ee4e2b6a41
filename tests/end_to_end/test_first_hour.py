"""The first hour as README and guides tell it: an own task, reward and held-out set, LoRA, a look at the run, going on, other commands."""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

REWARD = '''
def reward(prompt, response, answer, row):
    """Half of it for the right length, all for the word turned round; long words count double."""
    correct = response == answer
    score = float(correct) or 0.5 * (len(response) == len(answer))
    return {"reward": score * (2 if row["length"] == "long" else 1), "correct": correct, "letters": len(response)}
'''
RECIPE = """
run: {name: backwards}
cluster: {ranks: 2, device: cpu}
model:
  build: {layers: 2, hidden_size: 64, ffn_hidden_size: 128, heads: 2, kv_heads: 1, head_dim: 32, tied_embeddings: true}
data: {train_path: words.jsonl, eval_path: held_out.csv, eval_prompt_key: word, eval_answer_key: backwards, chat: false}
reward: {function: "rewards.py:reward"}
sft: {steps: 40, samples_per_step: 64, optimizer: {lr: 3.0e-3}}
rollout: {samples_per_prompt: 4, max_response_tokens: 8}
optimizer: {lr: 1.0e-3}
checkpoint: {every_steps: 2}
train: {steps: 4, prompts_per_step: 16, eval_prompts: 16, eval_samples_per_prompt: 4}
"""


def quintet(directory: Path, *arguments: str) -> str:
    """Run a command there and return all that it says."""
    done = subprocess.run(
        [sys.executable, "-m", "quintet", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def words(count: int, seed: int) -> list[tuple[str, str]]:
    """Words of two to five letters, and whether they are long."""
    rng = random.Random(seed)
    made = ["".join(rng.choices("abcde", k=rng.randint(2, 5))) for _ in range(count)]
    return [(word, "long" if len(word) > 3 else "short") for word in made]


@pytest.mark.slow
def test_an_own_task_from_its_files_to_its_report(tmp_path: Path) -> None:
    with (tmp_path / "words.jsonl").open("w") as file:
        for word, length in words(400, 0):
            row = {"prompt": f"{word}=", "answer": word[::-1], "response": word[::-1], "length": length}
            file.write(json.dumps(row) + "\n")
    with (tmp_path / "held_out.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["word", "backwards", "length"])
        rows.writerows([f"{word}=", word[::-1], length] for word, length in words(40, 1))
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    assert "is a sound recipe" in quintet(tmp_path, "check", "recipe.yaml")
    told = quintet(tmp_path, "train", "recipe.yaml")
    assert "letters" in told
    assert "before training: '" in told
    (run,) = (tmp_path / "runs").iterdir()

    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["eval_is"]) == ("finished", 4, "accuracy")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {one["kind"] for one in samples} >= {"train", "eval"}
    assert all(one["correct"] == (one["response"] == one["answer"]) for one in samples)
    assert any(one["reward"] > 0 and not one["correct"] for one in samples), (
        "partial credit is no correct answer"
    )
    report = (run / "report.html").read_text()
    assert "letters" in report

    going_on = quintet(tmp_path, "train", str(run / "recipe.yaml"), f"resume={run}", "train.steps=5")
    assert json.loads((run / "summary.json").read_text())["steps"] == 5, going_on
    assert "before training: '" not in going_on
    (run / "report.html").unlink()
    quintet(tmp_path, "report", str(run))
    assert (run / "report.html").is_file()

    trained = f"model.path={run / 'checkpoint'}"
    assert re.search(
        r"\w", quintet(tmp_path, "generate", "recipe.yaml", "model.build=null", trained, "--prompt", "abc=")
    )
    assert "accuracy" in quintet(tmp_path, "eval", "recipe.yaml", "model.build=null", trained)
    assert "adapter" in quintet(
        tmp_path,
        "train",
        "recipe.yaml",
        "model.build=null",
        trained,
        "sft=null",
        "train.steps=1",
        "lora={rank: 4}",
    )


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so(tmp_path: Path) -> None:
    """As the guides have it, with a reward that is 0 whatever is said."""
    (tmp_path / "words.jsonl").write_text(
        '{"prompt": "ab=", "answer": "ba"}\n{"prompt": "cd=", "answer": "dc"}\n'
    )
    (tmp_path / "rewards.py").write_text("def reward(prompt, response):\n    return 0\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    alone = ["sft=null", "data.eval_path=null", "train.eval_prompts=0", "cluster.ranks=1", "train.steps=2"]
    told = quintet(tmp_path, "train", "recipe.yaml", *alone)
    (run,) = (tmp_path / "runs").iterdir()
    for text in (told, (run / "report.html").read_text(), (run / "summary.json").read_text()):
        assert "Nothing was learnt from rewards" in text, told
