"""Which run goes on, and from which of its checkpoints: `resume` of the recipe, decided before any process starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.errors import DamagedCheckpoint, UserError
from quintet.recipe.resume import MAY_CHANGE, MAY_NOT, changed_keys
from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import MANIFEST, REFERENCE, Checkpoint, Checkpoints, Damaged
from quintet.runs.ledger import read_json
from quintet.runs.lock import LOCK, holder_of

AUTO = "auto"


@dataclass(frozen=True)
class Resume:
    """What the recipe's `resume` came to. checkpoint: None for a new run. notes: what the user should know of the choice."""

    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path | None:
        """The run directory that goes on."""
        return None if self.checkpoint is None else self.checkpoint.path.parent.parent


def past_damage(run: Callable[[dict[Path, str]], Path]) -> Path:
    """Call `run`, and once more for each checkpoint that turned out to be damaged when it was loaded, with what is wrong with
    each of those so far; returns what it returns.

    Every process starts anew, as if the earlier checkpoint had been named: nothing of what was loaded before stays.
    """
    damaged: dict[Path, str] = {}
    while True:
        try:
            return run(damaged)
        except DamagedCheckpoint as error:
            if error.checkpoint is None:
                raise
            damaged[error.checkpoint] = error.message


def find_resume(recipe: Recipe, command: str, damaged: Mapping[Path, str] | None = None) -> Resume:
    """Find and check the checkpoint that a recipe asks to go on from. damaged: see `Checkpoints.latest`.

    auto: of the runs of `run.name` in `run.dir`, the newest (by the time in its name) that has a whole checkpoint; runs without
    one are told and passed over, and a new run begins where there is none. Of a run the newest whole checkpoint counts.

    Raises UserError when there is no such checkpoint, the one that is named or all of a run's are damaged, or the recipe differs
    in a key that may not change, or the reference policy is not whole.
    """
    if recipe.resume is None:
        return Resume()
    try:
        found = (
            _newest_run(recipe, damaged) if recipe.resume == AUTO else _named(Path(recipe.resume), damaged)
        )
    except OSError as error:
        raise UserError(
            f"resume={recipe.resume}: {error.filename} cannot be read: {error.strerror}"
        ) from None
    if found.checkpoint is not None:
        _check(found.checkpoint, recipe, command)
    return found


def check_again(
    chosen: Resume, recipe: Recipe, command: str, damaged: Mapping[Path, str] | None = None
) -> None:
    """Look once more, now that no other process can go on with the run.

    Raises UserError when another one did between the choice and the lock.
    """
    if chosen.run is not None and find_resume(recipe, command, damaged).checkpoint != chosen.checkpoint:
        raise UserError(
            f"resume={recipe.resume}: another process went on with {chosen.run} while this one started; run the command again"
        )


def nothing_left(recipe: Recipe, command: str) -> Path | None:
    """Return the run directory, when the run to go on with has finished and the recipe asks for no more steps of it."""
    found = find_resume(recipe, command)
    if found.checkpoint is None or found.run is None:
        return None
    manifest = found.checkpoint.manifest
    stage, steps = (
        ("rl", recipe.train.steps) if command == "train" else ("sft", _sft_steps(recipe, manifest.loop))
    )
    over = manifest.stage == stage and manifest.step >= steps
    return found.run if over and _finished(found.run) else None


def _sft_steps(recipe: Recipe, loop: dict[str, float]) -> int:
    assert recipe.sft is not None
    stop = recipe.sft.stop_at_loss
    return 0 if stop is not None and loop["smooth"] < stop else recipe.sft.steps


def _newest_run(recipe: Recipe, damaged: Mapping[Path, str] | None) -> Resume:
    notes: list[str] = []
    ours = re.compile(rf"{re.escape(recipe.run.name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    folder = recipe.run.dir
    runs = [(m, p) for p in (folder.iterdir() if folder.is_dir() else ()) if (m := ours.fullmatch(p.name))]
    for _, run in sorted(runs, key=lambda one: (one[0][1], int(one[0][2] or 1)), reverse=True):
        checkpoints = Checkpoints(run / "checkpoints")
        checkpoint, skipped = checkpoints.latest(damaged)
        if checkpoint is None and checkpoints.published():
            raise UserError(
                f"resume=auto: no checkpoint of {run} is whole{_because(skipped)}. Put whole files back, name another run, or "
                "begin a new one (resume=null)"
            )
        if checkpoint is not None:
            # A finished run is not what a newer one, lost before its first save, goes on with.
            if notes and _finished(run):
                break
            return Resume(checkpoint, [*notes, *_skipped(run, skipped)])
        if (holder := holder_of(run / LOCK)) is not None:
            raise UserError(
                f"resume=auto: {run}, the newest run, is in use by {holder} and has no checkpoint yet. Wait for it or end it, "
                "or begin another run (resume=null)"
            )
        notes.append(f"resume=auto: {run} has no whole checkpoint{_because(skipped)}")
    return Resume(
        None,
        [*notes, f"resume=auto: no run of {recipe.run.name} in {folder} to go on with; a new one begins"],
    )


def _named(path: Path, damaged: Mapping[Path, str] | None) -> Resume:
    if path.absolute().name == "checkpoints":
        path = path.absolute().parent
    if (path / MANIFEST).exists() or (path.parent.name == "checkpoints" and path.is_dir()):
        try:
            found = Checkpoint.read(path.absolute())
        except Damaged as reason:
            raise UserError(f"resume={path}: {reason}{_others(path)}") from None
        if path.absolute().parent.name != "checkpoints":
            raise UserError(
                f"resume={path}: a checkpoint is resumed in its run directory, as RUN/checkpoints/{path.name}; put it back there"
            )
        return Resume(found)
    if (path / "config.json").exists():
        raise UserError(
            f"resume={path} is a Hugging Face directory: it has weights and no state of training. To start a new run from "
            f"them set model.path={path}"
        )
    checkpoint, skipped = Checkpoints(path.absolute() / "checkpoints").latest(damaged)
    if checkpoint is None:
        trained = path / "checkpoint"
        hint = f". To start a new run from its weights set model.path={trained}" if trained.is_dir() else ""
        raise UserError(f"resume={path} has no whole checkpoint{_because(skipped)}{hint}")
    return Resume(checkpoint, _skipped(path, skipped))


def is_named(resume: str | None, checkpoint: Path) -> bool:
    """Return whether `resume` names this checkpoint and no run that may have others."""
    return resume not in (None, AUTO) and Path(str(resume)).absolute() == checkpoint.absolute()


def reference_lost(found: Checkpoint, why: object) -> UserError:
    """Return the error for a stored reference policy that cannot be loaded. It is no fault of the checkpoint, which stays as it
    is."""
    directory = found.path.parent
    warm = next((path for path in Checkpoints(directory).published() if path.name.startswith("sft-")), None)
    instead = f"resume={warm} begins RL anew" if warm else "resume=null begins a new run"
    return UserError(
        f"the reference policy in {directory / REFERENCE}, which all of the run's checkpoints of RL share, cannot be loaded: "
        f"{why}. Make it readable, or put it back from a copy; {instead}"
    )


def _others(path: Path) -> str:
    checkpoint, _ = Checkpoints(path.absolute().parent).latest()
    return f". The newest whole one is {path.parent / checkpoint.path.name}" if checkpoint else ""


def _because(skipped: list[str]) -> str:
    return f" ({'; '.join(skipped)})" if skipped else ""


def _skipped(run: Path, skipped: list[str]) -> list[str]:
    return [f"passed over in {run}: {one}" for one in skipped]


def _finished(run: Path) -> bool:
    return read_json(run / "summary.json").get("status") == "finished"


def _check(found: Checkpoint, recipe: Recipe, command: str) -> None:
    manifest = found.manifest
    if manifest.command != command:
        raise UserError(
            f"resume={recipe.resume}: {found.path} was written by quintet {manifest.command}; go on with that command"
        )
    changed = changed_keys(manifest.recipe, recipe, manifest.stage)
    if recipe.model.dtype not in (None, manifest.dtype):
        changed.append(("model.dtype", manifest.dtype, recipe.model.dtype))
    if changed:
        lines = "".join(f"\n  {key} was {_shown(old)} and is now {_shown(new)}" for key, old, new in changed)
        raise UserError(
            f"resume={recipe.resume}: {found.path} is of a run with other settings:{lines}\nSet them back, or begin a new run "
            f"(resume=null). May change: {', '.join(MAY_CHANGE)}; but not {', '.join(MAY_NOT)}"
        )
    steps = {"rl": recipe.train.steps, "sft": recipe.sft.steps if recipe.sft else 0}[manifest.stage]
    if manifest.step > steps:
        key = "train.steps" if manifest.stage == "rl" else "sft.steps"
        raise UserError(
            f"resume={recipe.resume}: {found.path} is after step {manifest.step}, and {key}={steps}; raise it, or name an "
            "earlier checkpoint"
        )
    try:
        found.check_reference()
    except Damaged as reason:
        raise reference_lost(found, reason) from None


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
