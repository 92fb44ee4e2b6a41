"""What every command that computes needs: checked data, a model directory, a run directory, and the ranks.

Everything a user can get wrong is read and checked in `prepare`, before any process starts.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quintet.data.prompts import Prompt, PromptSet, alphabet_of, load_prompts, make_prompts
from quintet.data.stream import PromptStream
from quintet.data.tokenizer import build_char_tokenizer, check_stops, load_tokenizer, remote_code_warning
from quintet.errors import QuintetError, RayFailure, SyncFailure, SyncMismatch, UserError, WorkerFailure
from quintet.models import ModelShape, check_weights, read_end_ids, trained_shape
from quintet.models.weights_on_disk import find_weights, fingerprint
from quintet.observe import Observer
from quintet.recipe import schema
from quintet.recipe.capacity import overflow
from quintet.recipe.features import FEATURES
from quintet.recipe.refused import NEEDS_GPU
from quintet.recipe.roles import roles_of
from quintet.recipe.rollout import placement_of
from quintet.recipe.user_family import use_family
from quintet.rewards.load import RewardFunction, load_reward
from quintet.rollout import Sampling
from quintet.rollout.make import check_installed
from quintet.runs.fsync import Scratch
from quintet.runs.resume import Resume, check_again, find_resume
from quintet.runs.stop import StopRequest
from quintet.train.saver import Saver

if TYPE_CHECKING:  # Ray starts long after the checks.
    from quintet.controller.batch_ref import BatchRef
    from quintet.controller.controller import Controller
    from quintet.controller.samples import Samples

Command = Literal["train", "sft", "generate", "eval"]
MODEL = "model"
"""Where a built model is, below the run directory."""


@dataclass
class Inputs:
    """What a recipe names, read and checked."""

    model_dir: Path
    shape: ModelShape
    tokenizer: Any
    train: PromptSet | None
    eval: PromptSet | None
    reward: RewardFunction | None

    end_ids: list[int] = field(default_factory=list)
    """Token ids that end a response: the tokenizer's, and those the model's generation_config.json lists."""

    prompts: list[Prompt] = field(default_factory=list)
    """Of texts that are given with the command."""

    weights: str | None = None
    """Fingerprint of the model's weights, where every start of a run needs the same ones: for the reference policy."""


def prepare(
    recipe: schema.Recipe,
    command: Command,
    scratch: Path,
    resume: Resume | None = None,
    texts: Sequence[str] = (),
) -> Inputs:
    """Read and check everything the command will need. A model to be built is written to `scratch`, unless the run goes on
    and has it. texts: prompts given with the command."""
    _check_device(recipe)
    if command != "sft" and recipe.cluster.address is None:  # another cluster's machines have what they have
        check_installed(recipe.rollout.backend)
    use_family(recipe.model.family)
    model_dir = recipe.model.path
    if recipe.model.build is not None and resume is not None and resume.run is not None:
        model_dir = resume.run / MODEL
    elif recipe.model.build is not None:
        model_dir = scratch / MODEL
        tokenizer = build_char_tokenizer(alphabet_of(recipe.data), model_dir)
        from quintet.engine.weights.random_model import write_fresh_model

        write_fresh_model(
            recipe.model.build,
            model_dir,
            vocab_size=len(tokenizer),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            seed=recipe.run.seed,
        )
    if model_dir is None:
        raise UserError("model.path is not set: name a Hugging Face directory, or give model.build")
    if recipe.model.trust_remote_code:
        print(remote_code_warning(model_dir), file=sys.stderr)
    tokenizer = load_tokenizer(model_dir, recipe.model)
    shape = trained_shape(model_dir)
    check_weights(model_dir, shape)
    if command == "train" and "critic" in roles_of(recipe) and recipe.critic.path is not None:
        _check_critic(recipe.critic.path, shape)
    if command != "sft":
        check_stops(recipe.rollout.stop, tokenizer)
    end_ids = sorted({tokenizer.eos_token_id, *read_end_ids(model_dir)})
    inputs = Inputs(model_dir, shape, tokenizer, None, None, None, end_ids)
    if texts:
        inputs.prompts = make_prompts(list(texts), recipe.data, tokenizer)
    if command in ("train", "eval"):
        inputs.reward = load_reward(recipe.reward.function)
    if command in ("train", "sft"):
        needs = [*(["answer"] if command == "train" else []), *(["response"] if recipe.sft else [])]
        inputs.train = load_prompts(recipe.data, "train", tokenizer, seed=recipe.run.seed, needs=needs)
        _check_lengths(inputs.train, recipe)
    if command in ("train", "eval") and recipe.train.eval_prompts:
        held_out = load_prompts(recipe.data, "eval", tokenizer, seed=recipe.run.seed)
        inputs.eval = held_out.subset(recipe.train.eval_prompts, recipe.run.seed)
    if command == "train" and recipe.algorithm.kl_coef > 0 and recipe.sft is None:
        inputs.weights = fingerprint(find_weights(model_dir))
        _check_reference(inputs, resume)
    if resume is not None and resume.checkpoint is not None and inputs.train is not None:
        stream = PromptStream(inputs.train, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
        stream.load_state_dict(resume.checkpoint.manifest.data)  # it checks that the data are the same
    return inputs


def _check_critic(path: Path, policy: ModelShape) -> None:
    """A critic from a directory of its own reads the policy's tokens."""
    shape = trained_shape(path)
    check_weights(path, shape)
    if shape.vocab_size < policy.vocab_size:
        raise UserError(
            f"critic.path: the model in {path} has {shape.vocab_size} tokens and the policy {policy.vocab_size}: it cannot read "
            "all of what the policy says; name one with the policy's tokenizer"
        )


def _check_reference(inputs: Inputs, resume: Resume | None) -> None:
    """A run without a warm-up reads its reference policy from model.path at every start."""
    saved = (
        resume.checkpoint.manifest.weights if resume is not None and resume.checkpoint is not None else None
    )
    if saved is not None and saved != inputs.weights:
        raise UserError(
            f"model.path: the weights in {inputs.model_dir} are others than when the run began, and algorithm.kl_coef needs "
            "those as the reference policy; put them back, or begin a new run (resume=null)"
        )


def _check_device(recipe: schema.Recipe) -> None:
    """What the rules can say of device=cpu only: device=auto comes to the same on a machine without GPUs."""
    if recipe.cluster.device != "auto" or recipe.cluster.address is not None:
        return
    asked = [need for need in NEEDS_GPU if FEATURES[need.feature].is_on(recipe, None)]
    if not asked:
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"{asked[0].sentence}. This machine has none")


def _check_lengths(prompts: PromptSet, recipe: schema.Recipe) -> None:
    """Prompt and longest response must fit a micro-batch, for every prompt, before anything is generated."""
    for prompt in prompts:
        longest = max(recipe.rollout.max_response_tokens, len(prompt.response_ids))
        total = len(prompt.token_ids) + longest
        if (why := overflow(recipe, total)) is not None:
            raise UserError(
                f"{prompt.source}: {len(prompt.token_ids)} prompt tokens and up to {longest} of response are "
                f"{total}, {why}. Raise the budget or layout.cp, or lower rollout.max_response_tokens"
            )


class Session:
    """A run under way: its inputs, its observer, its ranks, and what saves it (of commands that train)."""

    def __init__(
        self,
        recipe: schema.Recipe,
        inputs: Inputs,
        observer: Observer,
        controller: Controller,
        saver: Saver | None = None,
    ) -> None:
        self.recipe, self.inputs, self.observer, self.controller = recipe, inputs, observer, controller
        self._saver = saver

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

    def finish(self) -> Path:
        """Wait for the last checkpoint, write the trained model, and return the run directory.

        A last checkpoint that failed costs the model nothing: only then is it told.
        """
        self.saver.finish()
        with self.observer.phase("save"), self.observer.progress.task("saving the model"):
            self.controller.save(self.observer.directory.checkpoint)
        self.saver.tell()
        return self.observer.directory.path


@contextmanager
def session(
    recipe: schema.Recipe,
    command: Command,
    stop_after: int | None = None,
    texts: Sequence[str] = (),
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
            for note in resume.notes:
                observer.note(note)
            if recipe.model.build is not None and resume.run is None:
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
                with stop.on_sigterm(saves=recipe.checkpoint.every_steps > 0):
                    saver = Saver(
                        recipe,
                        command,
                        observer,
                        controller,
                        inputs.shape,
                        resume.checkpoint,
                        stop,
                        inputs.weights,
                    )
                    try:
                        yield Session(recipe, inputs, observer, controller, saver)
                    except (WorkerFailure, RayFailure, SyncFailure, SyncMismatch) as failure:
                        failure.message += _what_then(recipe, failure)
                        raise


def _what_then(recipe: schema.Recipe, failure: QuintetError) -> str:
    """What a user can do about a run that lost a process, or the weights on their way to one."""
    hints = []
    raised = isinstance(failure, WorkerFailure) and bool(failure.traceback)  # as one started anew may
    if isinstance(failure, SyncMismatch):
        hints.append("Nothing was generated with these weights.")
    elif (
        failure.message.startswith(("rollout-", "receiver rollout-"))
        and not recipe.rollout.restart
        and not raised
    ):
        hints.append("With rollout.restart=true it would be started anew, and the run would go on.")
    if isinstance(failure, SyncFailure):
        hints.append("What it did meanwhile is in logs/ of the run directory.")
    if recipe.checkpoint.every_steps:
        shares = isinstance(failure, WorkerFailure) and not placement_of(recipe).own_processes
        dies = "The rollout shares the trainer's processes. " if shares else ""
        hints.append(f"{dies}resume=auto goes on from the last checkpoint.")
    elif isinstance(failure, SyncMismatch):
        hints.append("A run that saves checkpoints (checkpoint.every_steps) can go on from the last one.")
    return f"\n\n{' '.join(hints)}" if hints else ""


@contextmanager
def _ranks(
    recipe: schema.Recipe, command: Command, inputs: Inputs, observer: Observer
) -> Iterator[Controller]:
    from quintet.cluster.cluster import Cluster
    from quintet.controller.controller import Controller
    from quintet.rewards.pool import RewardPool

    cluster = Cluster(recipe.cluster, log_dir=observer.directory.path / "logs", say=observer.note)
    with ExitStack() as stack:
        with observer.phase("start"), observer.progress.task(f"starting {recipe.cluster.ranks} ranks"):
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
        observer.note(controller.describe())
        yield controller
