"""A reward is tried before anything starts: on two prompts, with a response that nobody generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from quintet.data.prompts import Prompt
from quintet.errors import UserError
from quintet.recipe.schema import Reward as Settings
from quintet.rewards.load import RewardFunction
from quintet.rewards.pool import RewardPool, Unscored

PROMPTS = 2
RESPONSE = "Let me think. This response was made up, to try the reward. The answer is 42."


def try_reward(reward: RewardFunction, settings: Settings, prompts: Sequence[Prompt]) -> None:
    """Have a user's reward score a made-up response to the first prompts, in a process like those that will score the run's.

    With `reward.on_error=zero` it may fail at some of them. Built-in rewards are not tried.

    Raises:
        UserError: it fails, and how.
    """
    tried = prompts[:PROMPTS] if ":" in reward.spec else ()
    samples = [Unscored(one.text, RESPONSE, one.answer, one.source, one.row) for one in tried]
    forgiving = settings.model_copy(update={"on_error": "zero"})
    with TemporaryDirectory() as logs:
        try:
            with RewardPool(reward, forgiving, Path(logs), workers=1) as pool:
                results = pool.results([pool.submit(samples)]) if samples else []
        except UserError as error:
            raise UserError(_with_logs(str(error), Path(logs))) from None
        failed = [(one, r.failure) for one, r in zip(samples, results, strict=True) if r.failure is not None]
        if not failed or (settings.on_error == "zero" and len(failed) < len(results)):
            return
        sample, why = failed[0]
        why = _with_logs(why.rstrip(), Path(logs))
    raise UserError(
        f"reward.function was tried with a made-up response to {sample.source} before anything starts: {why}"
    )


def _with_logs(why: str, logs: Path) -> str:
    """The text with what it names a log for: that does not outlive the trial."""
    for log in logs.absolute().glob("*.log"):
        why = why.replace(f"in {log}", f"\n{log.read_text(errors='replace')[-4000:].rstrip()}")
    return why
