"""Trackers: real event files, and a clear word when a package is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet.errors import UserError
from quintet.observe.trackers import make_trackers
from quintet.recipe.schema import Recipe, Run


def recipe(tracker: str) -> Recipe:
    return Recipe(run=Run(trackers=[tracker]))


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = make_trackers(recipe("tensorboard"), tmp_path)
    tracker.log("rl", 3, {"reward/mean": 0.5, "kl/reference": None})
    tracker.log("sft", 1, {"loss": 2.0})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "sft/loss"}
    (event,) = events.Scalars("reward/mean")
    assert (event.step, event.value) == (3, 0.5)


def test_wandb_runs_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tracker,) = make_trackers(recipe("wandb"), tmp_path)
    tracker.log("sft", 1, {"loss": 2.0})
    tracker.log("rl", 1, {"reward/mean": 0.5, "kl/reference": None})
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service is a process, which may be killed; every call then raises."""

    class Dead:
        def define_metric(self, *told: str, **options: str) -> None: ...

        def log(self, line: dict[str, float]) -> None:
            raise ConnectionResetError("Connection lost")

        finish = log

    options = {"init": lambda **options: Dead(), "Settings": dict, "errors": SimpleNamespace(Error=OSError)}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(**options))
    said: list[str] = []
    (tracker,) = make_trackers(recipe("wandb"), tmp_path, said.append)
    for step in (1, 2):
        tracker.log("rl", step, {"loss": 2.0})
    tracker.close()
    assert said == [
        "warning: W&B failed (ConnectionResetError: Connection lost): what is new is in metrics.jsonl alone"
    ]


@pytest.mark.parametrize("known", [True, False], ids=["its own error", "pydantic's"])
def test_what_wandb_refuses_of_the_environment_is_one_message(tmp_path, monkeypatch, known) -> None:
    class Known(Exception): ...

    def init(**options: object) -> None:
        raise (Known if known else ValueError)("Invalid project name 'a/b'")

    fake = SimpleNamespace(init=init, Settings=dict, errors=SimpleNamespace(Error=Known))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match=r"correct WANDB_… .* or remove wandb: Invalid project name 'a/b'"):
        make_trackers(recipe("wandb"), tmp_path)
