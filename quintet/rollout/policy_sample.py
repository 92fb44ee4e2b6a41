"""A sample from the policy's log-probs alone, for back ends that tell one log-prob a token."""

from __future__ import annotations

import math
from collections.abc import Callable

from quintet.data.text_pieces import before_stop
from quintet.errors import QuintetError
from quintet.rollout.base import Sample, Sampling


def policy_sample(
    response_ids: list[int],
    policy_logprobs: list[float],
    finish: str,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
) -> Sample:
    """Return the sample, with what follows from the policy's log-probs (the temperature applied, nothing cut).

    The model's own are the same at temperature 1, and where sampling is greedy; those sampled under are the same where
    nothing is cut, and 0 where sampling is greedy. What does not follow is None.

    Raises QuintetError for log-probs that are no numbers, or not one a token.
    """
    if len(policy_logprobs) != len(response_ids) or not all(map(math.isfinite, policy_logprobs)):
        raise QuintetError(
            f"the rollout's engine told {len(policy_logprobs)} log-probs of {len(response_ids)} tokens, "
            f"{sum(not math.isfinite(one) for one in policy_logprobs)} of them no numbers: nothing can be trained on these"
        )
    text = before_stop(decode(response_ids), sampling.stop)
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    raw = policy_logprobs if sampling.temperature in (0, 1) else None
    drawn = [0.0] * len(policy_logprobs) if sampling.temperature == 0 else None if cut else policy_logprobs
    return Sample(response_ids, drawn, policy_logprobs, raw, finish, text)
