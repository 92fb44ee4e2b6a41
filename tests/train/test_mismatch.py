"""What a step tells of the agreement of rollout and trainer, and when that ends the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.kl import mismatch
from quintet.errors import RolloutMismatch
from quintet.recipe.schema import Mismatch
from quintet.train.mismatch import check_mismatch, mismatch_metrics


def tally(*log_ratios: float) -> Tally:
    """Of a step whose trainer log-probs are so far above the rollout's."""
    made, mask = Tally(), torch.ones(len(log_ratios))
    rollout = torch.full((len(log_ratios),), -2.0, dtype=torch.float64)
    made.add(mismatch(rollout, rollout + torch.tensor(log_ratios), mask, 0.5), mask)
    return made


def test_metrics_are_of_all_the_steps_tokens() -> None:
    found = mismatch_metrics(Tally().merge([tally(0.0, 0.2), tally(-0.6, 0.0)]))
    wanted = {
        "logprob_gap_mean": 0.2,
        "logprob_gap_max": 0.6,
        "kl_k1": 0.1,
        "kl_k3": (math.expm1(0.2) - 0.2 + math.expm1(-0.6) + 0.6) / 4,
        "over_threshold": 0.25,
    }
    for name, value in wanted.items():
        assert found.pop(f"mismatch/{name}") == pytest.approx(value)
    ratios = {"ratio_p1": math.exp(-0.6), "ratio_p50": 1.0, "ratio_p99": 1.0, "ratio_p99.9": 1.0}
    assert found == pytest.approx({f"mismatch/{name}": value for name, value in ratios.items()}, rel=0.01)


def test_a_step_above_the_level_ends_the_run() -> None:
    parted, run = tally(0.0, 3.0), Path("runs/one")
    check_mismatch(Mismatch(), parted, 7, run)
    check_mismatch(Mismatch(stop_above_kl=9), parted, 7, run)
    with pytest.raises(
        RolloutMismatch, match=r"step 7: .* 8\.04 nats .*=8; .* 3, and 50\.0% .*mismatch runs/one"
    ):
        check_mismatch(Mismatch(stop_above_kl=8), parted, 7, run)
    kept_none = Mismatch(stop_above_kl=8, replay_samples_per_step=0)
    with pytest.raises(RolloutMismatch, match=r"keep samples: mismatch\.replay_samples_per_step is 0$"):
        check_mismatch(kept_none, parted, 7, run)
    with pytest.raises(RolloutMismatch, match="nan"):
        check_mismatch(Mismatch(stop_above_kl=1000), tally(0.0, math.nan), 7, run)
