"""Seconds by phase on a clock of our own, and memory peaks of real processes."""

import subprocess
import sys

import pytest

from quintet.observe import PhaseTimer, combine_peaks, memory_peaks
from quintet.observe.memory import HostMemory


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
            assert phases.current == "sync"
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
    assert phases.current is None


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
    assert combine_peaks([]) == {"memory/host_gib": None, "memory/device_gib": None}


def test_host_memory_counts_children_and_keeps_the_peak() -> None:
    memory = HostMemory(every_s=0)
    alone = memory.look()
    code = "block = b'x' * (100 * 2**20)\nprint('ready', flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    with_child = memory.look()
    child.communicate("\n")
    assert with_child > alone + 0.09
    assert memory.look() == with_child
