"""Ray's own processes die, or the controller does: one message at most, and nothing stays behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quintet.runs.fsync import Scratch
from tests.security.endings import Run
from tests.train.runs import TINY


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.nightly)])
def test_a_process_of_rays_own_is_named_with_its_log(name: str, tmp_path: Path) -> None:
    recipe = [
        "recipes/laptop_demo.yaml",
        *TINY,
        "cluster.ranks=1",
        "train.steps=100000",
        "train.prompts_per_step=8",
    ]
    run = Run(
        ["quintet", "train", *recipe, "checkpoint.every_steps=1", f"run.dir={tmp_path / 'runs'}"], tmp_path
    )
    run.until("  3/")  # the first step is saved by then
    run.look()
    (victim,) = run.of(name)
    victim.kill()
    assert run.end(within_s=10) == 3, run.said
    said = run.said[run.said.index("error:") :]
    assert run.said.count("error:") == 1
    told = re.match(rf"error: Ray's {name} died: killed by SIGKILL\. Its log is kept as (\S+\.out)", said)
    assert told
    assert Path(told[1]).read_text()
    assert "resume=auto goes on from the last checkpoint" in said
    assert "Event stats" not in run.said  # as Ray's own words go
    run.nothing_left(within_s=1)
    assert list(tmp_path.glob("quintet-*")) == []


@pytest.mark.slow
def test_ray_that_dies_while_the_controller_is_busy_ends_it_too(tmp_path: Path) -> None:
    """It would wait a minute in a call of Ray's, and be ended by it."""
    run = Run(["tests.cluster.controller", "busy"], tmp_path)
    run.until("calling")
    run.look()
    run.of("gcs_server")[0].kill()
    assert run.end(within_s=10) == 3
    assert run.said.startswith("calling\nerror: Ray's gcs_server died: killed by SIGKILL.")
    assert run.said.count("died") == 1
    run.nothing_left(within_s=5)


@pytest.mark.slow
def test_an_end_that_takes_long_is_not_cut_short(tmp_path: Path) -> None:
    run = Run(["tests.cluster.controller", "slow end"], tmp_path)
    run.until("calling")
    run.look()
    run.of("gcs_server")[0].kill()
    assert run.end(within_s=15) == 1
    assert "\nforgotten\nstopped\n" in run.said
    assert "RayFailure: Ray's gcs_server died" in run.said
    run.nothing_left(within_s=5)


@pytest.mark.slow
def test_everything_ends_with_the_controller_also_what_is_stopped(tmp_path: Path) -> None:
    run = Run(["tests.cluster.controller", "stop"], tmp_path)
    run.until("calling")
    run.look()
    names = [one.name() for one in run.family]
    assert names.count("sleep") == 2  # of a rank each
    run.process.kill()
    run.nothing_left(within_s=15)
    assert len(list(tmp_path.glob("quintet-logs-*"))) == 1
    with Scratch(parent=str(tmp_path)):  # as the next run makes one
        assert list(tmp_path.glob("quintet-logs-*")) == []
