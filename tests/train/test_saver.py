"""When a run is saved, and what a failed save comes to. The ranks here are one local stand-in that writes real files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quintet.errors import DamagedCheckpoint, Stopped, UserError, WorkerFailure
from quintet.observe.observer import Observer
from quintet.recipe.rules.facts import shape_of_built
from quintet.recipe.schema import Algorithm, BuildModel, Checkpoint, Data, Model, Recipe, Run, Sft
from quintet.runs.checkpoints import CHECKSUMS
from quintet.runs.stop import StopRequest
from quintet.train import session as sessions
from quintet.train.saver import Saver
from quintet.train.session import Session
from tests.train.runs import run


class Ranks:
    """Writes when it is asked whether it is done; `slow` asks are answered with no. `error`: what it then says."""

    def __init__(self) -> None:
        self.pending: Path | None = None
        self.slow = 0
        self.error: str | None = None
        self.exports: list[str] = []
        self.whole: list[Path] = []
        self.roles = {
            "policy": SimpleNamespace(save=self.begin, load=self.load),
            "reference": SimpleNamespace(save=self.begin, load=self.load_reference),
        }

    def dtype(self) -> str:
        return "fp32"

    def begin(self, path: Path) -> list[str]:
        assert self.pending is None, "the last save was not waited for"
        self.pending = path
        return []

    def checkpoint_finished(self, roles: Sequence[str], *, wait: bool) -> tuple[bool, list[str]]:
        assert self.pending is not None
        if self.slow and not wait:
            self.slow -= 1
            return False, []
        path, self.pending = self.pending, None
        path.mkdir()
        if self.error is not None:
            return True, [f"checkpoint {path} was not saved: {self.error}"]
        (path / "0.distcp").write_bytes(b"x" * 100)
        return True, []

    def load(self, path: Path) -> None:
        if path.parent not in self.whole:
            raise UserError(f"{path / '0.distcp'}: decoder.weight is damaged")

    def load_reference(self, path: Path) -> None:
        raise DamagedCheckpoint(f"{path / '0.distcp'}: decoder.weight is damaged")

    def save(self, path: Path) -> None:
        if self.error is not None:
            raise UserError(self.error)
        self.exports.append(path.name)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def made(tmp_path: Path, ranks: Ranks) -> Iterator[Any]:
    """Makes a saver with settings; its observer and what that prints are on it."""
    observers: list[Observer] = []

    def make(stop: StopRequest | None = None, recipe: dict[str, Any] | None = None, **settings: Any) -> Any:
        asked = Recipe(
            **(recipe or {}),
            run=Run(dir=tmp_path / "runs"),
            model=Model(build=BuildModel(layers=1)),
            data=Data(task="addition"),
            checkpoint=Checkpoint(**settings),
        )
        printed = io.StringIO()
        observer = Observer(asked, Console(file=printed, width=1000))
        observers.append(observer)
        shape = shape_of_built(asked.model.build)
        saver = Saver(asked, "train", observer, ranks, shape, None, stop or StopRequest())  # type: ignore[arg-type]
        assert saver.begin("rl", SimpleNamespace(state_dict=lambda: {"position": 7})) == (0, {})  # type: ignore[arg-type]
        return SimpleNamespace(saver=saver, observer=observer, printed=printed.getvalue)

    yield make
    for observer in observers:
        observer.__exit__(None, None, None)


def names(made: Any) -> list[str]:
    return [path.name for path in made.saver.checkpoints.published()]


def steps(made: Any, numbers: range, last: int = 99) -> None:
    for step in numbers:
        made.saver.after_step(step, last=step == last, smooth=0.5)


def test_saves_are_published_a_step_later_and_the_oldest_goes_after(made, ranks):
    run = made(every_steps=2, keep_last=2)
    steps(run, range(1, 3))
    assert names(run) == []  # the ranks write
    steps(run, range(3, 4))
    assert names(run) == ["step-000002"]
    steps(run, range(4, 8), last=7)
    assert names(run) == ["step-000006", "step-000004"]
    run.saver.finish()
    assert names(run) == ["step-000007", "step-000006"]
    newest, _ = run.saver.checkpoints.latest()
    assert newest.manifest.data == {"position": 7}
    assert newest.manifest.loop == {"smooth": 0.5}


def test_a_save_that_takes_several_steps_is_waited_for_before_the_next(made, ranks):
    run, ranks.slow = made(every_steps=3), 9
    steps(run, range(3, 6))
    assert names(run) == []
    steps(run, range(6, 7))
    assert names(run) == ["step-000003"]


def test_a_run_that_ends_early_publishes_what_is_on_the_disk(made, ranks):
    """Its ranks may be gone, and cannot be asked."""
    run = made(every_steps=1)
    steps(run, range(1, 2))
    policy = run.saver.checkpoints.directory / "step-000001" / "policy"
    policy.mkdir()
    (policy / CHECKSUMS).write_text('{"files": {"0.distcp"')  # rank 0 was killed at its last file
    run.saver.rescue()
    assert names(run) == []
    ranks.pending = None
    steps(run, range(2, 3))
    policy = run.saver.checkpoints.directory / "step-000002" / "policy"
    policy.mkdir()
    (policy / CHECKSUMS).write_text('{"files": {}}')
    run.saver.rescue()
    assert names(run) == ["step-000002"]
    run.saver.rescue()


def test_without_async_save_it_is_there_at_once(made):
    run = made(every_steps=1, async_save=False)
    steps(run, range(1, 2))
    assert names(run) == ["step-000001"]


def test_nothing_is_saved_unasked(made, ranks):
    run = made()
    steps(run, range(1, 4), last=3)
    run.saver.finish()
    assert not run.saver.checkpoints.directory.exists()
    assert "checkpoint" not in run.observer.phases.totals


def test_exports_go_below_hf(made, ranks):
    run = made(hf_every_steps=2)
    steps(run, range(1, 6), last=5)
    assert ranks.exports == ["step-000002", "step-000004"]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_failed_save_ends_the_run_or_does_not_as_the_recipe_says(made, ranks, on_error):
    run = made(every_steps=1, on_error=on_error, hf_every_steps=4)
    steps(run, range(1, 3))
    ranks.error = "0.distcp: No space left on device; free space there"
    if on_error == "stop":
        with pytest.raises(UserError) as error:
            steps(run, range(3, 4))
        text = str(error.value)
        assert (
            f"Make room, or lower checkpoint.keep_last, and go on with resume={run.observer.directory.path}"
            in text
        )
    else:
        steps(run, range(3, 5))
        ranks.error = None
        steps(run, range(5, 6))
        run.saver.finish()
        text = run.printed()
        # The checkpoints of steps 2 and 3, and an export.
        assert text.count("warning: ") == 3
        assert run.observer.extra == {"failed_saves": 3}
    assert (
        "/checkpoints/step-000002 was not saved: 0.distcp: No space left on device; free space there (needed: about"
        in text
    )
    assert "; the last whole checkpoint is " in text
    assert names(run) == (["step-000001"] if on_error == "stop" else ["step-000005", "step-000004"])
    assert not (run.saver.checkpoints.directory / "step-000002").exists()


def test_no_checkpoint_lacks_the_reference_policy_that_it_needs(made, ranks):
    """Storing it fails when RL begins: the next save makes up for it, and where it cannot, there is none."""
    ranks.error = "No space left on device"
    run = made(every_steps=1, on_error="continue", recipe={"sft": Sft(), "algorithm": Algorithm(kl_coef=0.1)})
    steps(run, range(1, 2))
    assert run.printed().count("reference was not saved: No space left") == 2
    assert names(run) == []
    ranks.error = None
    steps(run, range(2, 4))
    assert names(run) == ["step-000002"]
    newest, _ = run.saver.checkpoints.latest()
    assert newest.reference.is_dir()


def test_a_failed_export_leaves_what_was_there(made, ranks):
    run = made(hf_every_steps=1, on_error="continue")
    there = run.observer.directory.hf / "step-000001" / "model.safetensors"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"weights")
    ranks.error = f"{there.parent} is there already"
    steps(run, range(1, 2))
    assert there.read_bytes() == b"weights"
    assert run.observer.extra == {"failed_saves": 1}


@pytest.mark.parametrize("async_save", [True, False])
def test_the_trained_model_is_written_before_a_failed_last_save_is_told(made, ranks, async_save):
    run = made(every_steps=1, async_save=async_save)
    session = Session(run.saver.recipe, None, run.observer, ranks, run.saver)  # type: ignore[arg-type]
    ranks.error = "No space left on device"
    steps(run, range(2, 3), last=2)
    run.saver.finish()
    ranks.error = None
    with pytest.raises(UserError, match=r"step-000002 was not saved: No space left on device"):
        session.finish()
    assert ranks.exports == ["checkpoint"]
    assert names(run) == []


def test_a_save_to_a_place_that_is_taken_harms_nothing(made, ranks):
    run = made(every_steps=1, on_error="continue", async_save=False)
    steps(run, range(1, 2))
    steps(run, range(1, 2))
    assert names(run) == ["step-000001"]
    assert "step-000001 was not saved: cannot make it: File exists" in run.printed()


def test_a_checkpoint_that_does_not_load_is_told_with_the_one_before(made, ranks):
    run = made(every_steps=1, async_save=False)
    steps(run, range(1, 3))
    found, _ = run.saver.checkpoints.latest()
    before = run.saver.checkpoints.directory / "step-000001"
    with pytest.raises(UserError) as error:
        run.saver._restore(found, None)
    assert str(error.value).endswith(
        f"decoder.weight is damaged. To go on from the checkpoint before set resume={before}"
    )
    with pytest.raises(UserError, match="no earlier checkpoint; resume=null begins a new one"):
        run.saver._restore(run.saver.checkpoints.before(found), None)


def test_a_reference_that_does_not_load_sets_no_checkpoint_aside(made, ranks):
    run = made(every_steps=1, async_save=False, recipe={"sft": Sft(), "algorithm": Algorithm(kl_coef=0.1)})
    steps(run, range(1, 3))
    found, _ = run.saver.checkpoints.latest()
    ranks.whole.append(found.path)
    with pytest.raises(UserError, match=r"reference/policy/0\.distcp: decoder\.weight is damaged") as error:
        run.saver._restore(found, None)
    assert error.type is UserError, "no other checkpoint is tried"
    assert "step-000001" not in str(error.value)


def test_damage_passes_over_a_checkpoint_that_was_not_named(made, ranks):
    run = made(every_steps=1, async_save=False)
    steps(run, range(1, 3))
    found, _ = run.saver.checkpoints.latest()
    ranks.roles["policy"].load = ranks.load_reference
    for resume, kind in (
        (None, DamagedCheckpoint),
        ("auto", DamagedCheckpoint),
        (str(found.path), UserError),
    ):
        run.saver.recipe.resume = resume
        with pytest.raises(UserError, match=r"decoder\.weight is damaged") as error:
            run.saver._restore(found, None)
        assert error.type is kind
        assert getattr(error.value, "checkpoint", found.path) == found.path


@pytest.mark.parametrize("recipe", [{"sft": Sft()}, {"algorithm": Algorithm(kl_coef=0.1)}])
def test_a_reference_policy_is_stored_where_no_other_file_holds_it(made, ranks, recipe):
    run = made(every_steps=1, async_save=False, recipe=recipe)
    steps(run, range(1, 2))
    assert run.saver.checkpoints.latest()[0].reference is None
    assert [path.name for path in run.saver.checkpoints.directory.iterdir()] == ["step-000001"]


def test_a_run_goes_on_with_all_that_its_checkpoint_holds(made, ranks):
    run = made(every_steps=1, async_save=False, recipe={"sft": Sft(), "algorithm": Algorithm(kl_coef=0.1)})
    run.observer.phases.totals["train"] = 5.0
    steps(run, range(1, 4))
    saver, observer, told = run.saver, run.observer, []
    found = saver.checkpoints.before(saver.checkpoints.latest()[0])
    shape = shape_of_built(saver.recipe.model.build)
    again = Saver(saver.recipe, "train", observer, ranks, shape, found, StopRequest())  # type: ignore[arg-type]
    again.on_loaded = lambda checkpoint: told.append(checkpoint.path.name)
    ranks.whole.append(found.path)
    ranks.roles["reference"].load = lambda path: told.append(path.parent.name)
    ranks.mark_weights_updated = lambda: told.append("marked")
    observer.go_on = lambda *state: told.append(state)
    stream = SimpleNamespace(state_dict=lambda: {"position": 9}, load_state_dict=told.append)
    assert (again.skips("sft"), again.skips("rl"), saver.skips("sft")) == (True, False, False)
    ranks.roles["critic"] = None
    assert (again.trained_roles("sft"), again.trained_roles("rl")) == (("policy",), ("policy", "critic"))
    del ranks.roles["critic"]
    assert again.begin("rl", stream) == (2, {"smooth": 0.5})
    clock = found.manifest.clock
    newer = [saver.checkpoints.directory / "step-000003"]
    state = ("rl", 2, clock.seconds, clock.by_phase, newer)
    assert told == ["reference", "step-000002", "marked", {"position": 7}, state]
    assert clock.seconds > 0
    assert clock.by_phase["train"] == 5.0
    ranks.roles["reference"].save = None  # it is there already
    again.after_step(4, last=False, smooth=0.25)
    newest, _ = again.checkpoints.latest()
    assert (newest.path.name, newest.reference) == ("step-000004", found.reference)
    assert (newest.manifest.data, newest.manifest.loop) == ({"position": 9}, {"smooth": 0.25})


@pytest.mark.parametrize(("by_formula", "needed"), [(10, r"0\.1 KiB"), (3000, r"2\.9 KiB")])
def test_room_is_looked_at_before_a_save(made, ranks, monkeypatch, by_formula, needed):
    monkeypatch.setattr("quintet.train.saver.checkpoint_bytes", lambda *given: by_formula)
    run = made(every_steps=1)
    steps(run, range(1, 3))
    size = json.loads((run.saver.checkpoints.directory / "step-000001/manifest.json").read_text())["files"]
    assert size == {"policy/0.distcp": 100}
    monkeypatch.setattr(Saver, "_free", lambda saver: 99)
    with pytest.raises(UserError, match=rf"not enough room \(needed: about {needed}, free there: 0\.1 KiB\)"):
        steps(run, range(3, 4))


def test_an_old_checkpoint_that_cannot_be_removed_costs_the_new_one_nothing(made, ranks, monkeypatch):
    def refuse(self: object, keep: int) -> list[str]:
        raise PermissionError(13, "Permission denied", "step-000001")

    run = made(every_steps=1)
    monkeypatch.setattr("quintet.runs.checkpoints.Checkpoints.prune", refuse)
    steps(run, range(1, 4))
    assert names(run) == ["step-000002", "step-000001"]
    assert "warning: an old checkpoint stays: step-000001: Permission denied" in run.printed()


def test_what_the_controller_cannot_see_is_no_checkpoint(made, ranks, monkeypatch):
    monkeypatch.setattr(
        Path, "mkdir", lambda self, *a, **k: None if self.name == "policy" else _mkdir(self, *a, **k)
    )
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: len(data))
    run = made(every_steps=1)
    with pytest.raises(UserError, match=r"run\.dir must be on a file system that all nodes share"):
        steps(run, range(1, 3))


_mkdir = Path.mkdir


def test_a_request_to_stop_saves_between_two_saves(made, ranks):
    run = made(StopRequest(("rl", 3)), every_steps=100)
    steps(run, range(1, 3))
    with pytest.raises(Stopped, match="stopped after rl step 3, as the caller asked; go on with resume="):
        steps(run, range(3, 4))
    assert names(run) == ["step-000003"]


@pytest.mark.parametrize(("number", "reason", "code"), [(2, "Ctrl-C", 130), (15, "SIGTERM", 143)])
def test_without_checkpoints_a_signal_leaves_the_policy(made, ranks, number, reason, code):
    stop = StopRequest()
    run = made(stop)
    run.saver.begin_steps(0)
    steps(run, range(1, 3))
    assert ranks.exports == []
    stop.signalled = number
    with pytest.raises(Stopped, match=f"stopped after rl step 3, as {reason} asked") as stopped:
        steps(run, range(3, 4))
    assert (ranks.exports, stopped.value.exit_code) == (["checkpoint"], code)


def test_a_signal_in_the_evaluation_after_a_warm_up_ends_before_the_first_step(made, ranks):
    stop = StopRequest()
    run = made(stop)
    stop.signalled = 2
    with pytest.raises(Stopped):
        run.saver.begin_steps(0)
    assert ranks.exports == ["checkpoint"]


def test_a_signal_in_the_last_step_lets_the_run_finish(made, ranks):
    stop = StopRequest()
    run = made(stop)
    run.saver.begin_steps(0)
    stop.signalled = 15
    steps(run, range(4, 5), last=4)
    assert ranks.exports == []  # `Session.finish` writes the model


def test_what_an_interrupted_run_left_can_be_read_off_its_last_lines(made, ranks):
    run, stop = made(every_steps=2), StopRequest()
    run.saver.stop = stop
    directory = run.observer.directory
    run.observer.step(1, {"loss": 1.0}, show=False)
    steps(run, range(1, 3))
    stop.signalled = 2
    with pytest.raises(Stopped), run.observer:
        steps(run, range(3, 4))
    said = run.printed()
    assert "trained model   none was written" in said
    assert f"checkpoint      {directory.path}/checkpoints/step-000003, after rl step 3\n" in said
    assert f"to go on        quintet train {directory.recipe} resume={directory.path}\n" in said


@pytest.mark.parametrize(("done", "hint"), [(1, ""), (2, "resume=auto goes on from the last checkpoint.")])
def test_a_failure_names_the_last_checkpoint_where_there_is_one(tmp_path, ranks, monkeypatch, done, hint):
    """What was being written when it came is none."""
    monkeypatch.setattr(sessions, "_ranks", lambda *_: nullcontext(ranks))
    ranks.start_optimizer = lambda *_: None

    def lost_after(steps: int) -> None:
        with run(tmp_path, "checkpoint.every_steps=1", "rollout.own_processes=true") as s:
            s.saver.begin("rl", SimpleNamespace(state_dict=dict))
            for step in range(1, steps + 1):
                s.saver.after_step(step, last=False)
            raise WorkerFailure("rank 0 died in sync")

    with pytest.raises(WorkerFailure) as failure:
        lost_after(done)
    assert failure.value.message == "\n\n".join(filter(None, ["rank 0 died in sync", hint]))
