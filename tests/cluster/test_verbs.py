"""Verbs as typed values: what mypy says of mistakes with them, and what they are at run time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from quintet.cluster.group import WorkerGroup
from quintet.cluster.verbs import StandIn
from quintet.controller.verbs import Policy
from tests.cluster.workers import Light

ROOT = Path(__file__).parents[2]

MISTAKES = """
from quintet.cluster.calls import outcomes, results
from quintet.cluster.dispatch import megatron_compute
from quintet.cluster.group import WorkerGroup
from quintet.controller.replicas import RolloutReplicas
from quintet.controller.verbs import Backend, Policy, Rollout
from quintet.diagnose.mismatch import Ask
from quintet.diagnose.oracle_model import PlainWorker
from quintet.errors import QuintetError
from quintet.rollout.vllm.extension import Extension
from quintet.rollout.vllm.jobs import Engine
from quintet.sync.server import Served


def calls(group: WorkerGroup, copies: RolloutReplicas, engine: Engine, ask: Ask) -> None:
    group.all(Policy.scoer)  # attr-defined
    group.all("score")  # arg-type
    group.all(Policy.optimizer_step, phase="train")()  # call-arg
    group.all(Policy.optimizer_step)(role="critic", phase="train")  # call-arg
    group.all(Policy.optimizer_step)(role=1)  # arg-type
    norm: str = group.all(Policy.optimizer_step)(role="critic")[0].grad_norm  # assignment
    text: str = group.one(Policy.describe)()  # assignment
    group.each(Rollout.update_weights)([3])  # list-item
    group.each(Rollout.slice_samples)([[3]], [None])  # list-item
    group.each(Policy.logprobs, megatron_compute)([([[1]], [1], [], None)])  # call-arg
    served: list[str] = group.all(Policy.serve).submit().result()  # assignment
    mixed: list[list[Served]] = outcomes([group.all(Policy.serve).submit()])  # assignment
    copies.ask(Backend.sleep, phase="sleep")("deep")  # arg-type
    engine.rpc(Extension.fall_asleep, "deep")  # arg-type
    engine.rpc(Extension.wanted)  # attr-defined
    read: list[int] = engine.rpc(Extension.read_fingerprints)  # arg-type
    ask(PlainWorker.load, 3)  # arg-type


def right(group: WorkerGroup, copies: RolloutReplicas, engine: Engine) -> None:
    norm: float = group.all(Policy.optimizer_step, phase="train")(role="critic")[0].grad_norm
    text: list[str] = group.one(Policy.describe)()
    parts: list[tuple[object, ...]] = group.each(Rollout.slice_samples)([[[("call", 3)]]], [None])
    served: list[list[Served]] = results([group.all(Policy.serve).submit()])
    mixed: list[list[Served] | QuintetError] = outcomes([group.all(Policy.serve).submit()])
    copies.ask(Backend.sleep, phase="sleep")(level=2)
    engine.rpc(Extension.fall_asleep, 1)
"""


@pytest.mark.slow
def test_mypy_finds_each_mistake_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    planted = {
        (number, found[1])
        for number, line in enumerate(MISTAKES.splitlines(), 1)
        if (found := re.search(r"  # ([\w-]+)$", line))
    }
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    told = re.findall(r"mistakes\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {(int(number), kind) for number, kind in told} == planted, done.stdout + done.stderr
    assert len(planted) == 17


def test_a_stand_in_has_names_and_arrives_as_the_class() -> None:
    light = StandIn("tests.cluster.workers:Light")
    assert light.tell.__name__ == Light.tell.__name__
    assert cloudpickle.loads(cloudpickle.dumps(light)) is Light
    assert (Policy.__name__, Policy.score.__name__) == ("PolicyWorker", "score")
    with pytest.raises(AttributeError, match="PolicyWorker has no verb _text"):
        Policy._text  # noqa: B018


def test_a_verb_of_a_part_of_the_worker(quartet: WorkerGroup) -> None:
    peaks = StandIn("quintet.observe.memory:PhasePeaks", "peaks")
    assert peaks.take.__name__ == "peaks.take"
    assert all(isinstance(told, dict) for told in quartet.all(peaks.take)())
