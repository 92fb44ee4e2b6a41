"""What every command that computes needs: checked inputs, a run directory, and the ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.data.lengths import ResponseLengths
from quintet.data.prompts import Messages
from quintet.errors import QuintetError, RayFailure, SyncFailure, SyncMismatch, WorkerFailure
from quintet.observe.observer import Observer
from quintet.recipe import schema
from quintet.recipe.mtp import is_made
from quintet.recipe.rollout import placement_of
from quintet.rollout.base import Sampling
from quintet.runs.fsync import Scratch
from quintet.runs.resume import Resume, check_again, find_resume, past_damage
from quintet.runs.stop import StopRequest
from quintet.train.inputs import MODEL, Command, Inputs, prepare
from quintet.train.saver import Saver

if TYPE_CHECKING:  # Ray starts long after the checks.
    from quintet.controller.batch_ref import BatchRef
    from quintet.controller.controller import Controller
    from quintet.controller.samples import Samples


@dataclass
class Session:
    """A run under way: its inputs, its observer, its ranks, and what saves it (of commands that train)."""

    recipe: schema.Recipe
    inputs: Inputs
    observer: Observer
    controller: Controller
    _saver: Saver | None = None
    lengths: ResponseLengths = field(default_factory=ResponseLengths)

    @property
    def saver(self) -> Saver:
        assert self._saver is not None, "this command saves nothing"
        return self._saver

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """Return the recipe's sampling."""
        return Sampling.of(self.recipe.rollout, self.inputs.end_ids, greedy=greedy)

    def scatter(self, samples: Samples) -> BatchRef:
        """Send samples to the ranks that train on them: see `Controller.scatter`."""
        with self.observer.phase("scatter"):
            return self.controller.scatter(samples)

    @property
    def temperature(self) -> float:
        """The temperature of the policy that is trained: the sampling temperature, 1 when sampling is greedy."""
        return self.recipe.rollout.temperature or 1.0

    def begin_steps(self, done: int) -> None:
        """Begin a loop after its evaluation: what has passed, such as the start of the ranks, is no step's."""
        self.saver.begin_steps(done)
        self.observer.begin_steps()

    def finish(self) -> Path:
        """Wait for the last checkpoint, write the trained model, and return the run directory.

        A last checkpoint that failed costs the model nothing: only then is it told.
        """
        self.saver.finish()
        self.saver.save_model()
        self.saver.tell()
        return self.observer.directory.path


def in_session(
    recipe: schema.Recipe, command: Command, stop_after: int | None, run: Callable[[Session], Path]
) -> Path:
    """Run a command that trains in a session, and in a new one each time that a checkpoint turns out to be damaged. Returns what
    `run` returns."""

    def anew(damaged: dict[Path, str]) -> Path:
        with session(recipe, command, stop_after, damaged=damaged) as s:
            return run(s)

    return past_damage(anew)


@contextmanager
def session(
    recipe: schema.Recipe,
    command: Command,
    stop_after: int | None = None,
    texts: Sequence[str | Messages] = (),
    damaged: Mapping[Path, str] | None = None,
) -> Iterator[Session]:
    """Prepare, make or reopen the run directory, start the ranks; and end all of it well, however the body ends.

    `generate` and `eval` leave no run directory behind and write progress to standard error. stop_after: see `train`;
    texts: see `prepare`; damaged: see `find_resume`.
    """
    trains = command in ("train", "sft")
    resume = find_resume(recipe, command, damaged) if trains else Resume()
    with Scratch() as scratch:
        inputs = prepare(recipe, command, Path(scratch), resume, texts)
        with Observer(recipe, keep=trains, resume=resume.run) as observer:
            check_again(resume, recipe, command, damaged)
            if trains and recipe.data.chat and isinstance(inputs.tokenizer.chat_template, str):
                observer.directory.keep_chat_template(inputs.tokenizer.chat_template)
            for note in [*inputs.notes, *resume.notes]:
                observer.note(note)
            if is_made(recipe) and resume.run is None:
                inputs.model_dir = Path(
                    shutil.move(str(inputs.model_dir), str(observer.directory.path / MODEL))
                )
            with _ranks(recipe, command, inputs, observer) as controller:
                if not trains:
                    yield Session(recipe, inputs, observer, controller)
                    return
                assert command in ("train", "sft")
                stop = StopRequest(
                    None if stop_after is None else ("rl" if command == "train" else "sft", stop_after)
                )
                with stop.on_signals():
                    found, weights = resume.checkpoint, inputs.weights
                    saver = Saver(recipe, command, observer, controller, inputs.shape, found, stop, weights)
                    try:
                        try:
                            yield Session(recipe, inputs, observer, controller, saver)
                        finally:
                            saver.rescue()
                    except (WorkerFailure, RayFailure, SyncFailure, SyncMismatch) as failure:
                        failure.message += _what_then(recipe, failure, bool(saver.checkpoints.published()))
                        raise


def _what_then(recipe: schema.Recipe, failure: QuintetError, saved: bool) -> str:
    """What a user can do about a run that lost a process, or the weights on their way to one. saved: it has checkpoints."""
    hints = []
    of_rollout = failure.message.startswith(("rollout-", "receiver rollout-"))
    raised = isinstance(failure, WorkerFailure) and bool(failure.traceback)  # as one started anew may
    if isinstance(failure, SyncMismatch):
        hints.append("Nothing was generated with these weights.")
    elif of_rollout and not recipe.rollout.restart and not raised:
        hints.append("With rollout.restart=true it would be started anew, and the run would go on.")
    if isinstance(failure, SyncFailure):
        hints.append("What it did meanwhile is in logs/ of the run directory.")
    if saved:
        shares = isinstance(failure, WorkerFailure) and not placement_of(recipe).own_processes
        dies = "The rollout shares the trainer's processes. " if shares else ""
        hints.append(f"{dies}resume=auto goes on from the last checkpoint.")
    elif isinstance(failure, SyncMismatch) and not recipe.checkpoint.every_steps:
        hints.append("A run that saves checkpoints (checkpoint.every_steps) can go on from the last one.")
    return f"\n\n{' '.join(hints)}" if hints else ""


LITTLE_TOKENS = 65_536
"""Of prompts and responses: so many one rank of a laptop has generated before several have started."""


def _is_little(recipe: schema.Recipe, command: Command, inputs: Inputs) -> bool:
    """Whether one rank, in this process, does what the command asks for: on a CPU, nothing is trained, the model is on one rank
    anyway, and there is little to generate, or one rank to do it."""
    axes, cluster = recipe.layout, recipe.cluster
    if command in ("train", "sft") or cluster.address is not None or not placement_of(recipe).shares_weights:
        return False
    if (axes.tp, axes.pp, axes.cp, axes.ep, axes.etp or 1) != (1, 1, 1, 1, 1):
        return False
    import torch
    import torch.distributed as dist

    # A rank of something else has a group already.
    if torch.cuda.device_count() or (dist.is_available() and dist.is_initialized()):
        return False
    prompts, count = list(inputs.eval or ()), 1 + recipe.train.eval_samples_per_prompt
    if command == "generate":
        prompts, count = inputs.prompts, recipe.rollout.samples_per_prompt
    tokens = sum(len(prompt.token_ids) + recipe.rollout.max_response_tokens for prompt in prompts)
    return cluster.ranks == 1 or count * tokens <= LITTLE_TOKENS


@contextmanager
def _ranks(
    recipe: schema.Recipe, command: Command, inputs: Inputs, observer: Observer
) -> Iterator[Controller]:
    from quintet.controller.controller import Controller
    from quintet.rewards.pool import RewardPool

    logs = observer.directory.path / "logs"
    if _is_little(recipe, command, inputs):
        if recipe.cluster.ranks > 1:
            observer.note("one rank, in this process: so little is generated before several have started")
            recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"ranks": 1})})
        from quintet.cluster.local import LocalCluster as Ranks
    else:
        from quintet.cluster.cluster import Cluster as Ranks  # type: ignore[assignment]
    cluster: Any = Ranks(recipe.cluster, log_dir=logs, say=observer.note)
    many = "1 rank" if recipe.cluster.ranks == 1 else f"{recipe.cluster.ranks} ranks"
    with ExitStack() as stack:
        with observer.phase("start"), observer.progress.task(f"starting {many}"):
            stack.enter_context(cluster)
            rewards = None
            if inputs.reward is not None:
                rewards = stack.enter_context(RewardPool(inputs.reward, recipe.reward, cluster.log_dir))
            shown, phase = observer.progress, observer.phase
            controller = Controller(
                cluster, recipe, inputs.model_dir, inputs.shape, shown, command, phase, rewards
            )
        if rewards is not None:
            rewards.start()  # it loads the reward while the first responses are generated
        for line in controller.describe():
            observer.note(line)
        if controller.offload_reason is not None:
            observer.note(controller.offload_reason)
        yield controller
