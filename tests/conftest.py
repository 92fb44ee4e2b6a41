"""What the whole test session shares: worker processes are started once."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import hypothesis
import pytest

from quintet.cluster.environment import FP32_PRODUCTS
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.oracle.pool import Pool

# An example's time is the machine's as much as the code's: a busy one must not fail a property.
hypothesis.settings.register_profile("quintet", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.load_profile("quintet")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it puts in the background, and so it would come to every process of a test: none could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.update(FP32_PRODUCTS | os.environ)  # as ranks have it

ROOMS_TOGETHER = {"cluster": "system", "end_to_end": "system", "oracle": "oracle"}
"""Rooms whose tests one worker runs, one after another: those of "system" look for processes left behind, those of
"oracle" share reference runs."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is there once all tests are collected stays: no collection of garbage looks at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `pytest -n 2`: a file's tests stay together, for the processes they share, and so do some rooms'."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return ROOMS_TOGETHER.get(PurePosixPath(file).parent.name, file)

        def schedule(self) -> None:
            super().schedule()
            # A worker begins its last test when it has another, or knows that there is none: one that takes a dead one's place
            # is told of neither, and would wait for ever.
            for node in self.nodes:
                while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                    self._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            # What the dead one has done goes back into the queue with the rest: taken for work, it would leave others waiting.
            work = self.assigned_work[node]
            self.assigned_work[node] = {name: unit for name, unit in work.items() if not all(unit.values())}
            return super().remove_node(node)

        def mark_test_pending(self, item: str) -> None:  # type: ignore[override]
            """Called to run the test again in which a worker died: `remove_node` has put it back already."""

    return ByFile(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for tests that need several ranks without Ray: `pool.run(function, world_size, ...)`."""
    pool = Pool(size=8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator["Cluster"]:  # noqa: F821, UP037  (Ray is imported only by tests that use it)
    """A local Ray for the session. `Cluster(other_settings)` within it shares its processes, not its settings."""
    from quintet.cluster.cluster import Cluster

    with Cluster(ClusterSettings(ranks=2, device="cpu", collective_timeout_s=240)) as cluster:
        yield cluster


@pytest.fixture
def families_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model families a test registers are forgotten after it, so that the next may use their names."""
    from quintet.models import family

    family.family_named("llama")  # the built-in ones first: they register once a process
    monkeypatch.setattr(family, "_FAMILIES", dict(family._FAMILIES))


_RENDERED: dict[tuple[str, str], list[str]] = {}


@pytest.fixture
def templates_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a command says: where conversations have been rendered by a template, no process is started to do it again."""
    from quintet.data import chat_template, prompts

    real = chat_template.render

    def render(template: Any, conversations: Any, variables: Any) -> list[str]:
        key = template.text, json.dumps([list(conversations), dict(variables)])
        if key not in _RENDERED:
            _RENDERED[key] = real(template, conversations, variables)
        return _RENDERED[key]

    for module in (chat_template, prompts):
        monkeypatch.setattr(module, "render", render)
