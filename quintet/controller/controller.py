"""The verbs of the outer loop, spread over the ranks: generate, reward, train, sync, save.

The controller plans from lengths and rewards alone. Tokens and log-probs stay on the ranks that generated them,
go from there straight to the ranks that train on them, and are never on the controller, but for those of the few samples
that a step keeps for replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from quintet.algorithms.aggregation import Tally
from quintet.cluster import ray_compat
from quintet.cluster.dispatch import all_to_all, megatron_compute, rank_zero
from quintet.cluster.group import WorkerGroup
from quintet.controller.colocation import DeviceHandover
from quintet.controller.messages import Assignment, SampleInfo, Trained, UpdateResult
from quintet.controller.objective import Objective
from quintet.controller.progress_bar import watched
from quintet.controller.replicas import RolloutReplicas, check_room
from quintet.controller.rollouts import InProcessRolloutGroup, Rollouts
from quintet.controller.samples import Samples
from quintet.controller.weight_check import Proof
from quintet.data.batch import make_batch, select
from quintet.data.prompts import Prompt
from quintet.models import ModelShape
from quintet.observe.memory import combine_peaks
from quintet.observe.progress import Progress
from quintet.packing import Plan, alignment_of, plan_microbatches, split_evenly, target_counts
from quintet.recipe import schema
from quintet.recipe.rollout import own_processes
from quintet.rewards.load import RewardFunction
from quintet.rollout import Request, Sampling


@dataclass
class StepResult:
    """What the optimizer steps on one step's samples came to."""

    loss: float
    tally: Tally
    grad_norm: float
    lr: float
    replayed: dict[int, Trained] = field(default_factory=dict)
    """The step's first samples as they were trained on, by number."""


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
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        check_room(cluster, recipe, command)
        self.recipe, self._progress = recipe, progress
        self.ranks = recipe.cluster.ranks
        self.workers = WorkerGroup(
            cluster,
            "quintet.controller.worker:PolicyWorker",  # by name: the controller needs no megatron
            self.ranks,
            layout=recipe.layout,
            name="policy",
            recipe=recipe,
            model_dir=model_dir.absolute(),
            command=command,
        )
        layout = recipe.layout
        self.dp = self.ranks // (layout.tp * layout.pp * layout.cp)
        # Attention's cost next to the rest, per token of length: see `ModelShape.flops_per_token`.
        self._quadratic = (shape.flops_per_token(1.0) - shape.flops_per_token(0.0)) / (
            2 * shape.flops_per_token(0.0)
        )
        self._handover: DeviceHandover | None = None
        if command != "sft":  # the one that generates nothing
            proof = Proof(self.workers, recipe, shape, cluster.say)
            self.rollouts: Rollouts = (
                RolloutReplicas(cluster, recipe, model_dir.absolute(), self.workers, proof)
                if own_processes(recipe)
                else InProcessRolloutGroup(self.workers, recipe, proof)
            )
            log = cluster.log_dir / "hybrid.log"
            self._handover = DeviceHandover(self.workers, self.rollouts, recipe, phase, log)

    def describe(self) -> str:
        """Which layers and kernels the ranks compute with."""
        return str(self.workers.call("describe", dispatch=rank_zero))

    # generation

    @property
    def handover(self) -> DeviceHandover:
        assert self._handover is not None, "this command generates nothing"
        return self._handover

    def generating(self) -> AbstractContextManager[None]:
        """Rollouts are awake, with the present weights, for as long as the context lasts: see `DeviceHandover`."""
        return self.handover.generating()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        samples_per_prompt: int,
        seed: str,
        lengths: Sequence[Sequence[int]] | None = None,
        *,
        title: str = "rollout",
    ) -> Samples:
        """Generate `samples_per_prompt` responses to each prompt, within `generating`. `seed` keys all noise of this call.

        lengths: most response tokens of each sample, by prompt, where they differ from the sampling's.
        """
        requests = [
            Request(
                prompt.token_ids,
                samples_per_prompt,
                _seed(f"{seed}/{i}/{prompt.id}"),
                tuple(lengths[i]) if lengths is not None else None,
            )
            for i, prompt in enumerate(prompts)
        ]
        shares = split_evenly(len(requests), self.rollouts.count)
        total = len(requests) * samples_per_prompt
        owed = {n: requests[share.start : share.stop] for n, share in enumerate(shares)}
        answers: dict[int, list[list[SampleInfo]]] = {}
        with watched(self._progress, title, total, "sequences", self.rollouts.posted) as watch:
            while (
                owed
            ):  # again, by rollouts made anew: their noise is keyed by request, so the samples are the same
                self.handover.ready()
                answers |= self.rollouts.generate(owed, sampling, watch)
                owed = {n: share for n, share in owed.items() if n not in answers}
        samples = Samples(list(prompts), [], [], [], [])
        for rollout in range(self.rollouts.count):
            kept = 0
            for row in answers[rollout]:
                for generated in row:
                    samples.groups.append(len(samples.generated) // samples_per_prompt)
                    samples.generated.append(generated)
                    samples.place.append((rollout, kept))
                    kept += 1
        return samples

    def reward(self, samples: Samples, function: RewardFunction) -> list[float]:
        """Score all samples, spread over the ranks; kept in `samples.rewards`."""
        prompts = [samples.prompts[g] for g in samples.groups]
        texts = [[p.text for p in prompts], [g.text for g in samples.generated], [p.answer for p in prompts]]
        parts = split_evenly(len(prompts), self.ranks)
        scored = self.workers.call(
            "reward",
            [function] * self.ranks,
            *([[column[i] for i in part] for part in parts] for column in texts),
            dispatch=all_to_all,
            phase="reward",
        )
        samples.rewards = [result for part in scored for result in part]
        return [result.reward for result in samples.rewards]

    # training

    def scatter(self, samples: Samples, advantages: Tensor) -> None:
        """Plan the step's mini-batches and micro-batches, and send each rank what it trains on."""
        count = self.recipe.train.mini_batches_per_step
        values = advantages.tolist()
        parts = split_evenly(len(samples.prompts), count)
        chosen = [[i for i, g in enumerate(samples.groups) if g in part] for part in parts]
        plans = [self._plan([samples.generated[i].tokens for i in mini]) for mini in chosen]
        received = [
            self._send(mini, plan, samples, values) for mini, plan in zip(chosen, plans, strict=True) if mini
        ]
        self.workers.call(
            "receive",
            [[mini[d][0] for mini in received] for d in range(self.dp)],
            [[mini[d][1] for mini in received] for d in range(self.dp)],
            aggregation=self.recipe.algorithm.aggregation,
            dispatch=megatron_compute,
            phase="scatter",
        )
        self._mini_batches = len(received)
        self._microbatches = [len(p.rounds) for mini, p in zip(chosen, plans, strict=True) if mini]

    def _plan(self, lengths: list[int]) -> Plan:
        layout = self.recipe.layout
        return plan_microbatches(
            lengths,
            dp=self.dp,
            budget=self.recipe.engine.tokens_per_microbatch_per_rank,
            alignment=alignment_of(layout, layout.cp),
            cp=layout.cp,
            quadratic=self._quadratic,
            multiple=layout.pp if layout.vpp > 1 else 1,
            lockstep=(layout.etp or layout.tp) * layout.ep > layout.tp * layout.cp,  # experts span dp ranks
        )

    def _send(
        self, mini: list[int], plan: Plan, samples: Samples, advantages: list[float]
    ) -> list[tuple[list[Any], Assignment]]:
        """Have the keepers cut out each dp rank's samples; what comes back are references."""
        rollouts = range(self.rollouts.count)
        chosen: list[list[list[int]]] = [[[] for _ in range(self.dp)] for _ in rollouts]
        worth: list[list[list[float]]] = [[[] for _ in range(self.dp)] for _ in rollouts]
        order: list[list[int]] = []
        for d in range(self.dp):
            mine = sorted(plan.samples_of(d), key=lambda i: samples.place[mini[i]])
            order.append(mine)
            for i in mine:
                rollout, kept = samples.place[mini[i]]
                chosen[rollout][d].append(kept)
                worth[rollout][d].append(advantages[mini[i]])
        parts = self.rollouts.slice_samples(chosen, worth)
        made = [samples.generated[i] for i in mini]
        targets = target_counts([s.tokens for s in made], [s.tokens - s.response_tokens for s in made])
        few = self.recipe.mismatch.replay_samples_per_step
        return [
            (
                [parts[rollout][d] for rollout in rollouts if chosen[rollout][d]],
                Assignment(
                    plan.local(d, order[d]),
                    targets,
                    len(mini),
                    {mini[i]: at for at, i in enumerate(order[d]) if mini[i] < few},
                ),
            )
            for d in range(self.dp)
        ]

    def send_sft_batch(self, prompts: Sequence[Prompt]) -> None:
        """Send each rank its part of a mini-batch of prompts with the responses to imitate."""
        ids = [p.token_ids + p.response_ids for p in prompts]
        sizes, prompt_sizes = [len(x) for x in ids], [len(p.token_ids) for p in prompts]
        batch = make_batch(ids, prompt_sizes)
        plan, targets = self._plan(sizes), target_counts(sizes, prompt_sizes)
        self.workers.call(
            "receive",
            [[[ray_compat.put(select(batch, plan.samples_of(d)))]] for d in range(self.dp)],
            [[Assignment(plan.local(d), targets, len(prompts))] for d in range(self.dp)],
            aggregation="token_mean",
            dispatch=megatron_compute,
            phase="scatter",
        )
        self._mini_batches = 1
        self._microbatches = [len(plan.rounds)]

    def score_samples(self, temperature: float, *, old: bool = False) -> None:
        """Old and reference log-probs, where the step needs them, or old ones are asked for."""
        old = old or self._mini_batches > 1
        if old or self.recipe.algorithm.kl_coef > 0:
            self.workers.call("score_samples", old=old, temperature=temperature, phase="logprob")

    def replayed(self) -> dict[int, Trained]:
        """The first samples that were scattered, with their old log-probs as scored, by number."""
        parts = self.workers.call("replayed", dispatch=megatron_compute, phase="logprob")
        return {number: one for part in parts for number, one in part.items()}

    def logprobs(self, ids: list[list[int]], prompts: list[int], temperature: float) -> list[Tensor]:
        """Of these samples' responses under the present policy, fp32 [response tokens] each."""
        plan = self._plan([len(one) for one in ids])
        shares = [plan.samples_of(d) for d in range(self.dp)]
        answers = self.workers.call(
            "logprobs",
            [[ids[i] for i in share] for share in shares],
            [[prompts[i] for i in share] for share in shares],
            [plan.local(d) for d in range(self.dp)],
            temperature=temperature,
            dispatch=megatron_compute,
            phase="logprob",
        )
        cp = len(answers) // self.dp
        found = {
            shares[n // cp][at]: logprobs for n, told in enumerate(answers) for at, logprobs in told.items()
        }
        return [found[i] for i in range(len(ids))]

    def update(self, objective: Objective, temperature: float = 1.0) -> StepResult:
        """One optimizer step a mini-batch. Loss and quantities are averaged over them, norm and rate the last's."""
        loss, tally = 0.0, Tally()
        replayed: dict[int, Trained] = {}
        parts: list[UpdateResult] = []
        for number in range(self._mini_batches):
            of = f", mini-batch {number + 1} of {self._mini_batches}" if self._mini_batches > 1 else ""
            total = self._microbatches[number]
            with watched(self._progress, f"training{of}", total, "micro-batches", self._trained) as watch:
                parts = self.workers.call(
                    "update",
                    [number] * self.dp,
                    objective=objective,
                    temperature=temperature,
                    dispatch=megatron_compute,
                    phase="train",
                    watch=watch,
                )
            loss += sum(part.loss for part in parts) / self._mini_batches
            tally.merge(part.tally for part in parts)
            replayed |= {number: one for part in parts for number, one in part.replayed.items()}
        return StepResult(loss, tally, parts[0].grad_norm, parts[0].lr, replayed)

    def start_optimizer(self, optimizer: schema.Optimizer, total_steps: int) -> None:
        """A fresh optimizer on the present weights."""
        self.workers.call("start_optimizer", optimizer, total_steps, phase="optimizer")
        if self._handover is not None:
            self.rollouts.mark_weights_updated()  # the masters: what the first step does to them is looked at as well

    def mark_weights_updated(self) -> None:
        """There are new weights for the rollout: see `DeviceHandover.mark_weights_updated`."""
        if self._handover is not None:
            self._handover.mark_weights_updated()

    def save(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self.workers.call("save", path.absolute(), phase="save")

    # checkpoints

    def dtype(self) -> Literal["fp32", "bf16"]:
        """What `model.dtype` comes to on the ranks."""
        found: Literal["fp32", "bf16"] = self.workers.call("parameter_type", dispatch=rank_zero)
        return found

    def save_checkpoint(self, path: Path, *, reference: bool = False) -> list[str]:
        """Begin to write the state of training (or the reference policy) to a new directory; returns when training may
        go on, with what went wrong on the ranks."""
        errors = self.workers.call("save_checkpoint", path.absolute(), reference, phase="checkpoint")
        return [error for error in errors if error is not None]

    def checkpoint_finished(self, *, wait: bool) -> tuple[bool, list[str]]:
        """Whether all ranks are done with the writing that was begun, and what went wrong on those that are."""
        answers = self.workers.call("checkpoint_finished", wait, phase="checkpoint")
        return all(done for done, _ in answers), [error for _, error in answers if error is not None]

    def load_checkpoint(self, path: Path) -> None:
        """Take up a saved state of training."""
        self.workers.call("load_checkpoint", path.absolute(), phase="checkpoint")

    def load_reference(self, path: Path) -> None:
        """Take up a stored reference policy."""
        self.workers.call("load_reference", path.absolute(), phase="checkpoint")

    def memory(self) -> dict[str, float | None]:
        """Memory peaks over the ranks, as metrics."""
        ranks = self.workers.call("memory")
        return combine_peaks(ranks if self._handover is None else ranks + self.rollouts.memory())

    def counted(self) -> dict[str, float]:
        """Metrics of what rollouts counted since the last time: shares of the prefix cache's and of the drafts' tokens."""
        counts = {} if self._handover is None else self.rollouts.counts()
        told = {}
        if counts.get("prefix_cache_queries"):
            told["rollout/prefix_cache_fraction"] = (
                counts["prefix_cache_hits"] / counts["prefix_cache_queries"]
            )
        if counts.get("draft_tokens"):
            told["rollout/draft_tokens"] = counts["draft_tokens"]
            told["rollout/accepted_fraction"] = counts["accepted_tokens"] / counts["draft_tokens"]
        return told

    def _trained(self) -> int:
        """Micro-batches done in the call under way, by one rank with the loss: every rank has as many, at one pace."""
        coords = self.workers.coords()
        last = max(c["pp"] for c in coords)
        return self.workers.posted([next(rank for rank, c in enumerate(coords) if c["pp"] == last)])


def _seed(text: str) -> int:
    """63 bits that follow from the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
