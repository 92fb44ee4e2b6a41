"""A rank in the controller's own process: the same verbs and errors, and nothing of it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.cluster.lane import listening
from quintet.cluster.local import LocalCluster, LocalGroup
from quintet.cluster.progress import KEY_VARIABLE, Progress
from quintet.cluster.verbs import StandIn
from quintet.cluster.worker import Worker
from quintet.errors import OutOfMemory, UserError, WorkerFailure
from quintet.recipe.schema import Cluster as Settings

MOST = 1000
"""Steps that the memory suffices for."""
SETTINGS = Settings(ranks=1, device="cpu")


class Talker(Worker):
    """Speaks in all ways that a rank can."""

    def setup(self) -> None:
        super().setup()
        self.progress = Progress()
        self.said: list[str] = []

    def speak(self, how: str) -> str:
        print("words of the rank")
        warnings.warn("a warning of the rank", stacklevel=1)
        if how == "user":
            raise UserError("rollout.stop: never found")
        if how == "bug":
            raise KeyError("expert 7")
        if how == "no memory":
            raise MemoryError
        return how

    def steps(self, count: int) -> Iterator[Any]:
        with listening("steps", {"abort": lambda: self.said.append("abort")}):
            if count > MOST:
                raise MemoryError
            self.progress.begin()
            for step in range(count):
                self.progress(step + 1)
                yield step
        return count, "a reference"

    def environment(self) -> tuple[str | None, str | None, int]:
        import torch

        return os.environ.get("WORLD_SIZE"), os.environ.get("GLOO_SOCKET_IFNAME"), torch.get_num_threads()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalGroup]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with LocalCluster(SETTINGS, log_dir=tmp_path) as cluster:
        yield cluster.group(Talker, 1, name="policy")


def test_verbs_answer_as_those_of_a_worker_group(group: LocalGroup) -> None:
    assert group.all(Talker.speak)("a") == ["a"]
    assert group.one(Talker.speak)("a") == "a"
    assert group.each(Talker.speak)(["a"]) == ["a"]
    assert group.coords() == [{"tp": 0, "pp": 0, "cp": 0, "dp": 0}]


def test_a_stream_is_heard_as_it_comes_watched_and_interjected(group: LocalGroup) -> None:
    heard: list[Any] = []
    call = group.stream(Talker.steps).submit([3])

    def hear(rank: int, piece: int) -> None:
        heard.append((rank, piece, group.posted([0]), group.interject(call, "steps", "abort", [0])))

    call.heard = hear
    watched: list[int] = []
    assert call.result(lambda: watched.append(len(heard))) == [(3, "a reference")]
    assert heard == [(0, 0, 1, True), (0, 1, 2, True), (0, 2, 3, True)]
    assert watched == [0, 1, 2, 3]
    assert not group.interject(call, "steps", "abort", [0])


def test_what_hears_a_stream_raises_as_itself_and_the_call_is_over(group: LocalGroup) -> None:
    call = group.stream(Talker.steps).submit([3])

    def refuse(rank: int, piece: int) -> None:
        raise KeyError("the controller's own")

    call.heard = refuse
    with pytest.raises(KeyError, match="the controller's own"):
        call.result()
    assert not group.interject(call, "steps", "abort", [0])
    assert group.one(Talker.speak)("a") == "a"


def test_words_go_to_the_log_and_errors_are_told_as_a_ranks(
    group: LocalGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^rollout\.stop: never found$"):
        group.one(Talker.speak)("user")
    with pytest.raises(WorkerFailure, match="Rank 0 failed in generate: KeyError: 'expert 7'") as caught:
        group.one(Talker.speak, phase="generate")("bug")
    assert "in speak" in str(caught.value.traceback)
    print("words of the controller")
    assert capsys.readouterr() == ("words of the controller\n", "")
    group._log.flush()
    log = (tmp_path / "policy-rank-0.log").read_text()
    assert log.count("words of the rank\n") == 2
    assert "UserWarning: a warning of the rank" in log


def test_a_rank_without_memory_says_so_and_peaks_are_told_by_phase(group: LocalGroup) -> None:
    with pytest.raises(OutOfMemory, match=r"^Rank 0: out of memory in generate"):
        group.one(Talker.speak, phase="generate")("no memory")
    with pytest.raises(OutOfMemory, match=r"^Rank 0: out of memory in generate"):
        group.stream(Talker.steps, phase="generate").submit([MOST + 1]).result()
    assert group.one(Worker.memory)()["generate_host_gib"]
    assert group.stream(Talker.steps, phase="logprob").submit([1]).result()
    assert group.one(Worker.memory)()["logprob_host_gib"]
    deadline = time.monotonic() + 20
    while any(one.name == "memory peaks" for one in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread is left in the controller's process"
        time.sleep(0.01)


def test_a_rank_without_memory_in_setup_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(self: Talker) -> None:
        raise MemoryError

    monkeypatch.setattr(Talker, "setup", setup)
    with (
        pytest.raises(OutOfMemory, match=r"^Rank 0: out of memory in setup \(MemoryError\)\.$"),
        LocalCluster(SETTINGS, log_dir=tmp_path) as cluster,
    ):
        cluster.group(Talker, 1, name="policy")


def test_threads_are_the_users_or_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    for given, expected in (("3", 3), (None, len(os.sched_getaffinity(0)))):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        with LocalCluster(SETTINGS, log_dir=tmp_path) as cluster:
            group = cluster.group(Talker, 1, name="policy")
            assert group.one(Talker.environment)() == ("1", "lo", expected)
        assert torch.get_num_threads() == before
    assert "WORLD_SIZE" not in os.environ
    assert not torch.distributed.is_initialized()


def test_a_class_is_imported_where_it_is_made_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    import torch

    named: Any = StandIn("tests.cluster.test_local:Talker")
    with LocalCluster(SETTINGS, log_dir=tmp_path) as cluster:
        assert cluster.group(named, 1, name="policy").one(named.speak)("a") == "a"
    with (
        pytest.raises(WorkerFailure, match="Rank 0 failed in setup: TypeError"),
        LocalCluster(SETTINGS, log_dir=tmp_path) as cluster,
    ):
        cluster.group(named, 1, name="policy", surplus=1)
    assert not torch.distributed.is_initialized()


def test_it_needs_no_ray() -> None:
    code = "import sys, quintet.controller.controller, quintet.cluster.local; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
