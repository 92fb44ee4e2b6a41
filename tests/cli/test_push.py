"""`quintet push`: what goes to the hub, and what its card says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from quintet.cli import main
from quintet.recipe.loader import dump_resolved
from quintet.recipe.schema import Recipe
from tests.hub import Hub, serving
from tests.models.directory import write_model

SUMMARY = {
    "steps": 12,
    "sft_steps": 30,
    "eval_is": "accuracy",
    "eval_before": 0.25,
    "eval_after": 0.5,
    "greedy_before": None,
    "evaluation": {},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as a finished run with adapters leaves it."""
    run = tmp_path / "math-20261121-090000"
    write_model(run / "checkpoint")
    (run / "adapter").mkdir()
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"adapters")
    recipe = Recipe.model_validate(
        {
            "run": {"name": "math"},
            "cluster": {"address": "head.internal:6379"},
            "model": {"path": "some-one/Tiny", "revision": "abc"},
            "lora": {},
            "data": {"train_path": "/home/me/secret/train.jsonl", "eval_path": "/home/me/secret/test.jsonl"},
            "reward": {"function": "/home/me/secret/mine.py:reward"},
        }
    )
    (run / "recipe.yaml").write_text(dump_resolved(recipe))
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "environment.json").write_text(json.dumps({"versions": {"quintet-rl": "9.8.7", "torch": "2"}}))
    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in takes files as LFS does
        yield hub


def test_a_dry_run_writes_the_card_and_uploads_nothing(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "me/math", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for name in ("README.md", "config.json", "model.safetensors", "adapter/adapter_model.safetensors"):
        assert f"\n  {name}  " in said
    assert hub.asked == []
    card = (run / "model_card.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "tags": ["quintet", "reinforcement-learning", "grpo"],
        "base_model": "some-one/Tiny",
    }
    assert (
        "some-one/Tiny at revision abc, trained with quintet (quintet-rl): 30 steps of SFT, then 12 steps of grpo, low-rank"
        in text
    )
    assert "| accuracy, sampled | 25.0% | 50.0% | +25.0 |" in text
    assert "of test.jsonl. Reward: mine.py:reward." in text
    assert "quintet-rl 9.8.7, torch 2." in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["data"] == {"train_path": "train.jsonl", "eval_path": "test.jsonl"}
    for place in ("/home", "secret", "head.internal", str(run)):
        assert place not in card


def test_the_page_shows_what_comes_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hub.md").read_text()
    (block,) = re.findall(r"```console\n\$ quintet (.*?)```", page, re.DOTALL)
    command, _, shown = block.partition("\n")
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / run.name)
    monkeypatch.chdir(run.parent)
    assert main(command.split()) == 0
    said = re.sub(r"  [\d,]+ bytes, .*", "  …", capsys.readouterr().out)
    assert said == shown


def test_model_adapter_and_card_are_uploaded(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["me/math"] = {}
    assert main(["push", str(run), "me/math"]) == 0, capsys.readouterr().err
    assert "4 files are at " in capsys.readouterr().out
    sent = hub.repos["me/math"]
    assert sent["model.safetensors"] == (run / "checkpoint" / "model.safetensors").read_bytes()
    assert sent["adapter/adapter_model.safetensors"] == b"adapters"
    assert sent["README.md"] == (run / "model_card.md").read_bytes()
    assert set(sent) == {"README.md", "config.json", "model.safetensors", "adapter/adapter_model.safetensors"}
    assert len(hub.commits) == 1
    assert "visibility" not in hub.created[0]


def test_private_is_private_or_an_error(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["me/math"] = {}
    assert main(["push", str(run), "me/math", "--private"]) == 2
    assert "is there already and public" in capsys.readouterr().err
    assert hub.commits == []
    hub.private = True
    assert main(["push", str(run), "me/math", "--private"]) == 0
    assert hub.created[1]["visibility"] == "private"


def test_what_cannot_be_pushed(
    run: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path), "me/math"]) == 2
    assert "is no run directory" in capsys.readouterr().err
    for options in ([], ["--dry-run"]):
        assert main(["push", str(run), "not a name", *options]) == 2
        assert "error: not a name can be no model on the hub: Repo id must " in capsys.readouterr().err
    assert not (run / "model_card.md").exists()
    assert hub.asked == []
    (run / "checkpoint" / "config.json").unlink()
    assert main(["push", str(run), "me/math"]) == 2
    assert "has no trained model in checkpoint/" in capsys.readouterr().err


def test_a_hub_that_refuses(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.answer = lambda method, path, body: (401, {}, b'{"error": "Invalid token"}')  # type: ignore[method-assign]
    assert main(["push", str(run), "me/math"]) == 2
    assert "hf auth login, or HF_TOKEN" in capsys.readouterr().err
