"""Ranks of a benchmark find around them what those of a run find."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.sides import Side


@pytest.mark.parametrize(
    ("ranked", "given", "threads"), [(True, None, "1"), (True, "4", "4"), (False, None, None)]
)
def test_a_rank_has_one_thread_as_beside_a_gpu(monkeypatch, ranked, given, threads) -> None:
    found = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: found.append(env))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    Side("some", ["module"], ranks=2, timeout_s=1, ranked=ranked)
    assert [env.get("OMP_NUM_THREADS") for env in found] == [threads, threads]
