"""Which run goes on, and what the user is told when none can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.errors import DamagedCheckpoint, UserError
from quintet.recipe.schema import BuildModel, Data, Model, Recipe, Run, Sft, Train
from quintet.runs.checkpoints import MANIFEST, Checkpoints
from quintet.runs.lock import LOCK, RunLock
from quintet.runs.resume import Resume, check_again, find_resume, nothing_left, past_damage
from quintet.train.inputs import Inputs, _check_reference
from tests.runs.test_checkpoints import save


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(
        run=Run(name="math", dir=tmp_path / "runs"),
        model=Model(build=BuildModel()),
        data=Data(task="addition"),
        train=Train(steps=10),
        resume="auto",
    )


def a_run(recipe: Recipe, name: str, *steps: int, status: str = "failed", stage: str = "rl", **other) -> Path:
    """A run directory as a run leaves it, with checkpoints of these steps."""
    run = recipe.run.dir / name
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"status": status}))
    for step in steps:
        save(Checkpoints(run / "checkpoints"), stage, step, recipe=recipe.model_dump(mode="json"), **other)
    return run


def test_auto_takes_the_newest_run_with_a_whole_checkpoint(recipe):
    a_run(recipe, "math-20260101-100000", 9)
    newest = a_run(recipe, "math-20260102-100000-2", 3, 4)
    a_run(recipe, "math-20260102-100000", 5)
    a_run(recipe, "other-20260103-100000", 6)
    a_run(recipe, "math-more-20260103-100000", 6)
    (newest / "checkpoints/step-000004" / MANIFEST).unlink()
    a_run(recipe, "math-20260104-100000")
    found = find_resume(recipe, "train")
    assert found.run == newest
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.step == 3
    assert [one.partition(" ")[0] for one in found.notes] == ["resume=auto:", "passed"]
    assert "math-20260104-100000 has no whole checkpoint" in found.notes[0]
    assert "step-000004: no manifest.json: its save was not finished" in found.notes[1]


def test_what_turned_out_to_be_damaged_is_passed_over_until_nothing_is_left(recipe):
    older = a_run(recipe, "math-20260101-100000", 9)
    run = a_run(recipe, "math-20260102-100000", 3, 4)
    damaged = {run / "checkpoints/step-000004": "policy/__0_0.distcp: w is damaged"}
    found = find_resume(recipe, "train", damaged)
    assert found.checkpoint.manifest.step == 3
    assert found.notes == [f"passed over in {run}: step-000004: policy/__0_0.distcp: w is damaged"]
    check_again(found, recipe, "train", damaged)
    (run / "checkpoints/step-000003/policy/0.distcp").write_bytes(b"")
    with pytest.raises(UserError) as error:
        find_resume(recipe, "train", damaged)
    for part in (
        f"no checkpoint of {run} is whole (step-000004: policy/__0_0",
        "; step-000003: policy/0.distcp has 0",
    ):
        assert part in str(error.value)
    assert str(older) not in str(error.value), (
        "steps that were done are not given up for an older run in silence"
    )
    recipe.resume = str(run)
    with pytest.raises(UserError, match=r"no whole checkpoint \(step-000004: .*; step-000003: "):
        find_resume(recipe, "train", damaged)


def test_a_run_is_started_again_for_each_checkpoint_that_is_damaged():
    seen, end = [], Path("run")

    def run(damaged: dict[Path, str]) -> Path:
        seen.append(dict(damaged))
        if len(damaged) < 2:
            raise DamagedCheckpoint("why", Path(f"step-{len(damaged)}"))
        return end

    assert past_damage(run) == end
    assert seen == [{}, {Path("step-0"): "why"}, {Path("step-0"): "why", Path("step-1"): "why"}]


def test_damage_of_no_checkpoint_that_has_another_before_it_ends_the_run():
    ends = iter([DamagedCheckpoint("why"), Path("run")])

    def run(damaged: dict[Path, str]) -> Path:
        if isinstance(end := next(ends), DamagedCheckpoint):
            raise end
        return end

    with pytest.raises(DamagedCheckpoint, match="why"):
        past_damage(run)


def test_auto_finds_runs_by_their_names_as_they_are(recipe):
    """Not as a pattern; and the tenth run of a second is newer than the ninth."""
    recipe.run.name = "math+kl"
    a_run(recipe, "math+kl-20260102-100000-9", 3)
    newest = a_run(recipe, "math+kl-20260102-100000-10", 4)
    a_run(recipe, "mathh+kl-20260103-100000", 5)
    assert find_resume(recipe, "train").run == newest


def test_auto_begins_anew_where_there_is_nothing(recipe):
    found = find_resume(recipe, "train")
    assert found.run is None
    assert found.notes == [f"resume=auto: no run of math in {recipe.run.dir} to go on with; a new one begins"]
    a_run(recipe, "math-20260104-100000")
    assert find_resume(recipe, "train").run is None


def test_auto_takes_a_run_that_has_begun_for_none_that_was_lost(recipe):
    a_run(recipe, "math-20260101-100000", 9)
    lock = RunLock(a_run(recipe, "math-20260102-100000") / LOCK)
    with pytest.raises(
        UserError, match=r"math-20260102-100000, the newest run, is in use by process \d+ .*no checkpoint yet"
    ):
        find_resume(recipe, "train")
    lock.release()
    assert find_resume(recipe, "train").checkpoint.manifest.step == 9


def test_a_choice_that_another_process_overtook_is_refused(recipe):
    run = a_run(recipe, "math-20260101-100000", 3)
    chosen = find_resume(recipe, "train")
    check_again(chosen, recipe, "train")
    check_again(Resume(), recipe, "train")
    save(Checkpoints(run / "checkpoints"), "rl", 4, recipe=recipe.model_dump(mode="json"))
    with pytest.raises(
        UserError, match=r"another process went on with .* while this one started; run the command again"
    ):
        check_again(chosen, recipe, "train")


def test_what_cannot_be_read_is_told(recipe, monkeypatch):
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    recipe.run.dir.mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read everything
    with pytest.raises(UserError, match=rf"resume=auto: {recipe.run.dir} cannot be read: Permission denied"):
        find_resume(recipe, "train")


def test_auto_does_not_take_a_finished_run_for_a_newer_one_that_was_lost(recipe):
    a_run(recipe, "math-20260101-100000", 10, status="finished")
    assert nothing_left(recipe, "train") is not None
    a_run(recipe, "math-20260102-100000")
    assert nothing_left(recipe, "train") is None
    assert find_resume(recipe, "train").run is None


def test_nothing_is_left_of_a_finished_run_until_it_is_lengthened(recipe):
    run = a_run(recipe, "math-20260101-100000", 8, 10, status="finished")
    assert nothing_left(recipe, "train") == run
    recipe.train.steps = 11
    assert nothing_left(recipe, "train") is None
    assert find_resume(recipe, "train").run == run


def test_a_run_killed_while_it_wrote_its_model_goes_on(recipe):
    a_run(recipe, "math-20260101-100000", 10, status="failed")
    assert nothing_left(recipe, "train") is None


def test_a_warm_up_is_not_the_run(recipe):
    recipe.sft = Sft(steps=100)
    a_run(recipe, "math-20260101-100000", 100, status="finished", stage="sft")
    assert nothing_left(recipe, "train") is None


def test_sft_that_stopped_at_its_loss_has_nothing_left(recipe):
    recipe.sft = Sft(steps=100, stop_at_loss=0.5)
    a_run(recipe, "math-20260101-100000", 7, status="finished", stage="sft", command="sft", loop={"smooth": 0.4})  # fmt: skip
    assert nothing_left(recipe, "sft") is not None
    recipe.sft.stop_at_loss = 0.3
    assert nothing_left(recipe, "sft") is None


def test_a_run_or_a_checkpoint_can_be_named(recipe, monkeypatch):
    run = a_run(recipe, "elsewhere", 3, 4)
    recipe.resume = str(run)
    assert find_resume(recipe, "train").checkpoint.manifest.step == 4
    recipe.resume = str(run / "checkpoints" / "step-000003")
    found = find_resume(recipe, "train")
    assert (found.checkpoint.manifest.step, found.run) == (3, run)
    recipe.resume = str(run / "checkpoints")
    assert find_resume(recipe, "train").run == run
    monkeypatch.chdir(run)
    recipe.resume = "."
    assert find_resume(recipe, "train").run == run


def wrong(recipe: Recipe, run: Path) -> dict[str, tuple[str, list[str]]]:
    """What is named → what is said."""
    (hf := run / "checkpoint").mkdir()
    (hf / "config.json").touch()
    (empty := run / "logs").mkdir()
    ((bare := run.parent / "bare") / "checkpoint").mkdir(parents=True)
    (damaged := run / "checkpoints" / "step-000004" / MANIFEST).write_text("{}")
    loose = run / "step-000003"
    (run / "checkpoints" / "step-000002").rename(loose)
    return {
        "a Hugging Face directory": (str(hf), ["is a Hugging Face directory", f"model.path={hf}"]),
        "an empty directory": (str(empty), ["has no whole checkpoint"]),
        "a run without checkpoints": (str(bare), [f"has no whole checkpoint. To start a new run from its weights set model.path={bare}/"]),
        "a damaged one": (str(damaged.parent), ["manifest.json is damaged", "The newest whole one is", "step-000003"]),
        "one out of its place": (str(loose), ["in its run directory", "put it back"]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [
        "a Hugging Face directory",
        "an empty directory",
        "a run without checkpoints",
        "a damaged one",
        "one out of its place",
    ],
)
def test_what_cannot_be_resumed_is_told_with_what_to_do(recipe, what):
    named, said = wrong(recipe, a_run(recipe, "math-20260101-100000", 2, 3, 4))[what]
    recipe.resume = named
    with pytest.raises(UserError) as error:
        find_resume(recipe, "train")
    for part in (f"resume={named}", *said):
        assert part in str(error.value)


def test_another_type_of_weights_is_refused_at_once_where_the_recipe_says_one(recipe):
    a_run(recipe, "math-20260101-100000", 3)
    recipe.model.dtype = "fp32"
    assert find_resume(recipe, "train").checkpoint is not None
    recipe.model.dtype = "bf16"
    with pytest.raises(
        UserError, match=r'\n  model\.dtype was "fp32" and is now "bf16"\nSet them back'
    ) as error:
        find_resume(recipe, "train")
    assert str(error.value).count("model.dtype") == 1


def test_another_recipe_is_refused_with_the_keys_that_differ(recipe):
    a_run(recipe, "math-20260101-100000", 3)
    recipe.optimizer.lr = 3e-6
    recipe.run.seed = 5
    recipe.layout.tp = 2
    with pytest.raises(UserError) as error:
        find_resume(recipe, "train")
    text = str(error.value)
    assert "\n  run.seed was 0 and is now 5\n  optimizer.lr was 1e-06 and is now 3e-06\nSet them back" in text
    assert "layout.tp was" not in text
    assert "May change: resume, checkpoint, run.name" in text


def test_another_command_or_a_shorter_run_is_refused(recipe):
    a_run(recipe, "math-20260101-100000", 3)
    with pytest.raises(UserError, match="was written by quintet train; go on with that command"):
        find_resume(recipe, "sft")
    recipe.train.steps = 2
    with pytest.raises(UserError, match=r"is after step 3, and train\.steps=2; raise it"):
        find_resume(recipe, "train")


def test_a_reference_policy_that_is_not_whole_sets_no_checkpoint_aside(recipe):
    run = a_run(recipe, "math-20260101-100000", 3, reference="../reference")
    said = f"the reference policy in {run}/checkpoints/reference.*share, cannot be loaded: there is no .*from a copy; "
    with pytest.raises(UserError, match=said + "resume=null begins a new run"):
        find_resume(recipe, "train")
    warm = save(Checkpoints(run / "checkpoints"), "sft", 2, recipe=recipe.model_dump(mode="json"))
    with pytest.raises(UserError, match=said + f"resume={warm} begins RL anew"):
        find_resume(recipe, "train")


def test_the_reference_policy_is_the_one_the_run_began_with(recipe, tmp_path):
    a_run(recipe, "math-20260101-100000", 3, weights="of then")
    found = find_resume(recipe, "train")
    inputs = Inputs(tmp_path, None, None, None, None, None, weights="of then")  # type: ignore[arg-type]
    _check_reference(inputs, found)
    _check_reference(inputs, None)
    inputs.weights = "of now"
    with pytest.raises(
        UserError,
        match=rf"model\.path: the weights in {tmp_path}, .* lora\.path, are others than when the run",
    ):
        _check_reference(inputs, found)
