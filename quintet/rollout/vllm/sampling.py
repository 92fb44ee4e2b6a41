"""Between quintet's words and vLLM's for sampling: parameters on the way in, samples on the way out.

vLLM tells one log-prob a token, and which one is fixed when its engine is made: `raw_logprobs` of the model's own
distribution (temperature 1, nothing cut), or `processed_logprobs` of the one sampled from. Training needs the policy's
(the temperature applied, nothing cut); what else follows from the one told is told too, the rest is None.
"""

from __future__ import annotations

from typing import Any, Literal

from quintet.errors import UserError
from quintet.recipe import schema
from quintet.rollout.base import Request, Sampling

Mode = Literal["raw_logprobs", "processed_logprobs"]


def mode_of(recipe: schema.Rollout) -> Mode:
    """Return which log-prob vLLM is to tell: raw where the temperature is 1 or greedy, which is the policy's own whatever is cut."""
    return "raw_logprobs" if recipe.temperature in (0, 1) else "processed_logprobs"


def check(sampling: Sampling, mode: Mode) -> None:
    """Raise UserError for a sampling whose policy's log-probs vLLM cannot tell in this mode."""
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    tells = sampling.temperature == 1 if mode == "raw_logprobs" else not cut
    if sampling.temperature != 0 and not tells:
        raise UserError(
            f"vLLM cannot tell the policy's log-probs at temperature {sampling.temperature} with top_p={sampling.top_p}, "
            f"top_k={sampling.top_k}, min_p={sampling.min_p} in an engine made for {mode}; generate with the recipe's "
            "temperature or greedily, and cut only at temperature 1"
        )


def parameters(sampling: Sampling, request: Request, number: int, seed: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for sample `number` of a request."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "max_tokens": request.limits(sampling)[number],
        "stop": list(sampling.stop),
        "stop_token_ids": [] if sampling.ignore_end else list(sampling.stop_token_ids),
        "ignore_eos": True,  # stop_token_ids say all that ends a response
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
    }


def own_logprobs(logprobs: Any) -> list[float]:
    """Return the tokens' own log-probs out of vLLM's flat form, in which each position begins with its own token. The first of a
    prompt has none."""
    if logprobs is None:
        return []
    ranges = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [logprobs.logprobs[start] for start, end in ranges if start < end]
