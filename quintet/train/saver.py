"""When the state of a run is saved, and how it is taken up again: what the loops call at the end of every step.

The ranks copy their state to host memory and write it while the next steps go on. At each end of a step the controller
asks whether they are done, and then publishes the checkpoint; it waits for them before the next save and at the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintet.data.stream import PromptStream
from quintet.errors import DamagedCheckpoint, Stopped, UserError
from quintet.models import ModelShape
from quintet.observe.memory import GIB
from quintet.observe.observer import Observer
from quintet.plan.saves import checkpoint_bytes, export_bytes, weights_bytes
from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import (
    CHECKSUMS,
    CRITIC,
    MANIFEST,
    POLICY,
    REFERENCE,
    Checkpoint,
    Checkpoints,
    Clock,
    Manifest,
    Stage,
    adapter_directory,
    later_than,
    name_of,
)
from quintet.runs.directory import package_versions
from quintet.runs.ledger import read_json
from quintet.runs.resume import is_named, reference_lost
from quintet.runs.stop import StopRequest

if TYPE_CHECKING:
    from quintet.controller.controller import Controller


@dataclass
class _Running:
    """A save that the ranks are writing."""

    path: Path
    manifest: Manifest
    roles: tuple[str, ...]

    def parts(self) -> dict[str, Path]:
        """Return where each role writes."""
        return {role: self.path / (POLICY if role == REFERENCE else role) for role in self.roles}


class Saver:
    """Checkpoints and exports of one run. resumed: the checkpoint that the run goes on from.

    weights: the manifest's.
    """

    def __init__(
        self,
        recipe: Recipe,
        command: Literal["train", "sft"],
        observer: Observer,
        controller: Controller,
        shape: ModelShape,
        resumed: Checkpoint | None,
        stop: StopRequest,
        weights: str | None = None,
    ) -> None:
        self.recipe, self.command, self.observer, self.controller = recipe, command, observer, controller
        self.settings, self.stop = recipe.checkpoint, stop
        self.checkpoints = Checkpoints(observer.directory.checkpoints)
        self._resumed, self._weights = resumed, weights
        self.on_loaded: Callable[[Checkpoint], None] = lambda found: None
        """Told of a checkpoint right after the run has taken up what is in it."""
        self._running: _Running | None = None
        self._reference = resumed.manifest.reference if resumed is not None else None
        self._stage: Stage = "sft"
        self._stream: PromptStream | None = None
        self._failed = 0
        self._ending = False  # the run's last step is done
        self._unsaved: UserError | None = None
        self.dtype = controller.dtype()
        # What a save takes on the disk: by the formula, until there has been one.
        self._checkpoint_bytes = checkpoint_bytes(recipe, shape, self.dtype)
        self._reference_bytes = weights_bytes(recipe, shape, self.dtype)
        self._export_bytes = export_bytes(shape, self.dtype)
        if resumed is not None and resumed.manifest.dtype != self.dtype:
            raise UserError(
                f"{resumed.path} holds {resumed.manifest.dtype} weights, and here model.dtype comes to {self.dtype}; set "
                f"model.dtype={resumed.manifest.dtype}"
            )

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._resumed is not None

    def skips(self, stage: Stage) -> bool:
        """Return whether the run goes on from a later stage than this one."""
        return self._resumed is not None and self._resumed.manifest.stage == "rl" and stage == "sft"

    def begin(self, stage: Stage, stream: PromptStream) -> tuple[int, dict[str, float]]:
        """Enter a stage, once its optimizer is there. Returns its last step that is done already, and its loop's numbers.

        A run that goes on from a checkpoint of this stage takes up everything from there; else that is (0, {}).
        """
        self._stage, self._stream = stage, stream
        resumed = self._resumed
        if resumed is not None and resumed.manifest.stage == stage:
            self._restore(resumed, stream)
            return resumed.manifest.step, dict(resumed.manifest.loop)
        if stage == "rl" and self.settings.every_steps and self._needs_stored_reference:
            self._store_reference()
        return 0, {}

    def begin_steps(self, done: int) -> None:
        """Begin a loop, of which so many steps are done: from now on a signal is a request. Raises Stopped where one came already,
        in the evaluation after a warm-up."""
        if self.stop.signalled is not None:
            self._stop(done)
        self.stop.steps_begun = True

    def after_step(self, step: int, *, last: bool, **loop: float) -> None:
        """Do what is due after a step: publish, save, export; and stop, if that is asked.

        last: whether the stage ends with it. loop: numbers that its loop carries to the next step.

        Raises UserError for a failed save, unless the recipe says to continue, or it was the run's last step: then `tell`
        does, once the model is written. Raises Stopped when asked to stop.
        """
        self._ending = last and self._stage == ("rl" if self.command == "train" else "sft")
        every, exports = self.settings.every_steps, self.settings.hf_every_steps
        stopping = self.stop.after(self._stage, step)
        due = every > 0 and (stopping or last or step % every == 0)
        export = exports > 0 and step % exports == 0
        if self._running is None and not due and not export and not stopping:
            return
        with self.observer.phase("checkpoint"):
            self._poll(wait=due)
            if due:
                self._save(step, loop)
            if export:
                self._export(step)
        if stopping and not self._ending:  # a run that has taken all its steps is finished as any
            self._stop(step)

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one. Whether it failed is for `tell`."""
        self._ending = True
        if self._running is not None:
            with (
                self.observer.phase("checkpoint"),
                self.observer.progress.task("writing the last checkpoint"),
            ):
                self._poll(wait=True)

    def _stop(self, step: int) -> None:
        """End the run here: with what is saved to go on from, or else with the policy as it is."""
        with self.observer.phase("checkpoint"):
            self._poll(wait=True)
        self.tell()
        if not self.settings.every_steps:
            self.save_model()
        raise Stopped(self._farewell(step), self.stop.exit_code)

    def rescue(self) -> None:
        """Publish the save under way, where a run ends early, if all of it is on the disk. The ranks are not asked: they may be gone."""
        running, self._running = self._running, None
        if running is not None and all(read_json(part / CHECKSUMS) for part in running.parts().values()):
            self._publish(running)

    def save_model(self) -> None:
        """Write the policy as it is to checkpoint/, as a Hugging Face directory."""
        with self.observer.phase("save"), self.observer.progress.task("saving the model"):
            self.controller.save(self.observer.directory.checkpoint)

    def tell(self) -> None:
        """Raise the error of a save that failed at the end of the run, where the recipe says to stop."""
        if self._unsaved is not None:
            raise self._unsaved

    # going on

    def _restore(self, found: Checkpoint, stream: PromptStream) -> None:
        manifest, observer = found.manifest, self.observer
        if manifest.stage == "rl" and self._needs_stored_reference and manifest.reference is None:
            raise UserError(
                f"{found.path} lacks the reference policy, which algorithm.kl_coef needs; name an earlier one"
            )
        with observer.phase("checkpoint"), observer.progress.task(f"loading {found.path.name}"):
            self._load(found)
            self.on_loaded(found)
            self.controller.mark_weights_updated()
        stream.load_state_dict(manifest.data)
        newer = self.checkpoints.newer_than(found)
        made = [*later_than(found, observer.directory.hf), observer.directory.checkpoint]
        later = [path for path in (*newer, *made, *map(adapter_directory, made)) if path.exists()]
        clock = manifest.clock
        aside = observer.go_on(manifest.stage, manifest.step, clock.seconds, clock.by_phase, later)
        what = f"; newer checkpoints are in {aside}: {', '.join(p.name for p in newer)}" if newer else ""
        observer.note(f"going on after {manifest.stage} step {manifest.step}, from {found.path}{what}")

    def _load(self, found: Checkpoint) -> None:
        try:
            for role, path in self._parts(found).items():
                self.controller.roles[role].load(path)
        except UserError as error:
            if isinstance(error, DamagedCheckpoint) and not is_named(self.recipe.resume, found.path):
                raise DamagedCheckpoint(error.message, found.path) from None
            raise UserError(f"{error}. {self._instead_of(found)}") from None
        if found.reference is not None and REFERENCE in self.controller.roles:
            try:
                self.controller.roles[REFERENCE].load(found.reference)
            except UserError as error:  # all checkpoints of RL share it: an earlier one would not help
                raise reference_lost(found, error.message) from None

    def _parts(self, found: Checkpoint) -> dict[str, Path]:
        """Directories of a checkpoint, by trained role. Raises UserError where one is not in it."""
        parts = {role: found.path / role for role in self.trained_roles(found.manifest.stage)}
        for role, path in parts.items():
            if not path.is_dir():
                raise UserError(
                    f"{found.path} has no {role}: it is of a run that trained none. Begin a new run (resume=null), with "
                    "model.path naming what that run has trained"
                )
        return parts

    def trained_roles(self, stage: Stage) -> tuple[str, ...]:
        """Return the roles that learn in a stage, and that its checkpoints hold."""
        return POLICY, *((CRITIC,) if stage == "rl" and CRITIC in self.controller.roles else ())

    def _instead_of(self, found: Checkpoint) -> str:
        """What to do when a checkpoint cannot be loaded."""
        before = self.checkpoints.before(found)
        if before is None:
            return "This run has no earlier checkpoint; resume=null begins a new one"
        return f"To go on from the checkpoint before set resume={before.path}"

    @property
    def _needs_stored_reference(self) -> bool:
        """Without a warm-up RL starts from the recipe's model, which is there to be read again."""
        return self.recipe.algorithm.kl_coef > 0 and self.recipe.sft is not None

    def _store_reference(self) -> None:
        observer = self.observer
        with observer.phase("checkpoint"), observer.progress.task("saving the reference policy"):
            self._poll(wait=True)
            self._write(self.checkpoints.directory / REFERENCE, self._manifest(0, {}), reference=True)
            self._poll(wait=True)
        if (self.checkpoints.directory / REFERENCE / MANIFEST).exists():
            self._reference = f"../{REFERENCE}"

    # saving

    def _save(self, step: int, loop: dict[str, float]) -> None:
        path = self.checkpoints.directory / name_of(self._stage, step)
        if self._stage == "rl" and self._needs_stored_reference and self._reference is None:
            # It failed when RL began. A checkpoint without it would go on with another reference policy.
            self._store_reference()
            if self._reference is None:
                return
        self._write(path, self._manifest(step, loop))
        if not self.settings.async_save:
            self._poll(wait=True)

    def _write(self, path: Path, manifest: Manifest, *, reference: bool = False) -> None:
        """Have the ranks begin to write; `_poll` says when they are done."""
        needed = self._reference_bytes if reference else self._checkpoint_bytes
        if self._free() < needed:
            self._fail(path, "there is not enough room", needed)
            return
        try:
            self.checkpoints.begin(path.name)
        except OSError as error:
            self.checkpoints.discard(path)
            self._fail(path, f"cannot make it: {error.strerror}", needed)
            return
        roles = (REFERENCE,) if reference else self.trained_roles(manifest.stage)
        self._running = _Running(path, manifest, roles)
        for at, (role, part) in enumerate(self._running.parts().items()):
            errors = self.controller.roles[role].save(part)
            if errors:
                if at:  # others write still, below what is to be removed
                    self.controller.checkpoint_finished(roles[:at], wait=True)
                self._running = None
                self.checkpoints.discard(path)
                self._fail(path, errors[0], needed)
                return

    def _poll(self, *, wait: bool) -> None:
        """Publish the save under way if the ranks are done with it."""
        if (running := self._running) is None:
            return
        done, errors = self.controller.checkpoint_finished(running.roles, wait=wait)
        if errors and not done:  # others write still, below what is to be removed
            errors += self.controller.checkpoint_finished(running.roles, wait=True)[1]
        elif not done:
            return
        self._running = None
        why = errors[0] if errors else self._publish(running)
        if why is not None:
            self.checkpoints.discard(running.path)
            self._fail(running.path, why, self._checkpoint_bytes)
        elif running.path.name != REFERENCE:
            self._prune()

    def _publish(self, running: _Running) -> str | None:
        """Make what the ranks wrote a checkpoint; why it cannot be one, or None."""
        if not (running.path / POLICY).is_dir():
            return "what the ranks wrote is not there: run.dir must be on a file system that all nodes share"
        try:
            published = self.checkpoints.publish(running.path, running.manifest)
        except OSError as error:
            return f"{error.filename or MANIFEST}: {error.strerror}"
        self._checkpoint_bytes = max(self._checkpoint_bytes, published.manifest.bytes)
        return None

    def _prune(self) -> None:
        try:
            self.checkpoints.prune(self.settings.keep_last)
        except OSError as error:  # the new one is there all the same
            self.observer.note(f"warning: an old checkpoint stays: {error.filename}: {error.strerror}")

    def _fail(self, path: Path, reason: str, needed: int) -> None:
        """A save or an export came to nothing: say so, and go on or end as the recipe wants."""
        reason = reason.partition(" was not saved: ")[2] or reason
        text = f"{path} was not saved: {reason} (needed: about {_size(needed)}, free there: {_size(self._free())})"
        whole, _ = self.checkpoints.latest()
        kept = f"the last whole checkpoint is {whole.path}" if whole else "there is no earlier checkpoint"
        if self.settings.on_error == "stop":
            error = UserError(
                f"{text}; {kept}. Make room, or lower checkpoint.keep_last, and go on with "
                f"resume={self.observer.directory.path}; checkpoint.on_error=continue would train on"
            )
            if not self._ending:
                raise error
            self._unsaved = self._unsaved or error
            return
        self._failed += 1
        self.observer.extra["failed_saves"] = self._failed
        self.observer.note(f"warning: {text}; {kept}. Training goes on (checkpoint.on_error=continue)")

    def _export(self, step: int) -> None:
        """A Hugging Face directory of the present weights."""
        target = self.observer.directory.hf / name_of(self._stage, step)
        try:
            self.controller.save(target)
        except UserError as error:  # The writer leaves nothing of it, and what was there before as it was.
            self._fail(target, str(error), self._export_bytes)

    def _free(self) -> int:
        return shutil.disk_usage(self.observer.directory.path).free

    def _manifest(self, step: int, loop: dict[str, float]) -> Manifest:
        assert self._stream is not None
        recipe = self.recipe
        return Manifest(
            command=self.command,
            stage=self._stage,
            step=step,
            layout={"ranks": recipe.cluster.ranks, **recipe.layout.model_dump(mode="json")},
            dtype=self.dtype,
            data=self._stream.state_dict(),
            loop=loop,
            reference=self._reference,
            weights=self._weights,
            clock=Clock(seconds=self.observer.phases.elapsed(), by_phase=dict(self.observer.phases.totals)),
            recipe=recipe.model_dump(mode="json"),
            versions=package_versions(),
            saved=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        )

    def _farewell(self, step: int) -> str:
        run = self.observer.directory
        text = f"stopped after {self._stage} step {step}, as {self.stop.reason} asked"
        found, _ = self.checkpoints.latest()
        if found is not None:
            return f"{text}; go on with resume={run.path} or resume=auto"
        if run.checkpoint.exists():
            return f"{text}; the policy is in {run.checkpoint}, and with checkpoint.every_steps=0 there is nothing to go on from"
        return text


def _size(number: float) -> str:
    for unit, name in ((GIB, "GiB"), (1024.0**2, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1024:.1f} KiB"
