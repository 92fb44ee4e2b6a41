"""engine.offload_*=auto on a rank: what its device comes to is what leaves it, and the run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cluster.local import LocalCluster
from quintet.controller.worker import PolicyWorker
from quintet.plan.offload import GIB
from quintet.recipe.schema import Recipe
from quintet.train import session as sessions
from tests.controller.test_cells import model_dir  # noqa: F401
from tests.train.runs import generate, run


@pytest.mark.parametrize(("gib", "leaves"), [(4.5, True), (64.0, False)])
def test_what_leaves_follows_from_the_smallest_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gib: float,
    leaves: bool,
) -> None:
    """On the one rank in this process, told that its device has so much: of 4.5 GiB the margin leaves 0.28."""
    monkeypatch.setattr(sessions, "_is_little", lambda *_: True)
    monkeypatch.setattr(PolicyWorker, "_devices", lambda self: (int(gib * GIB), "a GPU"))
    kept = ("rollout.sequences_per_rank=2048", "rollout.max_response_tokens=512")
    with run(tmp_path, "cluster.ranks=1", "cluster.device=auto", *kept) as s:
        generate(s)
        log = (s.controller.workers._cluster.log_dir / "hybrid.log").read_text()
        decided = s.controller.workers._worker.decisions()
    shares, level, why = decided.shares, decided.sleep_level, decided.why
    assert shares["params"] == 0.0, "the rollout reads them"
    assert level == 2
    assert bool(shares["grads"]) == leaves
    assert ("training state left: grads" in log) == leaves
    assert ("training state is back" in log) == leaves
    assert why is not None
    assert f"Of {gib} GiB" in why
    assert capsys.readouterr().out.count(why) == 1


@pytest.mark.parametrize(("gib", "level"), [(4.0, 2), (64.0, 0)])
def test_a_rank_tells_how_deep_rollouts_sleep_beside_its_device(
    tmp_path: Path,
    model_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    gib: float,
    level: int,
) -> None:
    monkeypatch.setattr(PolicyWorker, "_devices", lambda self: (int(gib * GIB), "a GPU"))
    recipe = Recipe.model_validate({"model": {"path": str(model_dir)}, "rollout": {"backend": "vllm"}})
    with LocalCluster(recipe.cluster, log_dir=tmp_path) as cluster:
        rank = cluster.group(PolicyWorker, 1, name="policy", recipe=recipe, model_dir=model_dir)
        decided = rank.one(PolicyWorker.decisions)()
    assert decided.sleep_level == level
    assert ("stays awake" in decided.why) == (level == 0)
    assert decided.engine.backend == "portable"
