"""vLLM's processes die in a run: the rollout's own, and one that vLLM has started beside it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from quintet.errors import WorkerFailure
from quintet.train.session import Session
from tests.patience import BUSY
from tests.rollout.vllm.conftest import DEVICE
from tests.train.runs import generate, kill_soon, process_of, run, when_it_syncs, where

VLLM = [
    *("rollout.backend=vllm", "rollout.mode=server", "rollout.sequences_per_rank=16", "cluster.ranks=1"),
    *("rollout.max_response_tokens=6", "engine.offload_optimizer=1", f"cluster.device={DEVICE}"),
    "rollout.memory_fraction=0.1",
]
RESTARTED = re.compile(r"(rollout-0 rank 0 (?:died|failed) in \w+: .*)\. It is started anew \(1 of 3\)")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def rollout(s: Session) -> int:
    return process_of(s, "rollout-0")


def core(s: Session) -> int:
    """The process that vLLM itself has started for its engine. It may not have got its title yet, nor get one."""
    patience = time.monotonic() + 5 * BUSY
    while True:
        children = {one.pid: one.cmdline() for one in psutil.Process(rollout(s)).children(recursive=True)}
        found = [pid for pid, command in children.items() if is_core(" ".join(command))]
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < patience, f"rollout {rollout(s)} has the children {children}"
        time.sleep(0.1)


def is_core(command: str) -> bool:
    return "VLLM::EngineCore" in command or "multiprocessing.spawn import spawn_main" in command


@contextmanager
def lost(s: Session, whose: Callable[[Session], int], when: str) -> Iterator[None]:
    """In the block, which is to generate once, that process dies."""
    if when == "sleep":
        os.kill(whose(s), signal.SIGKILL)
    elif when == "sync":
        s.controller.handover._weights_stale = True
        when_it_syncs(s, lambda: kill_soon(whose(s)))
    else:
        ready = s.controller.handover.ready

        def then() -> None:
            s.controller.handover.ready = ready  # type: ignore[method-assign]
            ready()
            kill_soon(whose(s))

        s.controller.handover.ready = then  # type: ignore[method-assign]
    yield


def test_the_samples_of_a_step_are_the_same_whatever_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with run(tmp_path, *VLLM, "rollout.restart=true") as s:
        monkeypatch.setattr(s.observer, "note", said.append)
        s.controller.rollouts._cluster.say = said.append  # type: ignore[attr-defined]
        samples = generate(s)
        assert [g.response_tokens > 0 for g in samples.generated] == [True] * 12
        for whose, when in ((core, "generate"), (core, "sleep"), (rollout, "sync")):
            said.clear()
            before = rollout(s)
            with lost(s, whose, when):
                again = generate(s)
            assert where(again) == where(samples)
            if DEVICE == "cpu":  # on a GPU what is computed depends on the batch it is computed in
                assert again.generated == samples.generated
            else:
                assert [g.response_tokens > 0 for g in again.generated] == [True] * 12
            assert rollout(s) != before
            (told,) = [found[1] for note in said if (found := RESTARTED.fullmatch(note))]
            assert f" in {'wake' if when == 'sleep' else when}: " in told
            assert ("died in" if whose is rollout else "vLLM: ") in told


def test_without_restart_the_run_ends_by_the_process_that_died(tmp_path: Path) -> None:
    pids: list[int] = []

    def lose_it() -> None:
        with run(tmp_path, *VLLM) as s:
            generate(s)
            pids.append(core(s))
            with lost(s, core, "sleep"):
                generate(s)

    with pytest.raises(WorkerFailure) as caught:
        lose_it()
    assert re.match(
        rf"rollout-0 rank 0 failed in wake: vLLM: (VLLM::EngineCore|its engine) \(process {pids[0]}\) died\n\n"
        "With rollout.restart=true it would be started anew",
        str(caught.value),
    )
