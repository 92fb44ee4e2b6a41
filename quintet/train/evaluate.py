"""Rewards of held-out prompts, and accuracy where the reward says what is correct: sampled as in training (mean over several samples),
and greedy beside it."""

from __future__ import annotations

from quintet.rewards.result import means
from quintet.train.session import Session

LOOK_PROMPTS, LOOK_TOKENS, LOOK_CHARACTERS = 2, 32, 60


def look(s: Session, when: str) -> None:
    """Tell how the present policy begins to answer a few prompts, held-out ones where there are: soon, and for no more than
    `LOOK_TOKENS` each. when: what the lines begin with."""
    prompts = list(s.inputs.eval or s.inputs.train or ())[:LOOK_PROMPTS]
    longest = min(LOOK_TOKENS, s.recipe.rollout.max_response_tokens)
    with s.observer.phase("evaluate"), s.controller.generating():
        samples = s.controller.generate(
            prompts,
            s.sampling(greedy=True),
            1,
            f"{s.recipe.run.seed}/look",
            [[longest]] * len(prompts),
            title=when,
            scored=False,
        )
        s.controller.counted()  # of training's steps alone
    for prompt, made in zip(prompts, samples.generated, strict=True):
        cut = made.finish == "length" or len(made.text) > LOOK_CHARACTERS
        begins, ends = made.text[:LOOK_CHARACTERS], prompt.text[-LOOK_CHARACTERS:]
        before = "… " if ends != prompt.text else ""
        s.observer.note(f"{when}: {before}{ends!r} is answered by {begins!r}{' …' if cut else ''}")


def evaluate(s: Session, step: int, *, show_all: bool = False) -> dict[str, float]:
    """Evaluate the present policy and record it as the state after `step` steps; {} where nothing is held out. show_all: record all
    of its samples, and not as many as of a step of training."""
    if s.inputs.eval is None or s.inputs.reward is None:
        return {}
    prompts = list(s.inputs.eval)
    count = s.recipe.train.eval_samples_per_prompt
    with s.observer.phase("evaluate"):
        seed = f"{s.recipe.run.seed}/eval"
        with s.controller.generating():
            expected = s.lengths.expected("eval", prompts)
            sampled = s.controller.generate(
                prompts, s.sampling(), count, seed, expected=expected, title="evaluation, sampled"
            )
            s.lengths.heard("eval", prompts, [one.response_tokens for one in sampled.generated])
            expected = s.lengths.expected("eval", prompts)
            greedy = s.controller.generate(
                prompts, s.sampling(greedy=True), 1, seed, expected=expected, title="evaluation, greedy"
            )
        s.controller.reward(sampled)
        s.controller.reward(greedy)
        s.controller.counted()  # greedy drafts are accepted more often: they are not the next step's
    metrics: dict[str, float] = {}
    told = means(sampled.rewards)
    if "accuracy" in told:
        metrics |= {
            "accuracy": told.pop("accuracy"),
            "greedy": means(greedy.rewards).get("accuracy", 0.0),
            f"pass_at_{count}": sampled.any_correct(),
        }
    metrics |= {
        "reward": sampled.mean(),
        "greedy_reward": greedy.mean(),
        "response_tokens": sum(g.response_tokens for g in sampled.generated) / len(sampled.generated),
        **told,
    }
    for part in (sampled, greedy):
        for zeros in part.unscored(s.recipe.reward.function):
            s.observer.note(f"evaluation after step {step}: {zeros}")
    logged = None if show_all else s.recipe.run.samples_logged_per_step
    s.observer.samples(step, sampled.shown(logged, "eval") + greedy.shown(logged, "greedy"))
    s.observer.evaluation(step, metrics | s.controller.memory())
    return metrics
