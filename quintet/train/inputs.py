"""What a command reads before any process starts: model, data and reward, read and checked here as `train` and `check` both need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quintet.data.prompts import (
    Messages,
    Prompt,
    PromptSet,
    Which,
    alphabet_of,
    check_rows,
    is_local,
    load_prompts,
    make_prompts,
    path_of,
)
from quintet.data.stream import PromptStream
from quintet.data.tokenizer import (
    build_char_tokenizer,
    check_stops,
    code_of_tokenizer,
    load_tokenizer,
    remote_code_warning,
)
from quintet.errors import UserError
from quintet.models import ModelShape, check_weights, read_end_ids, trained_shape
from quintet.models.peft import WEIGHTS
from quintet.models.weights_on_disk import find_weights, fingerprint
from quintet.recipe import schema
from quintet.recipe.capacity import overflow
from quintet.recipe.derived import on_device, roles_of
from quintet.recipe.mtp import is_made, with_mtp
from quintet.recipe.rules import broken_rules
from quintet.recipe.rules.facts import shape_of_built
from quintet.recipe.told import told
from quintet.recipe.user_family import use_family
from quintet.rewards.load import RewardFunction, load_reward
from quintet.rewards.trial import try_reward
from quintet.rollout.make import check_installed
from quintet.runs.directory import check_writable
from quintet.runs.resume import Resume

Command = Literal["train", "sft", "generate", "eval"]
MODEL = "model"
"""Where a model that was made is, below the run directory."""


@dataclass
class Inputs:
    """What a recipe names, read and checked."""

    model_dir: Path
    shape: ModelShape
    tokenizer: Any
    train: PromptSet | None = None
    eval: PromptSet | None = None
    reward: RewardFunction | None = None

    sft: PromptSet | None = None
    """What SFT imitates: `train`, or a file of its own."""

    end_ids: list[int] = field(default_factory=list)
    """Token ids that end a response: the tokenizer's, and those the model's generation_config.json lists."""

    prompts: list[Prompt] = field(default_factory=list)
    """Of texts that are given with the command."""

    notes: list[str] = field(default_factory=list)
    """What a user should know of the recipe and its data."""

    weights: str | None = None
    """Fingerprint of the model's weights and of lora.path's, where every start of a run needs the same ones: for the reference policy."""


def prepare(
    recipe: schema.Recipe,
    command: Command,
    scratch: Path,
    resume: Resume | None = None,
    texts: Sequence[str | Messages] = (),
    *,
    starts: bool = True,
) -> Inputs:
    """Read and check everything the command will need. A model to be built is written to `scratch`, unless the run goes on
    and has it. texts: prompts given with the command.

    starts: false, of `quintet check`, makes no weights, downloads no data, and does not ask whether this is a machine that can run
    it: whatever else is refused before a start is refused here.

    Raises UserError for what the user can mend.
    """
    if starts:
        _check_device(recipe, command)
        # Another cluster's machines have what they have.
        if command != "sft" and recipe.cluster.address is None:
            check_installed(recipe.rollout.backend)
    if command in ("train", "sft") and (resume is None or resume.run is None):
        check_writable(recipe.run.dir)
    use_family(recipe.model.family)
    inputs = _read_model(recipe, scratch, resume, starts)
    inputs.notes += told(recipe, command)
    if command == "train" and "critic" in roles_of(recipe) and recipe.critic.path is not None:
        _check_critic(recipe.critic.path, inputs.shape)
    if command != "sft" and inputs.tokenizer is not None:
        check_stops(recipe.rollout.stop, inputs.tokenizer)
    if texts:
        given = make_prompts(texts, recipe.data, inputs.tokenizer)
        inputs.prompts, inputs.notes = given.prompts, [*inputs.notes, *given.notes]
    if command in ("train", "eval"):
        inputs.reward = load_reward(recipe.reward.function)
    _read_data(inputs, recipe, command, starts)
    if starts and command == "train" and recipe.algorithm.kl_coef > 0 and recipe.sft is None:
        inputs.weights = fingerprint(find_weights(inputs.model_dir))
        if recipe.lora is not None and recipe.lora.path is not None:
            inputs.weights += fingerprint(find_weights(recipe.lora.path, WEIGHTS))
        _check_reference(inputs, resume)
    if resume is not None and resume.checkpoint is not None:
        prompts = inputs.sft if resume.checkpoint.manifest.stage == "sft" else inputs.train
        if prompts is not None:
            stream = PromptStream(prompts, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
            stream.load_state_dict(resume.checkpoint.manifest.data)  # it checks that the data are the same
    if inputs.reward is not None:
        try_reward(inputs.reward, recipe.reward, [*(inputs.train or inputs.eval or [])])
    return inputs


def _read_model(recipe: schema.Recipe, scratch: Path, resume: Resume | None, starts: bool) -> Inputs:
    """The model's directory, made if need be, its shape and its tokenizer: None where only code of the model's could read that, and
    nothing is to start."""
    build, model_dir = recipe.model.build, recipe.model.directory
    new = recipe.mtp.init_layers if recipe.mtp is not None else None
    if is_made(recipe) and resume is not None and resume.run is not None:
        model_dir, new = resume.run / MODEL, None
    elif build is not None:
        model_dir = scratch / MODEL
        tokenizer = build_char_tokenizer(alphabet_of(recipe.data, download=starts), model_dir)
        if not starts:
            shape = with_mtp(recipe, shape_of_built(build))
            return Inputs(model_dir, shape, load_tokenizer(model_dir, recipe.model))
        from quintet.engine.weights.random_model import write_fresh_model

        write_fresh_model(
            build,
            model_dir,
            vocab_size=len(tokenizer),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            seed=recipe.run.seed,
            mtp_layers=new,
        )
        new = None
    assert model_dir is not None, "the rule one_model wants one"
    notes = []
    if recipe.model.trust_remote_code:
        if starts:  # before it runs
            print(remote_code_warning(model_dir), file=sys.stderr)
        else:
            notes.append(remote_code_warning(model_dir))
    if new is not None and starts:
        from quintet.engine.weights.random_model import write_with_fresh_layers

        write_with_fresh_layers(model_dir, scratch / MODEL, new, recipe.run.seed)
        model_dir, new = scratch / MODEL, None
    shape = trained_shape(model_dir, mtp=recipe.mtp is not None)
    if new is not None:
        shape = replace(shape, mtp_layers=new)
    if not starts and recipe.model.trust_remote_code and code_of_tokenizer(model_dir) is not None:
        return Inputs(model_dir, shape, None, notes=notes)
    tokenizer = load_tokenizer(model_dir, recipe.model)
    if starts:  # the rules have looked at them too
        check_weights(model_dir, shape)
    end_ids = sorted({tokenizer.eos_token_id, *read_end_ids(model_dir)})
    return Inputs(model_dir, shape, tokenizer, end_ids=end_ids, notes=notes)


def _read_data(inputs: Inputs, recipe: schema.Recipe, command: Command, starts: bool) -> None:
    """Prompts of every side that the command reads, their lengths, and what is to be told of them."""
    response = recipe.sft is not None and command in ("train", "sft")
    own = response and recipe.data.sft_path is not None
    sides: dict[Which, list[str]] = {}
    if command == "train" or (command == "sft" and not own):
        sides["train"] = _answers(inputs) + ["response"] * (response and not own)
    if own:
        sides["sft"] = ["response"]
    if command in ("train", "eval") and recipe.train.eval_prompts:
        sides["eval"] = _answers(inputs)
    found: dict[Which, PromptSet] = {}
    for which, needs in sides.items():
        path, seed = path_of(recipe.data, which), recipe.run.seed
        if not starts and path is not None and not is_local(path):
            inputs.notes.append(
                f"Data: {path} is not a file here, taken for a hub name; its rows were not checked."
            )
        elif inputs.tokenizer is None:
            rows = check_rows(recipe.data, which, seed=seed, needs=needs)
            inputs.notes.append(
                f"Data: {rows} {which} prompts, not tokenized, which takes code that comes with the model."
            )
        else:
            one = load_prompts(recipe.data, which, inputs.tokenizer, seed=seed, needs=needs)
            inputs.notes += one.notes
            found[which] = one
    inputs.train = found.get("train")
    inputs.sft = found.get("sft", inputs.train) if response else None
    if inputs.train is not None and command != "sft":
        inputs.notes += _too_few(inputs.train, "train.prompts_per_step", recipe.train.prompts_per_step)
    if inputs.sft is not None:
        assert recipe.sft is not None
        _check_lengths(inputs.sft, recipe)
        inputs.notes += _too_few(inputs.sft, "sft.samples_per_step", recipe.sft.samples_per_step)
    if "eval" in found:
        inputs.eval = found["eval"].subset(recipe.train.eval_prompts, recipe.run.seed)


def _too_few(prompts: PromptSet, key: str, wanted: int) -> list[str]:
    if len(prompts) >= wanted:
        return []
    some = "prompt" if len(prompts) == 1 else "prompts"
    return [
        f"{prompts.name} has {len(prompts)} {some} and {key} is {wanted}: each step takes some more than once."
    ]


def _answers(inputs: Inputs) -> list[str]:
    """The column of answers, where the command scores by a reward that reads it."""
    return ["answer"] if inputs.reward is not None and inputs.reward.takes.answer else []


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
    """A run without a warm-up reads its reference policy from model.path, and lora.path, at every start."""
    found = resume and resume.checkpoint
    # A checkpoint of before says nothing of the adapters.
    if found and not (inputs.weights or "").startswith(found.manifest.weights or ""):
        raise UserError(
            f"model.path: the weights in {inputs.model_dir}, or the adapters in lora.path, are others than when the run began, and "
            "algorithm.kl_coef needs those as the reference policy; put them back, or begin a new run (resume=null)"
        )


def _check_device(recipe: schema.Recipe, command: Command) -> None:
    """Raise UserError for what a machine without GPUs cannot do: device=auto comes to cpu there, and device=cuda is a mistake."""
    if recipe.cluster.device == "cpu" or recipe.cluster.address is not None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if recipe.cluster.device == "cuda":
        raise UserError(
            "cluster.device=cuda needs NVIDIA GPUs; set cluster.device=cpu to do without. This machine has none"
        )
    problems = broken_rules(on_device(recipe, "cpu"), command)
    known = {problem.message for problem in broken_rules(recipe, command)} if problems else set()
    for problem in problems:
        if problem.message not in known:
            raise UserError(f"{problem.message}. This machine has no GPU, so that cluster.device=auto is cpu")


def _check_lengths(prompts: PromptSet, recipe: schema.Recipe) -> None:
    """Each prompt and the response that is imitated must fit a micro-batch; of what is generated the recipe's rules say it."""
    fit: set[int] = set()
    for prompt in prompts:
        total = len(prompt.token_ids) + len(prompt.response_ids)
        if total in fit:
            continue
        fit.add(total)
        if (over := overflow(recipe, total)) is not None:
            why, fits = over
            # Problems of a built-in task have no row.
            less = "take the row out" if prompt.row else "make problems shorter (data.task_options)"
            raise UserError(
                f"{prompt.source}: {len(prompt.token_ids)} prompt tokens and up to {len(prompt.response_ids)} of response are "
                f"{total}, {why}. It fits with {fits}; or {less}"
            )
