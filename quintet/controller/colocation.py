"""Who has the devices: training or generation. Memory changes hands here, and weights with it.

    with handover.generating():
        ...

Within the block rollouts are awake, with the present weights; outside of it training state is on the devices. Where the two
share devices, the order is always the same, and every step of it is told to `hybrid.log`, among the run's logs:

    gradients and optimizer state leave → weights of the rollout wake → weights are brought, and proved → parameters leave, if
    the recipe says so → the KV cache wakes   …   the rollout sleeps → parameters and gradients come back, and optimizer state beside
    what follows: rewards, scoring and the first gradients; where roles take turns, beside these gradients alone

The rollout sleeps, its KV cache released, whenever training state is there: so nothing is held twice, and buckets are
allocated while neither KV cache nor optimizer state is. At level 0, which needs room for all of it, the rollout is held and keeps what it
has. What the trainer's allocator holds without need leaves as well, where what the rollout is about to take has no room beside it. A rollout
on devices of its own takes weights as soon as there are new ones, holds what is under way meanwhile, and has no KV cache either while
there are buckets beside it:

    the rollout pauses → its KV cache sleeps → weights are brought, and proved → the KV cache wakes → the rollout goes on
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.controller.rollouts import Rollouts
from quintet.controller.verbs import Policy
from quintet.errors import QuintetError, Stopped, SyncFailure, UserError, WorkerFailure
from quintet.recipe import schema
from quintet.recipe.derived import roles_of
from quintet.recipe.offload import KINDS

if TYPE_CHECKING:  # they bring Ray
    from quintet.cluster.group import WorkerGroup


class DeviceHandover:
    """Hands the devices over. shares: of what training keeps, by kind, that leave; level: of the rollout's sleep. phase: times a part of the
    run; log: where each step of a hand-over is written."""

    def __init__(
        self,
        policy: WorkerGroup,
        rollouts: Rollouts,
        recipe: schema.Recipe,
        shares: Mapping[str, float],
        level: int,
        phase: Callable[[str], AbstractContextManager[None]],
        log: Path,
    ) -> None:
        self._policy, self._rollouts, self._phase, self._log = policy, rollouts, phase, log
        self._shares, self._level = shares, level
        self._room = recipe.rollout.memory_fraction
        # With several roles another one than the policy may be on the devices, and the policy not.
        self._several = bool(roles_of(recipe))
        self._weights_stale = True
        self._awake = not rollouts.colocated
        self._coming = False
        self._began = time.monotonic()
        self.metrics: dict[str, float] = {}
        """Of the last time weights were brought."""
        self._start_missing()
        if rollouts.colocated and not rollouts.apart:
            rollouts.sleep(self._level)  # made with the trainer, and not needed before it generates

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep rollouts awake with the present weights; training state is away as the recipe says, and comes back, also
        when the body raises: what is under way is given up then. After a process has died, or SIGTERM, nothing is brought back: the run ends, and whatever
        generates is not waited for."""
        self.ready()
        try:
            yield
        except (WorkerFailure, SyncFailure, Stopped):
            raise
        except Exception:
            with suppress(QuintetError):  # the first error tells more
                self._rollouts.abort()
                self._wake_training()
            raise
        self._wake_training()

    def mark_weights_updated(self) -> None:
        """Mark the weights as new: a rollout on its own devices takes them now, one that sleeps when it wakes."""
        self._tell_what_came()
        self._weights_stale = True
        self._rollouts.mark_weights_updated()
        if not self._rollouts.colocated:
            self.ready()

    def ready(self) -> None:
        """Have every rollout awake with the present weights; one that died is made anew."""
        while True:
            if self._rollouts.missing():
                if self._awake:
                    self._wake_training()
                self._start_missing()
            self._wake_rollouts()
            if not self._rollouts.missing():
                return

    def _start_missing(self) -> None:
        """Start rollouts while training state is away, for they take memory at once; and put them to sleep."""
        if not self._rollouts.missing():
            return
        self._offload_training(*KINDS, to_come=self._room)
        while self._rollouts.missing():
            self._rollouts.start()
        self._log_event("rollouts started")
        self._weights_stale = True
        self._wake_training()

    def _wake_rollouts(self) -> None:
        rollouts = self._rollouts
        if self._awake and not self._weights_stale:
            return
        sleeps = bool(self._level) or not rollouts.colocated
        if self._awake:
            rollouts.pause()
            self._log_event("rollouts paused")
            if sleeps:
                self._tell("rollouts sleep: kv_cache", lambda: rollouts.sleep(0))
        self._tell_what_came()
        self._offload_training("grads", "optimizer", to_come=self._room if sleeps else 0.0)
        if rollouts.colocated and sleeps:
            self._tell("rollouts woke: weights", lambda: rollouts.wake("weights"))
        came = self._weights_stale
        if came:
            with self._phase("sync"):
                self.metrics = rollouts.take_weights()
            moved = self.metrics.get("sync/gib", 0.0) * (1 << 30)
            seconds = self.metrics.get("sync/seconds", 0.0)
            self._log_event("weights brought" if self.metrics else "weights are shared", moved, seconds)
            self._weights_stale = False
        self._offload_training("params", to_come=None)
        if sleeps:
            self._tell("rollouts woke: kv_cache", lambda: rollouts.wake("kv_cache"))
        rollouts.resume()
        if not rollouts.colocated:
            self._log_event("rollouts go on")
        self._awake = True
        if came:
            with self._phase("sync"):
                self.metrics |= rollouts.probe()

    def _wake_training(self) -> None:
        rollouts = self._rollouts
        if not rollouts.colocated:
            return
        if self._level:
            self._tell("rollouts sleep", lambda: rollouts.sleep(self._level))
        else:
            rollouts.hold()
        self._awake = False
        self._weights_stale = self._weights_stale or self._level == 2
        if any(self._shares.values()):
            onload = self._policy.all(Policy.onload, phase="reload")
            first = [kind for kind in KINDS if self._shares[kind] and kind != "optimizer"]
            if first:
                self._tell(f"training state is back: {', '.join(first)}", lambda: sum(onload()))
            else:
                onload()
            self._coming = bool(self._shares["optimizer"])

    def _tell_what_came(self) -> None:
        """Write down the optimizer state that came back beside rewards, scoring and training."""
        if self._coming:
            self._coming = False
            told = self._policy.all(Policy.came, phase="reload")()
            moved, seconds = sum(moved for moved, _ in told), max(seconds for _, seconds in told)
            if moved:
                self._log_event("training state is back: optimizer", moved, seconds)

    def _offload_training(self, *kinds: str, to_come: float | None) -> None:
        if not self._rollouts.colocated:
            return
        kinds = tuple(kind for kind in kinds if self._shares[kind])
        offload = partial(self._policy.all(Policy.offload, phase="offload"), to_come=to_come)
        if kinds:
            self._tell(f"training state left: {', '.join(kinds)}", lambda: sum(offload(kinds)))
        elif self._several or self._rollouts.apart:
            offload(kinds)  # rollouts in other processes get what torch holds without need

    def _tell(self, event: str, move: Callable[[], int]) -> None:
        """Do a step of the hand-over, and write it down. move: returns the bytes, of all ranks, that left devices or came to them."""
        began = time.monotonic()
        moved = move()
        self._log_event(event, moved, time.monotonic() - began)

    def _log_event(self, event: str, moved: float = 0, seconds: float = 0.0) -> None:
        gb = moved / 1e9
        figures = f"{gb:9.3f} GB {gb / max(seconds, 1e-6):8.2f} GB/s" if moved else " " * 26
        try:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"{time.monotonic() - self._began:10.3f} s {figures}  {event}\n")
        except OSError as error:
            raise UserError(
                f"{self._log}: {error.strerror}. The run directory is needed for as long as the run lasts"
            ) from None
