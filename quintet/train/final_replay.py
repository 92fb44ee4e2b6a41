"""What a run leaves for `quintet diagnose mismatch` at its end: samples of the weights that are written then."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from quintet.controller.messages import RouteUse
from quintet.controller.replay import pack, replay_of
from quintet.errors import QuintetError, RayFailure, RolloutMismatch, SyncFailure, WorkerFailure
from quintet.runs.checkpoints import name_of
from quintet.train.mismatch import check_mismatch
from quintet.train.session import Session
from quintet.train.steps import Step

CLOSING_TOKENS = 64
"""Most response tokens of the last replay. A decode step of a few samples takes about as long as one of all: at full length this was as long
as the generation of a whole step."""


def closing_replay(s: Session, step: int) -> None:
    """Generate with the weights after `step`, the last one, and score; kept as the replay of the step that does not come."""
    count = s.recipe.mismatch.replay_samples_per_step
    if count == 0:
        return
    assert s.inputs.train is not None
    prompts, sampling = list(s.inputs.train)[:count], s.sampling()
    sampling = replace(sampling, max_response_tokens=min(sampling.max_response_tokens, CLOSING_TOKENS))
    with s.observer.phase("replay"):
        with s.controller.generating():
            seed = f"{s.recipe.run.seed}/replay"
            samples = s.controller.generate(prompts, sampling, 1, seed, scored=False)
        batch = s.controller.scatter(samples)
        routes: RouteUse | None = "rollout" if s.recipe.engine.replay_routes == "rollout" else None
        batch = batch | s.controller.policy.forward(batch, "old_logprobs", s.temperature, routes=routes)
        trained = s.controller.replayed(batch)
    s.observer.replay(step + 1, pack(replay_of(step + 1, sampling, samples, trained)))


def keep_final_replay(s: Session, step: int) -> None:
    """Run `closing_replay` of a run whose model is written: a process that dies now costs only the samples."""
    try:
        closing_replay(s, step)
    except (WorkerFailure, RayFailure, SyncFailure) as failure:
        told = failure.message.split("\n", 1)[0]
        s.observer.note(
            f"warning: no samples of the trained model are kept for quintet diagnose mismatch: {told}"
        )


def stop_on_mismatch(s: Session, step: Step) -> None:
    """End the run where rollout and trainer have parted further than the recipe allows; raises RolloutMismatch.

    The weights are written to hf/ before, and samples of them if the rollout still makes any, so that there is something to
    diagnose.
    """
    if "policy" not in step.updates:  # the critic learns alone
        return
    tally = step.updates["policy"].tally
    try:
        check_mismatch(s.recipe.mismatch, tally, step.number, s.observer.directory.path)
    except RolloutMismatch:
        with suppress(QuintetError):  # why the run ends matters more
            s.controller.save(s.observer.directory.hf / name_of("rl", step.number))
        with suppress(QuintetError):
            closing_replay(s, step.number)
        raise
