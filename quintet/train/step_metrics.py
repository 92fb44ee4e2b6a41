"""What a step of reinforcement learning came to, as metrics and as samples to be read or replayed."""

from __future__ import annotations

import statistics

from quintet.algorithms.value_loss import explained_variance
from quintet.controller.replay import pack, replay_of
from quintet.rewards.result import means
from quintet.train.mismatch import mismatch_metrics
from quintet.train.session import Session
from quintet.train.steps import Step, Update


def record(s: Session, step: Step) -> None:
    """Tell the observer what a step came to."""
    samples = step.samples
    assert samples is not None, "the step was not taken to its end"
    scored = step.rewards
    rewards = [one.reward for one in scored]
    responses = [g.response_tokens for g in samples.generated]
    # First what the reward function told beside the reward: no name of its own can replace one of ours.
    metrics: dict[str, float | None] = {
        **means(scored),
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/timed_out": sum(one.timed_out for one in scored),
        "reward/failed": sum(one.failure is not None for one in scored),
        "response_tokens/mean": statistics.fmean(responses),
        "response_tokens/max": max(responses),
        **_policy(step.updates.get("policy")),
        **(_critic(step.updates["critic"]) if "critic" in step.updates else {}),
        # A critic is a baseline of its own.
        "frac_groups_zero_std": None if "critic" in step.updates else samples.equal_groups(),
        "truncated": statistics.fmean(g.finish == "length" for g in samples.generated),
        "tokens": sum(g.tokens for g in samples.generated),
        "tokens_trained": sum(responses),
        **step.metrics,
        **s.controller.counted(),
        **s.controller.handover.metrics,
        **s.controller.memory(),
    }
    replayed = step.updates["policy"].replayed if "policy" in step.updates else {}
    if replayed:
        s.observer.replay(step.number, pack(replay_of(step.number, s.sampling(), samples, replayed)))
    s.observer.samples(step.number, samples.shown(s.recipe.run.samples_logged_per_step))
    # Last: the report so far has the step's samples.
    s.observer.step(step.number, metrics, total=s.recipe.train.steps)


def _policy(update: Update | None) -> dict[str, float | None]:
    """None where only the critic has learnt."""
    if update is None:
        return dict.fromkeys(("loss", "mismatch/kl_k3", "grad_norm", "lr"))
    means = update.tally.means()
    return {
        "loss": update.loss,
        **mismatch_metrics(update.tally),
        "kl/reference": means.get("ref_kl"),
        "entropy": means["entropy"],
        "clip/low_fraction": means["clip_low"],
        "clip/high_fraction": means["clip_high"],
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        **update.metrics,
    }


def _critic(update: Update) -> dict[str, float | None]:
    means = update.tally.means()
    return {
        "critic/loss": update.loss,
        "critic/clip_fraction": means["value_clip"],
        "critic/explained_variance": explained_variance(means),
        "critic/returns": means["returns"],
        "critic/grad_norm": update.grad_norm,
        "critic/lr": update.lr,
    }
