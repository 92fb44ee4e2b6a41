"""How far rollout and trainer are apart in the log-probs of a step's tokens, and when that ends a run.

Compared are `rollout_logprobs` with the trainer's `old_logprobs`, those before the step's first update, of all tokens of all
mini-batches on all ranks: with the same weights nothing but rounding parts them.
"""

from __future__ import annotations

import math
from pathlib import Path

from quintet.algorithms.aggregation import Tally
from quintet.errors import RolloutMismatch
from quintet.recipe import schema

PERCENTILES = {"ratio_p1": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99, "ratio_p99.9": 0.999}


def mismatch_metrics(tally: Tally) -> dict[str, float]:
    """Return what a step tells of the mismatch of rollout and trainer: the metrics `mismatch/…` of docs/mismatch.md."""
    means, maxima = tally.means(), tally.maxima()
    log_ratios = tally.quantiles("rollout_log_ratio", PERCENTILES.values())
    ratios = {name: math.exp(value) for name, value in zip(PERCENTILES, log_ratios, strict=True)}
    told = {
        "logprob_gap_mean": means["rollout_logprob_gap"],
        "logprob_gap_max": maxima["rollout_logprob_gap"],
        "kl_k1": means["rollout_kl_k1"],
        "kl_k3": means["rollout_kl_k3"],
        **ratios,
        "over_threshold": means["rollout_over_threshold"],
    }
    return {f"mismatch/{name}": value for name, value in told.items()}


def check_mismatch(wanted: schema.Mismatch, tally: Tally, step: int, run: Path) -> None:
    """Raise RolloutMismatch where the step's KL is above `mismatch.stop_above_kl`, or is no number."""
    level = wanted.stop_above_kl
    if level is None:
        return
    found = mismatch_metrics(tally)
    kl = found["mismatch/kl_k3"]
    if kl <= level:
        return
    raise RolloutMismatch(
        f"step {step}: rollout and trainer have parted. The KL (k3) of their log-probs is {kl:.3g} nats a token, above "
        f"mismatch.stop_above_kl={level:g}; the largest |Δ log-prob| is {found['mismatch/logprob_gap_max']:.3g}, and "
        f"{found['mismatch/over_threshold']:.1%} of the tokens are above mismatch.token_threshold={wanted.token_threshold:g}. "
        + (
            f"To find out where they part: quintet diagnose mismatch {run}"
            if wanted.replay_samples_per_step
            else "To find out where they part, keep samples: mismatch.replay_samples_per_step is 0"
        )
    )
