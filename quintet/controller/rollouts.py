"""Who generates, seen from the controller: what controller and hand-over ask of rollouts, and those in the trainer's processes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from quintet.controller.messages import SampleInfo
from quintet.controller.sample_store import Place
from quintet.controller.verbs import Backend, Rollout
from quintet.controller.weight_check import Proof
from quintet.observe.memory import GIB
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.rollout.base import Part, Request, Sampling
from quintet.sync.rank_fingerprints import RankFingerprints

if TYPE_CHECKING:  # they bring Ray
    from quintet.cluster.calls import PendingCall
    from quintet.cluster.group import WorkerGroup

P = ParamSpec("P")
T = TypeVar("T")
Heard = Callable[[int, int, list[SampleInfo]], None]
"""Told of a group that is finished: the rollout, its place in that one's share, and its samples."""


class Call(NamedTuple):
    """A call of `generate`, as rollouts are asked. shares: by rollout its requests. name: under which samples are kept, those of `forget`
    no longer. watch: called while they are waited for; heard: told of each group as it finishes."""

    shares: Mapping[int, list[Request]]
    sampling: Sampling
    name: str
    forget: list[str]
    watch: Callable[[], None]
    heard: Heard


class Generating(NamedTuple):
    """A call of `generate` on its way. owners: ranks that tell what comes of it, and listen beside it."""

    group: WorkerGroup
    call: PendingCall[Any]
    name: str
    owners: list[int]


class Rollouts(ABC):
    """Copies of the rollout, numbered; each keeps the samples that it generated last."""

    colocated: bool
    apart: bool
    """Whether they have processes of their own."""

    def __init__(self) -> None:
        self._under_way: list[Generating] = []
        self._held = False
        self._speaking = threading.Lock()
        """Held by one word at a time, and while calls start: a word takes the place of one that is not heard yet."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of rollouts."""

    @abstractmethod
    def ask(self, verb: Callable[Concatenate[Any, P], T], phase: str) -> Callable[P, dict[int, list[T]]]:
        """Return a verb of all that are there: what each rank answers, by rollout."""

    # generation

    @abstractmethod
    def generate(self, call: Call) -> list[int]:
        """Generate each rollout's share of the requests. Returns the rollouts that did; one that died meanwhile, where it may, did not."""

    def posted(self) -> int:
        """Return how many sequences are finished in the call under way."""
        return sum(one.group.posted(one.owners) for one in self._under_way)

    def pause(self) -> None:
        """Hold what is under way, beside the call that waits for it, and start nothing; of any thread."""
        with self._speaking:
            self._held = True
            if not self._interject(Backend.pause):
                self.ask(Backend.pause, phase="pause")()

    def hold(self) -> None:
        """Start nothing until `resume`, once a call under way has ended."""
        with self._speaking:
            self._held = True
            self.ask(Backend.pause, phase="pause")()

    def resume(self) -> None:
        """Go on after `pause` or `hold`."""
        with self._speaking:
            if self._held and not self._interject(Backend.resume):
                self.ask(Backend.resume, phase="resume")()
            self._held = False

    def abort(self) -> None:
        """Give up what is under way: its samples end with the tokens they have."""
        with self._speaking:
            self._interject(Backend.abort)

    def _interject(self, verb: Callable[[Any], None]) -> bool:
        """Say a verb beside the calls under way; False where there are none."""
        calls, word = self._under_way, verb.__name__.rpartition(".")[2]
        if not calls:
            return False
        with ThreadPoolExecutor(len(calls)) as pool:
            return any(pool.map(lambda one: one.group.interject(*one[1:3], word, one.owners), calls))

    @abstractmethod
    def slice_samples(
        self, chosen: list[list[list[Place]]], layers: list[list[int] | None]
    ) -> list[list[Any]]:
        """Cut kept samples: by rollout and receiver, calls and positions, and by receiver the layers whose routes it gets, numbered
        among those with experts; references to what each receiver gets."""

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return what the first of them makes of these tokens: see `Rollout.score`."""
        return self.ask(Backend.score, phase="generate")(sequences)[0][-1]

    def counts(self) -> dict[str, float]:
        """Return what they counted since the last time, summed: see `Rollout.metrics`."""
        found: dict[str, float] = {}
        for ranks in self.ask(Backend.metrics, phase="counts")().values():
            for name, value in ranks[0].items():
                found[name] = found.get(name, 0.0) + value
        return found

    def memory(self) -> list[dict[str, float | None]]:
        """Return memory peaks of ranks that do nothing else."""
        return []

    # the devices change hands: see `quintet.controller.colocation`

    def missing(self) -> bool:
        """Return whether one is not there: not started yet, or lost."""
        return False

    def start(self) -> None:  # noqa: B027  (of those that live and die with the trainer's ranks none is ever missing)
        """Start those that are missing."""

    def sleep(self, level: int) -> int:
        """Give up the devices: see `Rollout.sleep`; bytes of all ranks."""
        return sum(map(sum, self.ask(Backend.sleep, phase="sleep")(level).values()))

    def wake(self, part: Part) -> int:
        """Take the devices again: see `Rollout.wake`; bytes of all ranks."""
        return sum(map(sum, self.ask(Backend.wake, phase="wake")(part).values()))

    @abstractmethod
    def mark_weights_updated(self) -> None:
        """Note that the trainer has taken a step, or new master weights."""

    @abstractmethod
    def take_weights(self) -> dict[str, float]:
        """Bring the present weights to all that are there, and prove it; metrics."""

    def probe(self) -> dict[str, float]:
        """Prove by log-probs what could not be read back; metrics."""
        return {}


class InProcessRolloutGroup(Rollouts):
    """Rollouts in the trainer's processes: one a dp rank of the rollout's layout."""

    colocated = True
    apart = False

    def __init__(self, workers: WorkerGroup, recipe: schema.Recipe, proof: Proof) -> None:
        super().__init__()
        self._workers, self._proof = workers, proof
        self._travel = not placement_of(recipe).shares_weights
        self._coords = workers.all(Rollout.coords)()
        last = max(c["pp"] for c in self._coords)
        owners = [r for r, c in enumerate(self._coords) if (c["tp"], c["cp"], c["pp"]) == (0, 0, last)]
        self._owners = sorted(owners, key=lambda rank: self._coords[rank]["dp"])
        self._ranks = [
            [rank for rank, at in enumerate(self._coords) if at["dp"] == dp] for dp in range(self.count)
        ]

    @property
    def count(self) -> int:
        return len(self._owners)

    def ask(self, verb: Callable[Concatenate[Any, P], T], phase: str) -> Callable[P, dict[int, list[T]]]:
        def asked(*args: P.args, **kwargs: P.kwargs) -> dict[int, list[T]]:
            told = self._workers.all(verb, phase=phase)(*args, **kwargs)
            return {number: [told[rank] for rank in ranks] for number, ranks in enumerate(self._ranks)}

        return asked

    def generate(self, call: Call) -> list[int]:
        generate = self._workers.stream(Rollout.generate, phase="generate")
        with self._speaking:
            shares = [call.shares[c["dp"]] for c in self._coords]
            pending = generate.submit(shares, sampling=call.sampling, call=call.name, forget=call.forget)
            self._under_way = [Generating(self._workers, pending, call.name, self._owners)]
        pending.heard = lambda rank, group: call.heard(self._coords[rank]["dp"], *group)
        pending.result(call.watch)
        self._under_way = []
        return list(call.shares)

    def slice_samples(
        self, chosen: list[list[list[Place]]], layers: list[list[int] | None]
    ) -> list[list[Any]]:
        sliced = self._workers.each(Rollout.slice_samples, num_returns=1 + len(chosen[0]))
        parts = sliced([chosen[c["dp"]] for c in self._coords], layers)
        return [list(parts[rank][1:]) for rank in self._owners]

    def mark_weights_updated(self) -> None:
        if self._travel:
            self._proof.changed()

    def take_weights(self) -> dict[str, float]:
        if not self._travel:  # the proof is that both are one storage
            return {}
        began = time.perf_counter()
        came = sum(self._workers.all(Rollout.update_weights, phase="sync")(None))
        told = {"sync/seconds": time.perf_counter() - began, "sync/gib": came / GIB}
        return told | self._proof.of(self._fingerprints)

    def _fingerprints(self, beside: PendingCall[Any]) -> dict[str, list[RankFingerprints]]:
        from quintet.cluster.calls import results  # with Ray, as all copies in another layout are

        told, _ = results([self._workers.all(Rollout.fingerprints, phase="sync").submit(), beside])
        return {
            f"the rollout of dp rank {dp}": [told[rank] for rank in ranks]
            for dp, ranks in enumerate(self._ranks)
        }

    def counts(self) -> dict[str, float]:
        return {}  # native ones count nothing: they are not asked
