"""Ranks of a benchmark find around them what those of a run find."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.sides import Side
from tests.patience import BUSY


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


@contextmanager
def side(*ranks: str, timeout_s: float = 100 * BUSY) -> Iterator[Side]:
    made = Side("some", ["tests.side_ranks", *ranks], ranks=len(ranks), timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.kill()


def test_answers_are_by_rank() -> None:
    with side("answers", "answers", "answers") as made:
        assert made.answer() == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@pytest.mark.parametrize("others", ["waits", "answers", "ends"])
def test_what_a_rank_says_of_its_failure_is_all_that_is_told(others: str) -> None:
    """At once, though another rank waits for it in a collective."""
    with side(others, "fails") as made:
        began = time.monotonic()
        if others == "ends":
            for rank in made._ranks:  # it ends because of the other
                select.select([rank.stdout], [], [], 50 * BUSY)
        with pytest.raises(SystemExit, match=r"^some, rank 1: out of memory in burst \(2 GiB\)\.$"):
            made.answer()
        assert time.monotonic() - began < 50 * BUSY


def test_the_log_of_a_rank_that_ends_or_is_silent_is_told() -> None:
    with side("waits", "ends") as made, pytest.raises(SystemExit, match=r"^some ended:\nnoise"):
        made.answer()
    with side("answers", "waits", timeout_s=1) as made, pytest.raises(SystemExit, match="was silent"):
        made.answer()


def test_the_log_of_a_rank_that_was_killed_while_it_waited_is_told() -> None:
    with side("answers") as made:
        made.answer()
        made._ranks[0].kill()
        made._ranks[0].wait()
        with pytest.raises(SystemExit, match=r"^some ended:\nnoise"):
            made.ask(do="burst")
