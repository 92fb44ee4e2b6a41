"""The verbs of the outer loop, spread over the ranks: generate, reward, train, sync, save.

The controller plans from lengths and rewards alone. Tokens and log-probs stay on the ranks that generated them,
go from there straight to the ranks that train on them, and are never on the controller, but for those of the few samples
that a step keeps for replay.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from quintet.cluster.dispatch import megatron_compute
from quintet.cluster.local import LocalGroup
from quintet.controller.batch_ref import BatchRef, Lease, Placement
from quintet.controller.colocation import DeviceHandover
from quintet.controller.dealing import SlotTime, counted_metrics, deal, slot_time
from quintet.controller.finished_groups import FinishedGroups
from quintet.controller.messages import SampleInfo, TrainedTokens
from quintet.controller.progress_bar import watched
from quintet.controller.roles import Phase, PolicyRole, Role
from quintet.controller.rollouts import Call, InProcessRolloutGroup, Rollouts
from quintet.controller.samples import Kept, Samples
from quintet.controller.scatter import Scatterer
from quintet.controller.verbs import Policy, Rollout
from quintet.controller.weight_check import Proof
from quintet.data.prompts import Prompt
from quintet.errors import QuintetError
from quintet.models import ModelShape
from quintet.observe.memory import combine_peaks
from quintet.observe.progress import Progress
from quintet.recipe import schema
from quintet.recipe.derived import layout_of, roles_of
from quintet.recipe.length import fitted
from quintet.recipe.rollout import placement_of
from quintet.rewards.pool import RewardPool
from quintet.rollout.base import Request, Sampling

if TYPE_CHECKING:  # it brings Ray
    from quintet.cluster.group import WorkerGroup


class Controller:
    """All ranks of a run, seen from the controller."""

    def __init__(
        self,
        cluster: Any,
        recipe: schema.Recipe,
        model_dir: Path,
        shape: ModelShape,
        progress: Progress | None = None,
        command: str = "train",
        phase: Phase = lambda name: nullcontext(),
        rewards: RewardPool | None = None,
    ) -> None:
        apart = command != "sft" and placement_of(recipe).own_processes
        if apart:  # with Ray's modules, which one rank in this process does without
            from quintet.controller.replicas import RolloutReplicas, check_room

            check_room(cluster, recipe)
        self.recipe, self._progress, self._rewards = recipe, progress, rewards
        self.workers: WorkerGroup = cluster.group(
            Policy,
            recipe.cluster.ranks,
            layout=recipe.layout,
            name="policy",
            recipe=recipe,
            model_dir=model_dir.absolute(),
            command=command,
        )
        self.version = 0
        """Of the policy: how often new weights were published. A run that goes on counts those before."""
        self._dropped: list[str] = []
        self._slot_times: list[SlotTime] = []
        self._calls = itertools.count()
        placements = [Placement("policy", recipe.layout, self.workers.coords())]
        of_policy = ("policy", self.workers, placements[0], phase, progress)
        self.policy = PolicyRole(*of_policy, mark=self._publish)
        self.roles: dict[str, Role] = {"policy": self.policy}
        for name in roles_of(recipe) if command == "train" else ():
            layout = layout_of(recipe, name)
            found = next((one for one in placements if one.layout == layout), None)
            if found is None:
                found = Placement(name, layout, self.workers.all(Policy.coords)(name))
                placements.append(found)
            self.roles[name] = Role(name, self.workers, found, phase, progress)
        device = self.workers.one(Policy.device_name)()
        self._scatterer = Scatterer(self.workers, recipe, shape, placements, device)
        decided = self.workers.one(Policy.decisions)()
        self.offload_reason = decided.why
        self._handover: DeviceHandover | None = None
        if command != "sft":  # the one that generates nothing
            proof = Proof(self.workers, recipe, shape, cluster.say)
            same = recipe.model_copy(update={"engine": decided.engine})  # native ones compute as ranks do
            self.rollouts: Rollouts = (
                RolloutReplicas(cluster, same, model_dir.absolute(), self.workers, proof)
                if apart
                else InProcessRolloutGroup(self.workers, recipe, proof)
            )
            log = cluster.log_dir / "hybrid.log"
            self._handover = DeviceHandover(
                self.workers, self.rollouts, recipe, decided.shares, decided.sleep_level, phase, log
            )

    def describe(self) -> list[str]:
        """Return lines: which layers and kernels the ranks compute with, and what each role's own layout comes to."""
        return self.workers.one(Policy.describe)()

    # generation

    @property
    def handover(self) -> DeviceHandover:
        assert self._handover is not None, "this command generates nothing"
        return self._handover

    def generating(self) -> AbstractContextManager[None]:
        """Keep rollouts awake, with the present weights, for as long as the context lasts: see `DeviceHandover`."""
        return self.handover.generating()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        samples_per_prompt: int,
        seed: str,
        lengths: Sequence[Sequence[int]] | None = None,
        *,
        expected: Sequence[float] | None = None,
        title: str = "rollout",
        scored: bool = True,
    ) -> Samples:
        """Generate `samples_per_prompt` responses to each prompt, within `generating`; each group is scored once it is finished, if
        the command scores any, for `reward`. `seed` keys all noise of this call. Their tokens are kept where they were made, for as
        long as the returned samples, or a part of them, are alive.

        lengths: most response tokens of each sample, by prompt, where they differ from the sampling's. expected: response tokens of a
        sample of each prompt, where something is known of them: who generates what, and in which order, follows from it
        (`dealing.deal`), and no token does.
        """
        requests = _requests(prompts, samples_per_prompt, seed, lengths)
        shares = deal(len(requests), self.rollouts.count, expected)
        total = len(requests) * samples_per_prompt
        owed = {n: [requests[number] for number in share] for n, share in enumerate(shares)}
        began: dict[int, float] = {}
        finished = FinishedGroups(prompts, self._rewards if scored else None)
        call = f"{seed}#{next(self._calls)}"
        forget = list(self._dropped)

        def heard(rollout: int, at: int, group: list[SampleInfo]) -> None:
            finished.add(shares[rollout][at], group)

        with watched(self._progress, title, total, "sequences", self.rollouts.posted) as watch:

            def looked_at() -> None:
                watch()
                finished.check()

            # Again, by rollouts made anew: their noise is keyed by request, so the samples are the same.
            while owed:
                self.handover.ready()
                began |= dict.fromkeys(owed, time.perf_counter())
                done = self.rollouts.generate(Call(owed, sampling, call, forget, looked_at, heard))
                owed = {n: share for n, share in owed.items() if n not in done}
        del self._dropped[: len(forget)]
        if scored:
            times = [
                [began[n] + one.seconds for number in share for one in finished.groups[number]]
                for n, share in enumerate(shares)
            ]
            slots = self.recipe.rollout.sequences_per_rank
            self._slot_times.append(slot_time(times, slots, min(began.values())))
        return self._gathered(prompts, finished, shares, call, samples_per_prompt)

    def _gathered(
        self,
        prompts: Sequence[Prompt],
        finished: FinishedGroups,
        shares: Sequence[Sequence[int]],
        call: str,
        samples_per_prompt: int,
    ) -> Samples:
        """The samples of a call in the order of their prompts, and where each is kept. shares: by rollout the prompts that it had."""
        samples = Samples(list(prompts), [], [], [], [], leases=(Lease(call, self._dropped),))
        place = {number: (n, at) for n, share in enumerate(shares) for at, number in enumerate(share)}
        for number, (group, scoring) in enumerate(finished.in_order()):
            rollout, at = place[number]
            first = at * samples_per_prompt
            samples.scorings += [] if scoring is None else [scoring]
            for kept, generated in enumerate(group, first):
                samples.groups.append(number)
                samples.generated.append(generated)
                samples.place.append(Kept(rollout, call, kept))
                samples.versions.append(self.version)
        return samples

    def overhear(self, told: Callable[[list[int]], None]) -> None:
        """Have `told` hear all tokens of a sequence after each that is drawn for it, from now on, where the rank is in this process:
        elsewhere it hears nothing."""
        if isinstance(self.workers, LocalGroup):
            self.workers.one(Rollout.overhear, phase="generate")(told)

    def reward(self, samples: Samples) -> None:
        """Wait for the rewards of all samples, which processes of their own have worked at since each group was finished; kept in
        `samples.rewards`. Raises QuintetError where samples were given up: no step and no evaluation is made of half a response."""
        assert self._rewards is not None, "this command scores nothing"
        if given_up := samples.aborted():
            raise QuintetError(
                f"{len(given_up)} of {len(samples.generated)} responses were aborted while they were generated, the first to "
                f"{samples.prompts[samples.groups[given_up[0]]].source}: nothing is trained on or evaluated with these"
            )
        samples.rewards = self._rewards.results(samples.scorings)

    # training

    def scatter(self, samples: Samples) -> BatchRef:
        """Plan a batch's mini-batches and micro-batches, and send each rank what it trains on."""
        return self._scatterer.samples(samples, self.rollouts)

    def scatter_responses(self, prompts: Sequence[Prompt]) -> BatchRef:
        """Scatter prompts with the responses to imitate, as one mini-batch."""
        return self._scatterer.responses(prompts)

    def replayed(self, batch: BatchRef) -> dict[int, TrainedTokens]:
        """Return the first samples of a batch, with their old log-probs as scored, by number."""
        where = self.policy.placement
        batch.need(["old_logprobs"], where.name)
        parts = self.workers.all(Policy.replayed, phase="logprob", told_by=megatron_compute)(
            batch=batch.name, placement=where.name
        )
        return {number: one for part in parts for number, one in part.items()}

    def logprobs(
        self,
        ids: list[list[int]],
        prompts: list[int],
        temperature: float,
        routes: list[np.ndarray] | None = None,
    ) -> list[Tensor]:
        """Return log-probs of these samples' responses under the present policy, fp32 [response tokens] each. routes: to be replayed,
        [tokens - 1, layers with experts, top-k] of each sample."""
        dp = self.policy.placement.dp
        plan = self._scatterer.plan([len(one) for one in ids], self.policy.placement)
        shares = [plan.samples_of(d) for d in range(dp)]
        parts = [
            (
                [ids[i] for i in share],
                [prompts[i] for i in share],
                plan.local(d),
                routes and [routes[i] for i in share],
            )
            for d, share in enumerate(shares)
        ]
        answers = self.workers.each(Policy.logprobs, megatron_compute, phase="logprob")(parts, temperature)
        cp = len(answers) // dp
        found = {
            shares[n // cp][at]: logprobs for n, told in enumerate(answers) for at, logprobs in told.items()
        }
        return [found[i] for i in range(len(ids))]

    def start_optimizer(self, optimizer: schema.Optimizer, total_steps: int, role: str = "policy") -> None:
        """Start a fresh optimizer on a role's present weights: see `Engines.start_optimizer`."""
        self.roles[role].start_optimizer(fitted(optimizer, total_steps), total_steps)
        if role == "policy" and self._handover is not None:
            self.rollouts.mark_weights_updated()  # the masters: what the first step does to them is looked at as well

    def mark_weights_updated(self) -> None:
        """Mark the weights as new for the rollout: see `DeviceHandover.mark_weights_updated`."""
        if self._handover is not None:
            self._handover.mark_weights_updated()

    def _publish(self) -> None:
        self.version += 1
        self.mark_weights_updated()

    def save(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self.workers.all(Policy.save)(path.absolute())

    # checkpoints

    def dtype(self) -> Literal["fp32", "bf16"]:
        """Return what `model.dtype` comes to on the ranks."""
        return self.workers.one(Policy.parameter_type)()

    def checkpoint_finished(self, roles: Sequence[str], *, wait: bool) -> tuple[bool, list[str]]:
        """Return whether all ranks are done with the writing of these roles that was begun, and what went wrong where they are."""
        answers = self.workers.all(Policy.checkpoint_finished, phase="checkpoint")(wait, roles)
        return all(done for done, _ in answers), [error for _, error in answers if error is not None]

    def memory(self) -> dict[str, float | None]:
        """Return the memory peaks over the ranks, as metrics."""
        ranks = self.workers.all(Policy.memory)()
        return combine_peaks(ranks if self._handover is None else ranks + self.rollouts.memory())

    def counted(self) -> dict[str, float]:
        """Return the metrics of what rollouts counted since the last time."""
        slots, self._slot_times = self._slot_times, []
        return counted_metrics({} if self._handover is None else self.rollouts.counts(), slots)


def _requests(
    prompts: Sequence[Prompt], samples: int, seed: str, lengths: Sequence[Sequence[int]] | None
) -> list[Request]:
    """A request for so many samples of each prompt, whose noise is keyed by the call's seed, the prompt and its place."""
    return [
        Request(
            prompt.token_ids,
            samples,
            _seed(f"{seed}/{i}/{prompt.id}"),
            tuple(lengths[i]) if lengths is not None else None,
        )
        for i, prompt in enumerate(prompts)
    ]


def _seed(text: str) -> int:
    """63 bits that follow from the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
