"""What the probe makes of processes, without ranks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from quintet.cluster import process_probe as probe
from quintet.cluster.failures import Failure


class Process:
    """As psutil shows one."""

    def __init__(self, pid: int, status: str, *children: Process) -> None:
        self.pid, self._status, self._children = pid, status, list(children)

    def status(self) -> str:
        if self._status == "gone":
            raise psutil.NoSuchProcess(self.pid)
        return self._status

    def name(self) -> str:
        return f"engine-{self.pid}"

    def children(self, *, recursive: bool) -> list[Process]:
        return self._children


def rank_process(tmp_path: Path, log_begins: int = 0) -> probe.RankProcess:
    """Of a process that is no more."""
    log, stacks = tmp_path / "rollout-0-rank-0.log", tmp_path / "rollout-0-rank-0.stacks"
    there = probe.Location("here", "127.0.0.1", (), cores=1, pid=0, created=0.0, oom_kills=None)
    return probe.RankProcess(0, there, log, log_begins, stacks)


def test_a_child_that_ends_meanwhile_hides_no_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Process(1, psutil.STATUS_SLEEPING, Process(2, "gone"), Process(3, psutil.STATUS_STOPPED))
    monkeypatch.setattr(probe, "_find", lambda process: family)
    assert probe.stopped([rank_process(tmp_path)]) == {0: "its process engine-3 (3) is stopped (SIGSTOP)"}


def test_a_log_is_told_from_where_this_life_of_the_rank_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_find", lambda process: None)
    log = rank_process(tmp_path).log
    log.write_text("Watchdog caught collective operation timeout — of the life before\n", encoding="utf-8")
    now = rank_process(tmp_path, probe.size(log))
    assert probe.inspect([now])[0].log_tail == ""
    with log.open("a") as file:
        file.write("loading weights\n")
    report = probe.inspect([now])[0]
    assert report.log_tail == "loading weights"
    assert not Failure.of_death(0, report).timed_out
