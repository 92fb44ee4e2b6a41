"""What a step of reinforcement learning came to, as metrics and as samples to be read or replayed."""

from __future__ import annotations

import statistics

from quintet.controller.controller import StepResult
from quintet.controller.replay import pack, replay_of
from quintet.controller.samples import Samples
from quintet.train.mismatch import mismatch_metrics
from quintet.train.session import Session


def record(s: Session, step: int, samples: Samples, result: StepResult) -> None:
    """Tell the observer what a step came to."""
    rewards = [r.reward for r in samples.rewards]
    responses = [g.response_tokens for g in samples.generated]
    means = result.tally.means()
    # First what the reward function told beside the reward: no name of its own can replace one of ours.
    metrics: dict[str, float | None] = {
        _metric(name): samples.mean(name) for name in sorted({n for r in samples.rewards for n in r.metrics})
    }
    metrics |= {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/timed_out": sum(r.timed_out for r in samples.rewards),
        "response_tokens/mean": statistics.fmean(responses),
        "response_tokens/max": max(responses),
        "loss": result.loss,
        **mismatch_metrics(result.tally),
        "kl/reference": means.get("ref_kl"),
        "entropy": means["entropy"],
        "clip/low_fraction": means["clip_low"],
        "clip/high_fraction": means["clip_high"],
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "frac_groups_zero_std": _alike(samples),
        "truncated": statistics.fmean(g.finish == "length" for g in samples.generated),
        "tokens": sum(g.tokens for g in samples.generated),
        "tokens_trained": sum(responses),
        **s.controller.counted(),
        **s.controller.handover.metrics,
        **s.controller.memory(),
    }
    if (late := samples.timed_out(s.recipe.reward.function)) is not None:
        s.observer.note(f"step {step}: {late}")
    s.observer.step(step, metrics, total=s.recipe.train.steps)
    if result.replayed:
        s.observer.replay(step, pack(replay_of(step, s.sampling(), samples, result.replayed)))
    s.observer.samples(step, samples.shown(s.recipe.run.samples_logged_per_step))


def _metric(name: str) -> str:
    """The metric of a number that the reward function returned; `well_formed` is a word of the house."""
    return name if name == "well_formed" else f"reward/{name}"


def _alike(samples: Samples) -> float:
    """Share of groups whose samples all got the same reward, and so teach nothing."""
    seen: dict[int, set[float]] = {}
    for group, scored in zip(samples.groups, samples.rewards, strict=True):
        seen.setdefault(group, set()).add(scored.reward)
    return statistics.fmean(len(rewards) == 1 for rewards in seen.values())
