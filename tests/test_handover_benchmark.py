"""The benchmark of hand-overs: what it reads out of a run, and its plumbing on a CPU."""

from __future__ import annotations

import pytest

from benchmarks import handover
from tests.benchmark_runs import benchmark

LOG = """\
     1.000 s                             rollouts started
     2.000 s    40.000 GB    10.00 GB/s  training state left: grads, optimizer
     2.500 s     3.000 GB    30.00 GB/s  rollouts woke: weights
     2.600 s                             weights are shared
     3.000 s    40.000 GB    10.00 GB/s  training state left: grads, optimizer
     4.000 s    20.000 GB    40.00 GB/s  training state left: grads, optimizer
     5.000 s    20.000 GB    20.00 GB/s  training state left: grads, optimizer
     6.000 s    20.000 GB    50.00 GB/s  training state is back: optimizer
"""


def test_moves_are_read_with_their_seconds() -> None:
    found = handover.moves_of(LOG)
    assert found == {
        "training state left: grads, optimizer": [(4.0, 40.0), (4.0, 40.0), (0.5, 20.0), (1.0, 20.0)],
        "rollouts woke: weights": [(pytest.approx(0.1), 3.0)],
        "training state is back: optimizer": [(0.4, 20.0)],
    }


def test_what_is_told_leaves_the_first_steps_out_and_stands_beside_the_link() -> None:
    steps = [
        {"seconds/step": 2.0, "seconds/generate": 1.0, "seconds/train": 0.5, "seconds/scatter": 0.3},
        {"seconds/step": 4.0, "seconds/generate": 3.0, "seconds/train": 0.5, "seconds/scatter": 0.1, "lr": 1},
        {"seconds/step": 3.0, "seconds/generate": 2.0, "seconds/train": None, "seconds/scatter": 0.0},
    ]
    rates = {handover.LEFT: 55.0, handover.BACK: 60.0}
    found = {name: (value, unit, beside) for name, value, unit, beside in handover.figures(steps, LOG, rates)}
    assert found["step_s"] == (3.0, "s", None)
    assert found["generate_s"] == (2.0, "s", None)
    assert found["train_s"] == (0.5, "s", None)
    # 0.25, 0.125 and a third: what is in no phase, and the scatter, of each step
    assert found["controller_share"] == (pytest.approx(0.25), "fraction", None)
    assert found["training_state_left_grads_optimizer_s"] == (1.0, "s", None)
    assert found["training_state_left_grads_optimizer_gb_s"] == (20.0, "GB/s", 55.0)
    assert found["training_state_is_back_optimizer_gb_s"] == (50.0, "GB/s", 60.0)
    assert found["rollouts_woke_weights_s"] == (pytest.approx(0.1), "s", None)
    assert "rollouts_woke_weights_gb_s" not in found


@pytest.mark.nightly
def test_a_run_is_measured_on_a_cpu() -> None:
    printed = benchmark("handover", "--tiny", "--steps", "2")
    for metric in (
        "step_s",
        "train_s",
        "controller_share",
        "training_state_is_back_optimizer_gb_s",
        "rollouts_sleep_s",
    ):
        assert f"  {metric} " in printed
