"""The order in which memory and weights change hands, as the trainer's ranks and the rollouts are asked."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.controller.colocation import DeviceHandover
from quintet.controller.worker import PolicyWorker
from quintet.errors import Stopped, UserError, WorkerFailure
from quintet.recipe.offload import KINDS
from quintet.recipe.schema import Recipe, Rollout
from tests.cluster.asked import AskedRanks

BYTES = 3_000_000_000


class Asked(AskedRanks):
    """Trainer and rollouts that write down what they are asked. lost: how many of the next calls lose a rollout."""

    apart = True

    def __init__(self, placement: str = "colocated") -> None:
        self.colocated = placement == "colocated"
        self.order: list[str] = []
        self.there = False
        self.lost: set[str] = set()
        self.to_come: list[float | None] = []

    def answer(self, name: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        self.to_come += [kwargs["to_come"]] if name == "offload" else []
        self._note(" ".join([name, *args[0]]) if args else name)
        time.sleep(0.01)
        return (BYTES, 0.5) if name == "came" else BYTES

    def missing(self) -> bool:
        return not self.there

    def start(self) -> None:
        self.order.append("start")
        self.there = True

    def sleep(self, level: int) -> int:
        self._note(f"sleep {level}")
        time.sleep(0.01)
        return BYTES

    def wake(self, part: str) -> int:
        self._note(f"wake {part}")
        return 0  # as of a KV cache that is made when it is first needed

    def pause(self) -> None:
        self._note("pause")

    def hold(self) -> None:
        self._note("hold")

    def resume(self) -> None:
        self._note("resume")

    def abort(self) -> None:
        self._note("abort")

    def mark_weights_updated(self) -> None:
        self._note("look at masters")

    def take_weights(self) -> dict[str, float]:
        self._note("weights")
        return {"sync/seconds": 1.0, "sync/gib": 2.0}

    def probe(self) -> dict[str, float]:
        self._note("probe")
        return {}

    def _note(self, what: str) -> None:
        if what in self.lost:
            self.lost.discard(what)
            self.there = False
        self.order.append(what)

    def taken(self) -> list[str]:
        """What was asked since, but for what came beside something else."""
        order, self.order = self.order, []
        return [what for what in order if what != "came"]


def lines(logs: Path) -> list[tuple[Any, Any, str]]:
    """GB, GB/s and event of each line; None where nothing moved."""
    found = [
        re.fullmatch(r" *[\d.]+ s (?: *([\d.]+) GB  *([\d.]+) GB/s| {26})  (\S.*)", line)
        for line in (logs / "hybrid.log").read_text().splitlines()
    ]
    return [(one[1] and float(one[1]), one[2] and float(one[2]), one[3]) for one in found if one is not None]


TAKEN = [
    "offload grads optimizer",
    "wake weights",
    "weights",
    "offload params",
    "wake kv_cache",
    "resume",
    "probe",
]
GIVEN = ["sleep 2", "onload"]
STARTED = ["offload grads optimizer params", "start", *GIVEN]


def handover(
    asked: Asked, tmp_path: Path, away: float = 1.0, level: int = 2, **rollout: Any
) -> DeviceHandover:
    recipe = Recipe(rollout=Rollout(own_processes=True, **rollout))
    shares = dict.fromkeys(KINDS, away)
    return DeviceHandover(  # type: ignore[arg-type]
        asked, asked, recipe, shares, level, lambda name: nullcontext(), tmp_path / "hybrid.log"
    )


def test_the_rollout_is_awake_only_while_training_state_is_away(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path)
    assert asked.taken() == STARTED
    with one.generating():
        assert asked.taken() == TAKEN
        one.ready()
        assert asked.taken() == []
    assert asked.taken() == GIVEN
    one.mark_weights_updated()
    assert asked.order == ["came", "look at masters"]
    asked.taken()
    with one.generating():
        assert asked.taken() == TAKEN
    assert one.metrics == {"sync/seconds": 1.0, "sync/gib": 2.0}
    assert "came" not in asked.order, "it is told once"
    told = lines(tmp_path)
    assert [event for _, _, event in told[5:12]] == [
        "training state left: grads, optimizer",
        "rollouts woke: weights",
        "weights brought",
        "training state left: params",
        "rollouts woke: kv_cache",
        "rollouts sleep",
        "training state is back: grads, params",
    ]
    assert told[12] == (BYTES / 1e9, 2 * BYTES / 1e9, "training state is back: optimizer")
    for gb, rate, event in told:
        if event == "weights brought":
            assert (gb, rate) == (2.147, 2.15)
        elif "woke" in event or "started" in event:
            assert gb is rate is None
        else:
            assert gb == BYTES / 1e9
            assert 0 < rate <= gb / 0.01


def test_whether_there_is_room_for_a_rollout_is_looked_at_while_it_sleeps(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Awake it holds a part of its share already, which is no longer free."""
    asked = Asked()
    one = handover(asked, tmp_path)
    with one.generating():
        pass
    assert asked.to_come == [0.5, 0.5, None]
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.device = "cuda"
    worker.roles = SimpleNamespace(offload=lambda kinds: 7)  # type: ignore[assignment]
    total, emptied = 100 << 30, list[int]()
    for free, to_come, empties in (
        *((54, 0.5, 0), (20, None, 0), (53, 0.5, 1), (90, None, 1)),
        *((4, 0.0, 0), (3, None, 0), (3, 0.0, 1)),
    ):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda free=free: (free << 30, total))
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(1))
        emptied.clear()
        assert worker.offload((), to_come=to_come) == 7
        assert len(emptied) == empties, (free, to_come)


def test_a_rollout_in_the_trainer_sleeps_from_the_start(tmp_path: Path) -> None:
    asked = Asked()
    asked.apart, asked.there = False, True
    one = handover(asked, tmp_path)
    assert asked.taken() == ["sleep 2"]
    with one.generating():
        assert asked.taken() == TAKEN
    assert asked.taken() == GIVEN


def test_a_run_that_is_told_to_stop_at_once_waits_for_nobody(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path)
    asked.taken()
    with pytest.raises(Stopped), one.generating():
        raise Stopped("ended by SIGTERM")
    assert asked.taken() == TAKEN


def test_a_run_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    one = handover(Asked(), logs)
    shutil.rmtree(logs)
    with (
        pytest.raises(UserError, match=r"hybrid\.log: No such file or directory\. The run directory"),
        one.generating(),
    ):
        pass


def test_what_is_kept_in_sleep_is_not_brought_again(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path, level=1)
    with one.generating():
        pass
    asked.taken()
    with one.generating():
        assert [what for what in asked.taken() if what in ("weights", "probe")] == []
    one.mark_weights_updated()
    with one.generating():
        assert "weights" in asked.taken()


def test_training_state_comes_back_when_the_body_raises(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path)
    asked.taken()
    with pytest.raises(UserError, match="a reward"), one.generating():
        raise UserError("a reward")
    assert asked.taken() == [*TAKEN, "abort", *GIVEN]
    with pytest.raises(WorkerFailure), one.generating():
        raise WorkerFailure("rank 0 died")
    assert asked.taken() == TAKEN


@pytest.mark.parametrize("lost", ["wake weights", "weights", "resume", "probe"])
def test_one_that_dies_on_the_way_is_started_and_all_begins_anew(tmp_path: Path, lost: str) -> None:
    asked = Asked()
    one = handover(asked, tmp_path)
    asked.taken()
    asked.lost = {lost}
    with one.generating():
        assert asked.taken() == [*TAKEN, *GIVEN, *STARTED, *TAKEN]
        asked.there = False  # while generating
        one.ready()
        assert asked.taken() == [*GIVEN, *STARTED, *TAKEN]


def test_a_rollout_that_has_room_beside_training_is_held_and_keeps_what_it_has(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path, away=0.0, level=0)
    assert asked.taken() == ["offload", "start", "hold"]
    for _ in range(2):
        with one.generating():
            assert asked.taken() == ["offload", "weights", "offload", "resume", "probe"]
        assert asked.taken() == ["hold"]
        with one.generating():
            assert asked.taken() == ["offload", "offload", "resume"]
        assert asked.taken() == ["hold"]
        one.mark_weights_updated()
        assert asked.taken() == ["look at masters"]
    assert asked.to_come[:3] == [0.5, 0.0, None], "it takes its share once, when it starts"
    with one.generating():
        asked.taken()
        one.mark_weights_updated()
        one.ready()
        assert asked.taken() == [
            "look at masters",
            "pause",
            "offload",
            "weights",
            "offload",
            "resume",
            "probe",
        ]
    one.mark_weights_updated()
    asked.lost = {"weights"}
    with one.generating():
        assert asked.taken().count("start") == 1
    assert asked.to_come[-3:] == [0.5, 0.0, None]


@pytest.mark.parametrize("rollout", [{"level": 1}, {"level": 0}, {"placement": "separate", "ranks": 1}])
def test_one_made_anew_gets_weights_that_the_others_have(tmp_path: Path, rollout: dict[str, Any]) -> None:
    asked = Asked(rollout.get("placement", "colocated"))
    one = handover(asked, tmp_path, **rollout)
    with one.generating():
        asked.taken()
        asked.there = False
        one.ready()
        taken = asked.taken()
        assert "start" in taken
        assert "weights" in taken[taken.index("start") :]


def test_memory_that_torch_keeps_is_given_to_other_processes_in_any_case(tmp_path: Path) -> None:
    asked = Asked()
    one = handover(asked, tmp_path, away=0.0)
    asked.taken()
    with one.generating():
        assert asked.taken() == ["offload", "wake weights", "weights", "offload", *TAKEN[4:]]


def documented(first: str) -> list[str]:
    """The events of the hand-over in the docs that begins so."""
    docs = (Path(__file__).parents[2] / "docs" / "hybrid.md").read_text()
    blocks = [
        re.findall(r"^ +[\d.]+ s .{26}  (.*)$", block, re.MULTILINE)
        for block in re.findall(r"```text\n(.*?)```", docs, re.DOTALL)
    ]
    (found,) = [events for events in blocks if events and events[0] == first]
    return found


SEPARATE = ["pause", "sleep 0", "weights", "wake kv_cache", "resume", "probe"]


def test_a_separate_rollout_takes_weights_at_once_and_has_no_kv_cache_meanwhile(tmp_path: Path) -> None:
    asked = Asked("separate")
    one = handover(asked, tmp_path, placement="separate", ranks=1)
    assert asked.taken() == ["start"]
    with one.generating():
        assert asked.taken() == SEPARATE
    one.mark_weights_updated()
    assert asked.taken() == ["look at masters", *SEPARATE]
    with one.generating():
        assert asked.taken() == []
    told = [event for _, _, event in lines(tmp_path)]
    assert told[0] == "rollouts started"
    assert told[1:] == 2 * documented("rollouts paused")


@pytest.mark.parametrize("lost", ["sleep 0", "weights", "wake kv_cache"])
def test_a_separate_one_that_dies_on_the_way_leaves_no_other_asleep(tmp_path: Path, lost: str) -> None:
    asked = Asked("separate")
    one = handover(asked, tmp_path, placement="separate", ranks=1)
    with one.generating():
        pass
    asked.taken()
    asked.lost = {lost}
    one.mark_weights_updated()
    assert asked.taken() == ["look at masters", *SEPARATE, "start", *SEPARATE]
