"""Accuracy on held-out prompts: sampled as in training (mean over several samples), and greedy beside it."""

from __future__ import annotations

from quintet.controller.samples import Samples
from quintet.train.session import Session


def evaluate(s: Session, step: int) -> dict[str, float]:
    """Evaluate the present policy and record it as the state after `step` steps; {} where nothing is held out."""
    if s.inputs.eval is None or s.inputs.reward is None:
        return {}
    prompts = list(s.inputs.eval)
    count = s.recipe.train.eval_samples_per_prompt
    with s.observer.phase("evaluate"):
        seed = f"{s.recipe.run.seed}/eval"
        with s.controller.generating():
            sampled = s.controller.generate(prompts, s.sampling(), count, seed, title="evaluation, sampled")
            greedy = s.controller.generate(
                prompts, s.sampling(greedy=True), 1, seed, title="evaluation, greedy"
            )
        s.controller.reward(sampled)
        s.controller.reward(greedy)
    metrics = {
        "accuracy": sampled.mean(),
        "greedy": greedy.mean(),
        f"pass_at_{count}": _any_right(sampled),
        "response_tokens": sum(g.response_tokens for g in sampled.generated) / len(sampled.generated),
    }
    if any("well_formed" in r.metrics for r in sampled.rewards):
        metrics["well_formed"] = sampled.mean("well_formed")
    for part in (sampled, greedy):
        for say in (part.timed_out, part.failed):
            if (zeros := say(s.recipe.reward.function)) is not None:
                s.observer.note(f"evaluation after step {step}: {zeros}")
    s.observer.evaluation(step, metrics | s.controller.memory())
    return metrics


def _any_right(samples: Samples) -> float:
    """Share of prompts with at least one sample of reward 1 or more."""
    right = {g for g, r in zip(samples.groups, samples.rewards, strict=True) if r.reward >= 1}
    return len(right) / len(samples.prompts)
