"""A run directory that a resumed run goes on in."""

from __future__ import annotations

import json

import pytest

from quintet.errors import UserError
from quintet.observe.observer import Observer
from quintet.runs import directory as run_directory
from quintet.runs.ledger import read_jsonl, read_metrics


def steps(observer: Observer, stage: str, numbers: range, mark: str) -> None:
    for step in numbers:
        with observer.phase("train"):
            pass
        observer.step(step, {"loss": 1.0 / step, "tokens_trained": 10}, stage=stage, show=False)
        if stage == "rl":
            observer.samples(step, [{"prompt": "a\u2028b", "response": mark}])
            observer.replay(step, mark.encode())


@pytest.fixture
def ended(observe):
    """A run of 2 steps of SFT and 4 of RL, with an evaluation after the first and the third."""
    observer, _ = observe()
    with observer:
        steps(observer, "sft", range(1, 3), "")
        observer.evaluation(0, {"accuracy": 0.25})
        steps(observer, "rl", range(1, 4), "first")
        observer.evaluation(3, {"accuracy": 0.5})
        steps(observer, "rl", range(4, 5), "first")
    return observer


@pytest.mark.parametrize(("stage", "step", "kept"), [("rl", 2, 5), ("rl", 3, 7), ("sft", 1, 1), ("rl", 4, 8)])
def test_what_came_later_is_cut_off_and_kept_aside(recipe, ended, stage, step, kept):
    before = ended.directory.metrics.read_text().splitlines()
    shown = ended.directory.samples.read_text().split("\n")[:-1]
    observer = Observer(recipe, resume=ended.directory.path)
    aside = observer.go_on(stage, step, 100.0, {"train": 60.0, "checkpoint": 5.0})
    assert aside == ended.directory.path / "set_aside" / "1"
    assert ended.directory.metrics.read_text().splitlines() == before[:kept]
    cut = (aside / "metrics.jsonl").read_text().splitlines() if kept < len(before) else []
    assert cut == before[kept:]
    few = step if stage == "rl" else 0
    assert [one["step"] for one in read_jsonl(ended.directory.samples)] == list(range(1, few + 1))
    if few < len(shown):
        assert (aside / "samples.jsonl").read_text().split("\n")[:-1] == shown[few:]
    left = [f"step-{number:06d}.safetensors" for number in range(1, len(shown) + 1)]
    assert sorted(p.name for p in ended.directory.replay.iterdir()) == left[:few]
    assert sorted(p.name for p in (aside / "replay").glob("*")) == left[few:]
    assert json.loads((aside / "summary.json").read_text())["status"] == "finished"
    with observer:
        pass


def test_the_summary_covers_the_whole_run(recipe, ended, observe):
    recipe.run.samples_logged_per_step = 7
    observer = Observer(recipe, resume=ended.directory.path)
    with observer:
        observer.go_on("rl", 2, 100.0, {"train": 60.0, "start": 5.0})
        steps(observer, "rl", range(3, 7), "second")
        observer.evaluation(6, {"accuracy": 0.75})
    summary = json.loads(observer.directory.summary.read_text())
    wanted = {"steps": 6, "sft_steps": 2, "tokens_trained": 60, "eval_before": 0.25, "eval_after": 0.75}
    assert {key: summary[key] for key in wanted} == wanted
    assert 100 < summary["seconds_total"] < 160
    assert 60 <= summary["seconds_by_phase"]["train"] < 61
    assert summary["seconds_by_phase"]["start"] == 5
    assert len(summary["starts"]) == 2
    assert [line["step"] for line in read_metrics(observer.directory.metrics) if "loss" in line][2:] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    assert [one["response"] for one in read_jsonl(observer.directory.samples)] == ["first"] * 2 + [
        "second"
    ] * 4
    assert "samples_logged_per_step: 7" in observer.directory.recipe.read_text()
    assert "samples_logged_per_step: 4" in (observer.directory.path / "set_aside/1/recipe.yaml").read_text()


def test_what_was_made_later_is_set_aside_under_its_own_name(recipe, ended):
    later = ended.directory.checkpoints / "step-000009"
    later.mkdir(parents=True)
    (later / "file").touch()
    with Observer(recipe, resume=ended.directory.path) as observer:
        aside = observer.go_on("rl", 2, 0.0, {}, [later])
    assert not later.exists()
    assert (aside / "checkpoints" / "step-000009" / "file").exists()


def test_a_half_written_last_line_does_not_stay(recipe, ended):
    with ended.directory.metrics.open("a") as file:
        file.write('{"stage": "rl", "step": 4, "lo')
    observer = Observer(recipe, resume=ended.directory.path)
    with observer:
        aside = observer.go_on("rl", 4, 0.0, {})
        steps(observer, "rl", range(5, 6), "second")
    assert read_metrics(observer.directory.metrics)[-1]["step"] == 5
    assert (aside / "metrics.jsonl").read_text().endswith('"lo')


def test_a_start_that_fails_before_it_goes_on_leaves_everything_as_it_was(recipe, ended):
    files = [ended.directory.metrics, ended.directory.summary, ended.directory.recipe, ended.directory.report]
    before = [one.read_bytes() for one in files]
    with pytest.raises(RuntimeError), Observer(recipe, resume=ended.directory.path):
        raise RuntimeError("no GPU")
    assert [one.read_bytes() for one in files] == before
    assert not (ended.directory.path / "set_aside").exists()


def test_two_at_once_are_refused_and_one_after_the_other_are_not(recipe, ended):
    with Observer(recipe, resume=ended.directory.path) as observer:
        observer.go_on("rl", 4, 0.0, {})
        with pytest.raises(UserError, match="is in use by process"):
            Observer(recipe, resume=ended.directory.path)
    with Observer(recipe, resume=ended.directory.path) as observer:
        assert observer.go_on("rl", 4, 0.0, {}).name == "2"


def test_tensorboard_shows_only_what_holds(recipe, observe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe.run.trackers = ["tensorboard"]
    first, _ = observe()
    with first:
        steps(first, "sft", range(1, 6), "")
        steps(first, "rl", range(1, 5), "first")
    with Observer(recipe, resume=first.directory.path) as second:
        second.go_on("rl", 2, 0.0, {})
        second.step(3, {"loss": 7.0}, show=False)
    events = EventAccumulator(str(second.directory.path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert len(events.Scalars("sft/loss")) == 5


def test_samples_for_replay_stay_while_their_weights_do(observe, monkeypatch):
    monkeypatch.setattr(run_directory, "REPLAYS", 2)
    observer, _ = observe()
    with observer:
        directory = observer.directory
        for step in range(1, 7):
            directory.write_replay(step, b"")
            if step == 2:
                (directory.checkpoints / "step-000002").mkdir(parents=True)
        assert sorted(p.stem for p in directory.replay.iterdir()) == [
            "step-000001", "step-000003", "step-000005", "step-000006",
        ]  # fmt: skip
        (directory.checkpoints / "step-000002").rmdir()
        directory.write_replay(7, b"")
        assert sorted(p.stem[-1] for p in directory.replay.iterdir()) == ["1", "6", "7"]
        directory.replay.rename(directory.path / "elsewhere")
        directory.replay.write_text("")
        with pytest.raises(UserError, match=r"replay/step-000008\.safetensors cannot be written"):
            observer.replay(8, b"")
