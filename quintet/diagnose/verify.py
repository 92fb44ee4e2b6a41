"""Does a run that is saved, ended and resumed come to the same as one that goes straight through? By the user's recipe.

Three runs in processes of their own: 2N steps without a save; N steps and a save; from that save, N more. The third saves what
it loaded once more: weights, masters and moments must be the same bits, in whatever layout. Then what the runs recorded of
every step is compared, and the weights they ended with.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

from quintet.errors import QuintetError, Stopped, UserError
from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import CRITIC, POLICY, REFERENCE, Checkpoint, Checkpoints
from quintet.runs.ledger import read_jsonl, read_metrics
from quintet.runs.stop import Terminated, interruptible

if TYPE_CHECKING:
    from quintet.train.saver import Saver

Command = Literal["train", "sft"]
COMPARED = ("loss", "reward/mean", "grad_norm", "critic/loss", "critic/grad_norm")
FIRST_LOSS, LATER_LOSS = 1e-6, 1e-4
"""Most that losses in fp32 may part in another layout, of 1 or of the loss if that is more: at first, and after."""
BF16_LOSS = 2e-2
NORM, BF16_NORM = 1e-3, 5e-2
"""Most that gradient norms may part in another layout, of the norm."""
LEAST_NORM = 1e-3
"""Smaller norms are taken for this: of a step without signal rounding is all there is."""
GPU_BOUND = 1e-3
"""The same on GPUs, whose kernels need not repeat themselves, of the first step after resuming."""


@dataclass(frozen=True)
class Step:
    """What a run recorded of a step. samples: a digest of all texts with their rewards; "" in SFT."""

    stage: str
    step: int
    values: dict[str, float]
    samples: str


@dataclass(frozen=True)
class Outcome:
    """Two runs side by side. half: steps of the main stage before the save; stage: the main one."""

    straight: list[Step]
    resumed: list[Step]
    weights: list[tuple[str, float]]
    """Tensors of the trained model that differ, and by how much at most."""
    fingerprints: tuple[str, str]
    stage: str
    half: int
    state: list[str] = field(default_factory=list)
    """What the resumed run held right after loading that was not as it was saved."""

    def pairs(self) -> Iterator[tuple[Step, Step]]:
        """Yield steps side by side, up to where one run has no more."""
        return zip(self.straight, self.resumed, strict=False)

    @property
    def identical(self) -> bool:
        return (
            not self.state and self.straight == self.resumed and self.fingerprints[0] == self.fingerprints[1]
        )

    def resumed_pairs(self) -> list[tuple[Step, Step]]:
        """Return the pairs of steps after the save."""
        return [(a, b) for a, b in self.pairs() if a.stage == self.stage and a.step > self.half]

    def first_half(self) -> list[tuple[Step, Step]]:
        """Return the pairs of steps before the save: the same computation, done twice."""
        return [(a, b) for a, b in self.pairs() if not (a.stage == self.stage and a.step > self.half)]


def verify(
    recipe: Recipe, resumed: Recipe, command: Command, steps: int, scratch: Path, say: Callable[[str], None]
) -> Outcome:
    """Run it all below `scratch`. resumed: the recipe of the second half, which may have another layout.

    Raises UserError with the end of the log of a run that failed.
    """
    base = _shortened(recipe, command, 2 * steps)
    straight = _variant(base, scratch / "straight", every=0)
    split = _variant(base, scratch / "split", every=steps)
    say(f"1 of 3: {2 * steps} steps straight through")
    _run(straight, command, None, scratch / "straight.log")
    say(f"2 of 3: {steps} steps, a save, and the end of every process")
    _run(split, command, steps, scratch / "first.log")
    run = _only(split.run.dir)
    checkpoint, _ = Checkpoints(run / "checkpoints").latest()
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint after step {steps}; see {scratch / 'first.log'}")
    say(f"3 of 3: {checkpoint.path.name} loaded, {steps} steps more")
    second = _variant(_shortened(resumed, command, 2 * steps), scratch / "split", every=steps)
    second.resume = str(checkpoint.path)
    _run(second, command, None, scratch / "second.log", again=scratch / "again")
    state = _compare_states(checkpoint, scratch / "again")
    whole = _only(straight.run.dir)
    weights, fingerprints = _compare_weights(whole / "checkpoint", run / "checkpoint")
    stage = "rl" if command == "train" else "sft"
    return Outcome(_steps(whole), _steps(run), weights, fingerprints, stage, steps, state)


def judge(outcome: Outcome, *, same_layout: bool, gpu: bool, bf16: bool) -> tuple[bool, str]:
    """Return whether resuming is sound, and why, in words."""
    if outcome.identical:
        return True, "identical: every step and every weight, bit for bit"
    as_long = len(outcome.straight) == len(outcome.resumed)
    if outcome.state or not as_long or (same_layout and not gpu):
        return False, f"differs: {first_difference(outcome)}"
    if same_layout:
        return _judge_gpu(outcome)
    first, later = (BF16_LOSS, BF16_LOSS) if bf16 else (FIRST_LOSS, LATER_LOSS)
    norms = BF16_NORM if bf16 else NORM
    compared, worst = 0, 0.0
    for number, (a, b) in enumerate(outcome.resumed_pairs()):
        gap = _gap_of(a, b, "loss")
        if a.samples != b.samples:
            # Rounding tipped a draw: from here on the runs learn from different samples.
            break
        compared, worst = compared + 1, max(worst, gap)
        if not gap <= (first if number == 0 else later):  # nor is a NaN
            return False, f"differs: at {a.stage} step {a.step} the losses part by {gap:.1e}"
        gap = _gap_of(a, b, "grad_norm", LEAST_NORM)
        if not gap <= norms:
            what = f"the gradient norms part by {gap:.1e} of the norm"
            return False, f"differs: at {a.stage} step {a.step} {what}"
    if not compared:
        return False, "differs: the samples of the first step after resuming are not the same"
    return True, (
        f"the same up to rounding: what was loaded is what was saved, bit for bit; in the other layout the losses part by "
        f"{worst:.1e} at most over {compared} steps with the same samples (allowed: {first:g} at first, {later:g} after), the "
        f"gradient norms by less than {norms:g}"
    )


def _judge_gpu(outcome: Outcome) -> tuple[bool, str]:
    def spread(pairs: list[tuple[Step, Step]]) -> float:
        gaps = [_gap_of(a, b, k) for a, b in pairs for k in ("loss", "grad_norm")]
        return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)

    before, after = spread(outcome.first_half()), spread(outcome.resumed_pairs()[:1])
    bound = max(GPU_BOUND, 10 * before) if math.isfinite(before) else GPU_BOUND
    text = (
        f"what was loaded is what was saved, bit for bit; {first_difference(outcome)}. GPU kernels need not repeat themselves: before the save, computed twice, loss and "
        f"gradient norm part by {before:.1e}; at the first step after resuming by {after:.1e} (allowed: {bound:.1e})"
    )
    return after <= bound, f"{'the same up to rounding' if after <= bound else 'differs'}: {text}"


def first_difference(outcome: Outcome) -> str:
    """Return the first thing that is not the same in both runs."""
    if outcome.state:
        more = f", and {len(outcome.state) - 1} more" if len(outcome.state) > 1 else ""
        return f"right after loading, against what was saved: {outcome.state[0]}{more}"
    for a, b in outcome.pairs():
        where = f"{a.stage} step {a.step}"
        if (a.stage, a.step) != (b.stage, b.step):
            return f"after {where} of one run comes {b.stage} step {b.step} of the other"
        for key in {**a.values, **b.values}:
            if a.values.get(key) != b.values.get(key):
                return f"{key} of {where} is {a.values.get(key)!r} straight through and {b.values.get(key)!r} resumed"
        if a.samples != b.samples:
            return f"the samples of {where}"
    if len(outcome.straight) != len(outcome.resumed):
        return f"{len(outcome.straight)} steps straight through and {len(outcome.resumed)} resumed"
    if outcome.weights:
        name, gap = outcome.weights[0]
        return f"the trained weights, at first {name} (by up to {gap:.1e}), of {len(outcome.weights)} tensors that differ"
    return "nothing"


def _gap(a: float, b: float, least: float = 1.0) -> float:
    return abs(a - b) / max(least, abs(a), abs(b)) if a != b else 0.0


def _gap_of(a: Step, b: Step, what: str, least: float = 1.0) -> float:
    """The larger of policy's and critic's; 0 where neither run has it, no number where one has."""
    worst = 0.0
    for key in (what, f"critic/{what}"):
        here, there = a.values.get(key), b.values.get(key)
        if here is not None or there is not None:
            gap = math.nan if here is None or there is None else _gap(here, there, least)
            worst = gap if math.isnan(gap) else max(worst, gap)
    return worst


# the runs


def _shortened(recipe: Recipe, command: Command, steps: int) -> Recipe:
    """The recipe at so many steps, without evaluations, every sample on record."""
    made = recipe.model_copy(deep=True)
    made.run.name, made.run.trackers, made.resume = "verify", [], None
    made.run.samples_logged_per_step = made.train.prompts_per_step * made.rollout.samples_per_prompt
    made.train.eval_prompts = made.train.eval_every_steps = 0
    made.checkpoint.hf_every_steps = 0
    if command == "train":
        made.train.steps = steps
        made.critic.warmup_steps = min(made.critic.warmup_steps, steps // 4)
        if made.sft is not None:
            made.sft.steps = min(made.sft.steps, steps)
    elif made.sft is not None:
        made.sft.steps, made.sft.stop_at_loss = steps, None
    return made


def _variant(recipe: Recipe, directory: Path, *, every: int) -> Recipe:
    made = recipe.model_copy(deep=True)
    made.run.dir, made.checkpoint.every_steps, made.checkpoint.on_error = directory, every, "stop"
    made.checkpoint.keep_last = 2  # what is loaded is compared when the run is over
    return made


def _run(
    recipe: Recipe, command: Command, stop_after: int | None, log: Path, again: Path | None = None
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_in_process, args=(recipe, command, stop_after, log, again, "PYTHONSAFEPATH" in os.environ)
    )
    log.touch()  # to be read even of a process that is killed before it opens it
    # It is `python -c`, which begins in the working directory.
    with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):
        process.start()
    try:
        process.join()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated):  # Ctrl-C it gets itself
            process.terminate()
        process.join()
        raise
    if process.exitcode:
        said = log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
        told = "\n".join(said[-15:]) or f"it said nothing; its exit code is {process.exitcode}"
        raise UserError(f"a run of verify-resume failed:\n{told}\nAll it said is in {log}")


def _in_process(
    recipe: Recipe, command: Command, stop_after: int | None, log: Path, again: Path | None, safe_path: bool
) -> None:
    if not safe_path:  # this process has been started: what a reward starts finds its modules as in any run
        del os.environ["PYTHONSAFEPATH"]
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from quintet.train.ppo import run_training
    from quintet.train.session import session
    from quintet.train.sft import run_tuning

    try:
        with interruptible(), session(recipe, command, stop_after) as s:
            if again is not None:
                s.saver.on_loaded = partial(_save_once_more, s.saver, again)
            (run_training if command == "train" else run_tuning)(s)
    except Stopped as stopped:
        print(stopped)
    except QuintetError as error:
        print(f"error: {error}")
        sys.stdout.flush()
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _save_once_more(saver: Saver, directory: Path, found: Checkpoint) -> None:
    """Write down what a run holds right after loading, to be compared with what was saved."""
    directory.mkdir(parents=True)
    stored = (REFERENCE,) if found.reference is not None else ()
    for role in (*saver.trained_roles(found.manifest.stage), *stored):
        errors = saver.controller.roles[role].save(directory / role)
        errors = errors or saver.controller.checkpoint_finished([role], wait=True)[1]
        if errors:
            raise UserError(errors[0])


def _only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


# what they left


def _steps(run: Path) -> list[Step]:
    texts: dict[int, Any] = {}
    for sample in read_jsonl(run / "samples.jsonl"):
        told = [sample[key] for key in ("prompt", "response", "reward", "finish")]
        texts.setdefault(sample["step"], hashlib.blake2b(digest_size=6)).update(repr(told).encode())
    return [
        Step(
            line["stage"],
            line["step"],
            {key: line[key] for key in COMPARED if line.get(key) is not None},
            texts[line["step"]].hexdigest() if line["stage"] == "rl" else "",
        )
        for line in read_metrics(run / "metrics.jsonl")
        if "loss" in line
    ]


def _compare_states(saved: Checkpoint, again: Path) -> list[str]:
    """What a run held after loading that was not as it was saved: of every role that learns, and of the reference policy if it is
    stored."""
    from quintet.engine.checkpoint.compare import differences

    found = differences(saved.policy, again / POLICY)
    if (saved.path / CRITIC).is_dir():
        found += [f"critic: {one}" for one in differences(saved.path / CRITIC, again / CRITIC)]
    if saved.reference is not None:
        found += [f"reference policy: {one}" for one in differences(saved.reference, again / REFERENCE)]
    return found


def _compare_weights(straight: Path, resumed: Path) -> tuple[list[tuple[str, float]], tuple[str, str]]:
    """Tensors that differ, and a fingerprint of all weights of each directory."""
    import torch
    from safetensors import safe_open

    where: list[dict[str, Path]] = [{}, {}]
    for files, directory in zip(where, (straight, resumed), strict=True):
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
    marks = [hashlib.blake2b(digest_size=8) for _ in where]
    differ = [(name, float("inf")) for name in sorted(where[0].keys() ^ where[1].keys())]
    for name in sorted(where[0].keys() & where[1].keys()):
        tensors = []
        for mark, files in zip(marks, where, strict=True):
            with safe_open(files[name], framework="pt") as file:
                tensors.append(file.get_tensor(name))
            mark.update(name.encode() + tensors[-1].flatten().view(torch.uint8).numpy().tobytes())
        a, b = tensors
        if a.shape != b.shape or not bool((a == b).all()):
            gap = float((a.float() - b.float()).abs().max()) if a.shape == b.shape else float("inf")
            differ.append((name, gap))
    return differ, (marks[0].hexdigest(), marks[1].hexdigest())
