"""Seconds by phase on a clock of our own, and memory peaks of real processes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quintet.observe import memory
from quintet.observe.memory import PhasePeaks, Tree, combine_peaks, memory_peaks
from quintet.observe.phases import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_an_inner_phase_takes_from_the_outer() -> None:
    clock = Clock()
    phases = PhaseTimer(clock)
    clock.now += 1
    with phases("train"):
        clock.now += 2
        with phases("sync"):
            clock.now += 4
        clock.now += 8
    assert phases.lap() == ({"train": 10.0, "sync": 4.0}, 15.0)
    with phases("train"):
        clock.now += 16
    clock.now += 32
    assert phases.lap() == ({"train": 16.0}, 48.0)
    assert phases.totals == {"train": 26.0, "sync": 4.0}
    assert phases.elapsed() == 63.0


def test_a_lap_inside_a_phase_splits_it() -> None:
    clock = Clock()
    phases = PhaseTimer(clock)
    with phases("warm-up"):
        clock.now += 1
        assert phases.lap() == ({"warm-up": 1.0}, 1.0)
        clock.now += 2
    assert phases.lap() == ({"warm-up": 2.0}, 2.0)


def test_the_phase_an_error_left_is_remembered() -> None:
    phases = PhaseTimer()
    with pytest.raises(ValueError), phases("step"), phases("generate"):
        raise ValueError
    assert phases.failed_in == "generate"


def test_own_peak_counts_memory_given_back_already() -> None:
    code = (
        "from quintet.observe.memory import memory_peaks\nbefore = memory_peaks()['host_gib']\n"
        "block = bytearray(200 * 2**20)\nblock[::4096] = b'x' * len(block[::4096])\ndel block\n"
        "print(memory_peaks()['host_gib'] - before)"
    )
    grown = float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    assert 0.15 < grown < 0.3


def test_peaks_of_ranks_combine() -> None:
    ranks = [{"host_gib": 1.0, "device_gib": 5.0}, {"host_gib": 2.0, "device_gib": 4.0}]
    assert combine_peaks(ranks) == {"memory/host_gib": 3.0, "memory/device_gib": 5.0}
    cpu = memory_peaks()
    assert cpu["host_gib"] is not None
    assert combine_peaks([cpu, cpu])["memory/host_gib"] == 2 * cpu["host_gib"]
    phases = [{"train_host_gib": 1.0, "train_device_gib": value} for value in (3.0, 4.0)]
    told = combine_peaks([*phases, {"sync_device_gib": None}])
    assert told["memory/train_host_gib"] == 2.0
    assert (told["memory/train_device_gib"], told["memory/sync_device_gib"]) == (4.0, None)
    assert combine_peaks([]) == {"memory/host_gib": None, "memory/device_gib": None}
    # One that trains holds memory while another generates, and the other way about.
    beside = [
        {"train_host_gib": 5.0, "resting_host_gib": 3.0},
        {"generate_host_gib": 2.0, "resting_host_gib": 1.0},
    ]
    told = combine_peaks(beside)
    assert (told["memory/train_host_gib"], told["memory/generate_host_gib"]) == (6.0, 5.0)
    assert "memory/resting_host_gib" not in told
    assert "memory/resting_host_gib" not in combine_peaks([cpu])


@contextmanager
def child_with(mib: int) -> Iterator[None]:
    """A process below this one that holds so much."""
    code = f"block = b'x' * ({mib} * 2**20)\nprint('ready', flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield
    finally:
        child.communicate("\n")


def test_host_memory_counts_children() -> None:
    tree = Tree(every_s=0)
    alone = tree.resident()
    with child_with(100):
        with_child = tree.resident()
    assert with_child > alone + 0.09
    assert tree.resident() < with_child


def test_processes_are_looked_for_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks: also at the end of a step, by the tree that phases have."""
    clock, looked = Clock(), list[float]()

    class Table:
        def children(self, recursive: bool) -> list[object]:
            looked.append(clock.now)
            clock.now += 0.03
            return []

    monkeypatch.setattr(memory.psutil, "Process", Table)
    monkeypatch.setattr(memory.time, "monotonic", clock)
    monkeypatch.setattr(memory, "EVERY_S", 60.0)  # no other thread looks
    monkeypatch.setattr(memory, "_peak_of", lambda process: 1.0)
    monkeypatch.setattr(memory, "_resident_of", lambda process: 1.0)
    peaks = PhasePeaks("cpu")
    for _ in range(15):
        with peaks("generate"):
            clock.now += 0.5
        memory_peaks(peaks.tree)
        clock.now += 0.5
    assert looked == [100.0, pytest.approx(110, abs=1)]


def test_what_a_rank_has_started_counts_as_its_own() -> None:
    """As vLLM's processes do, below the rollout's."""
    peaks = PhasePeaks("cpu", walk_s=0)
    with peaks("train"):
        pass
    before = memory_peaks()
    with child_with(200), peaks("generate"):
        beside = memory_peaks()
    told = peaks.take()
    for name in ("host_gib", memory.RESTING):
        assert beside[name] > before[name] + 0.19, name
    assert told["generate_host_gib"] > told["train_host_gib"] + 0.19


def test_each_phase_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [1.0]
    monkeypatch.setattr(memory, "device_in_use", lambda device: used[0])
    peaks = PhasePeaks("cuda:0", walk_s=0)
    with peaks("train"):
        used[0] = 5.0  # of another process, for a while
        time.sleep(4 * memory.EVERY_S)
        used[0] = 2.0
    with peaks("save"):
        used[0] = 9.0
    used[0] = 4.0
    with peaks("checkpoint"):
        pass
    used[0] = 3.0
    with child_with(200), peaks("generate"):  # this process may reuse what earlier tests have left resident
        time.sleep(4 * memory.EVERY_S)
    told = peaks.take()
    assert [told[f"{one}_device_gib"] for one in ("train", "checkpoint", "generate")] == [5.0, 4.0, 3.0]
    assert told["generate_host_gib"] > told["train_host_gib"] + 0.1
    assert len(told) == 6
    assert peaks.take() == {}
    with pytest.raises(ValueError), peaks("train"):
        raise ValueError
    used[0] = 8.0
    time.sleep(4 * memory.EVERY_S)
    assert peaks.take()["train_device_gib"] == 3.0
