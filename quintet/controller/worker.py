"""One rank that trains: the engine, with a KL term a reference policy, and a rollout unless that has its own processes.

The controller calls these methods on all ranks (`quintet.controller.controller`). Samples stay on the ranks that generated
them until the controller has planned who trains on what; then each rank cuts out what each other rank needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quintet.algorithms.aggregation import token_weights
from quintet.cluster.progress import Progress
from quintet.cluster.worker import Place, Worker
from quintet.controller.in_process_rollout import InProcessRollout
from quintet.controller.messages import Assignment, SampleInfo, Trained, UpdateResult
from quintet.controller.objective import Objective
from quintet.controller.sample_store import SampleStore, cut, trained_samples
from quintet.data.batch import Batch, concat, make_batch, offsets, sample_ids, set_tokens, token_count, tokens
from quintet.data.tokenizer import load_tokenizer
from quintet.engine import build
from quintet.engine.engine import DTYPES, Engine
from quintet.engine.lora import split_adapters
from quintet.engine.outputs import Loss
from quintet.engine.reference import AdapterReference
from quintet.engine.weights.shards import Shard, shard_fingerprints
from quintet.errors import UserError
from quintet.models import trained_shape
from quintet.observe.memory import memory_peaks
from quintet.packing import Cell, RankCell, rank_cells
from quintet.recipe import schema
from quintet.recipe.lora import lora_shape
from quintet.recipe.rollout import adapters_scaled, adapters_separate, own_processes
from quintet.recipe.user_family import use_family
from quintet.rewards.load import RewardFunction, RewardResult, score
from quintet.rollout import Part, Request, Sampling
from quintet.runs.checkpoints import adapter_directory
from quintet.sync.fp8_proof import quantized_fingerprints
from quintet.sync.logprob_probe import Scores, engine_scores
from quintet.sync.server import ReceiverSpec, Served, WeightServer
from quintet.sync.wire import Ticket
from quintet.sync.witness import Digest, Statement, Witness

SYNC_TIMEOUT_S = 60.0
"""How long a rollout may take to come for weights, or to take a bucket."""


class PolicyWorker(Worker):
    """One rank. `model_dir` is a Hugging Face directory that this rank's node can read."""

    def __init__(self, place: Place, recipe: schema.Recipe, model_dir: Path, command: str = "train") -> None:
        super().__init__(place)
        self.recipe, self.model_dir, self.command = recipe, model_dir, command
        self.dtype = recipe.model.dtype or ("fp32" if place.device == "cpu" else "bf16")
        self._progress = Progress()
        self.samples = SampleStore(recipe.mismatch.replay_samples_per_step)
        self._server: WeightServer | None = None
        self._witness, self._rollout_witness = Witness(), Witness()
        self._mini_batches: list[tuple[Batch, Assignment]] = []

    def setup(self) -> None:
        """Join the process group, read the weights, make the rollout."""
        super().setup()
        recipe = self.recipe
        use_family(recipe.model.family)
        self.tokenizer = load_tokenizer(self.model_dir, recipe.model)
        self.shape = trained_shape(self.model_dir)
        self.lora = lora_shape(recipe, self.shape)
        # Gradients, optimizer state and a reference policy cost memory: only commands that need them have them.
        self.engine = self._engine(recipe.optimizer if self.command in ("train", "sft") else None)
        self.reference: Engine | AdapterReference | None = None
        if self.command == "train" and recipe.algorithm.kl_coef > 0:
            self.reference = self._engine(None) if self.lora is None else AdapterReference(self.engine)
        if self.command != "sft" and not own_processes(recipe):
            self.rollout = InProcessRollout(self.engine, recipe, self._text, self._progress)
        self._saving: Engine | AdapterReference = self.engine

    def _engine(self, optimizer: schema.Optimizer | None) -> Engine:
        recipe = self.recipe
        engine = Engine(
            self.shape,
            recipe.layout,
            engine=recipe.engine,
            optimizer=optimizer,
            dtype=self.dtype,
            lora=self.lora,
        )
        adapters = recipe.lora.path if recipe.lora is not None else None
        engine.load_hf(self.model_dir, adapters=adapters, seed=recipe.run.seed)
        return engine

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def describe(self) -> str:
        """What the model's layers are made of here."""
        return self.engine.describe()

    def coords(self) -> dict[str, int]:
        """Place in the training layout."""
        return self.engine.mesh.coordinates

    def rollout_coords(self) -> dict[str, int]:
        """Place in the rollout layout."""
        return self.rollout.mesh.coordinates

    # generation

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[SampleInfo]] | None:
        """Generate and keep the samples; the rank that owns the output tells what came out, others None."""
        self._progress.begin()
        answered = self.rollout.generate(requests, sampling)
        if not self.rollout.mesh.owns_output:
            return None
        return self.samples.put(requests, answered)

    def reward(
        self, function: RewardFunction, prompts: list[str], responses: list[str], answers: list[str]
    ) -> list[RewardResult]:
        """Score samples; any rank can."""
        return score(function, prompts, responses, answers)

    def slice_samples(self, chosen: list[list[int]], advantages: list[list[float]]) -> tuple[Any, ...]:
        """Cut what this rank keeps: see `SampleStore.slice_for`."""
        return self.samples.slice_for(chosen, advantages)

    def scatter_backup(
        self, samples: list[Batch], chosen: list[list[int]], advantages: list[list[float]]
    ) -> tuple[Any, ...]:
        """Cut samples whose keeper died, from the copy that it left."""
        return None, *cut(samples[0], chosen, advantages)

    def rollout_scores(self, sequences: list[list[int]]) -> list[list[float]]:
        """What the rollout makes of these tokens: see `Rollout.score`."""
        return self.rollout.score(sequences)

    # training

    def start_optimizer(self, optimizer: schema.Optimizer, total_steps: int) -> None:
        """A fresh optimizer on the present weights; the reference policy becomes the present policy."""
        self.engine.start_optimizer(optimizer, total_steps)
        if self.reference is not None:
            self.reference.copy_weights_from(self.engine)

    def receive(self, parts: list[list[Batch]], assignments: list[Assignment], aggregation: str) -> None:
        """Take this dp rank's part of each mini-batch of the step: batches to be joined, and what to do with them."""
        self._mini_batches = []
        for pieces, assignment in zip(parts, assignments, strict=True):
            batch = concat(pieces) if pieces else _nothing()
            trained = tokens(batch, "loss_mask")
            weights = token_weights(
                trained, sample_ids(batch), aggregation, assignment.targets[0], assignment.samples
            )
            set_tokens(batch, "weights", weights)
            self._mini_batches.append((batch, assignment))

    def score_samples(self, old: bool, temperature: float) -> None:
        """Log-probs of all received samples under the present (`old`) and the reference policy."""
        for batch, assignment in self._mini_batches:
            found = {}
            if old:
                found["old_logprobs"] = self._logprobs(self.engine, batch, assignment.rounds, temperature)
            if self.reference is not None:
                found["ref_logprobs"] = self._logprobs(self.reference, batch, assignment.rounds, temperature)
            for name, values in found.items():
                set_tokens(batch, name, values)

    def _cells(self, rounds: Sequence[Sequence[Cell]]) -> list[RankCell]:
        return rank_cells(rounds, self.engine.mesh.at("cp"))

    def _counted_here(self, rounds: Sequence[Sequence[Cell]]) -> set[int]:
        """Samples that this rank tells of: those of the cells it is the first rank of."""
        return {i for cell in self._cells(rounds) if cell.first for i in cell.samples}

    def _logprobs(
        self,
        engine: Engine | AdapterReference,
        batch: Batch,
        rounds: Sequence[Sequence[Cell]],
        temperature: float,
    ) -> torch.Tensor:
        """0 for samples of other ranks' cells."""
        scored = engine.forward(batch, self._cells(rounds), temperature)
        return (
            scored.logprobs if scored is not None else torch.zeros(token_count(batch))
        )  # unread before the last stage

    def _replayed_here(self, assignment: Assignment) -> dict[int, int]:
        here = self._counted_here(assignment.rounds)
        return {number: at for number, at in assignment.replayed.items() if at in here}

    def replayed(self) -> dict[int, Trained]:
        """Received samples whose number is asked for, with the old log-probs as scored."""
        told: dict[int, Trained] = {}
        for batch, assignment in self._mini_batches:
            on = tokens(batch, "loss_mask") > 0
            seen = (sample_ids(batch)[on], tokens(batch, "old_logprobs")[on])
            told |= trained_samples(batch, self._replayed_here(assignment), [seen])
        return told

    def logprobs(
        self, ids: list[list[int]], prompts: list[int], rounds: list[list[Cell]], temperature: float
    ) -> dict[int, torch.Tensor]:
        """Of these samples' responses under the present policy, by sample, each told by one rank; unread before the last
        stage."""
        batch = make_batch(ids, prompts)
        found = self._logprobs(self.engine, batch, rounds, temperature)
        ends = offsets(batch)
        return {i: found[ends[i] + prompts[i] : ends[i + 1]].clone() for i in self._counted_here(rounds)}

    def update(self, number: int, objective: Objective, temperature: float) -> UpdateResult | None:
        """One optimizer step on a received mini-batch. Ranks of the last stage tell what it came to."""
        batch, assignment = self._mini_batches[number]
        wanted = self._replayed_here(assignment)
        seen: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if wanted else None
        counted = self._counted(objective, seen)
        result = self.engine.forward_backward(batch, self._cells(assignment.rounds), counted, temperature)
        step = self.engine.optimizer_step()
        if result is None:
            return None
        replayed = trained_samples(batch, wanted, seen or [])
        return UpdateResult(result.loss, result.tally, step["grad_norm"], step["lr"], replayed)

    def _counted(
        self, objective: Objective, seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> Loss:
        """The objective, which is called once a micro-batch, counting as it is called. seen: gets the samples of its
        tokens and their old log-probs."""
        self._progress.begin()
        done = itertools.count()

        def count(outputs: Any, fields: Any) -> Any:
            self._progress(next(done))
            share = objective(outputs, fields)
            if seen is not None:
                seen.append((fields["sample"], fields["old_logprobs"]))
            return share

        return count

    # the devices change hands: see `quintet.controller.colocation`

    def offload(self, kinds: Sequence[str]) -> None:
        """Take the recipe's shares of these kinds of training state off the device."""
        self.engine.offload(**{kind: getattr(self.recipe.engine, f"offload_{kind}") for kind in kinds})
        if self.reference is not None and "params" in kinds:
            self.reference.offload(params=self.recipe.engine.offload_params)
        if self.device != "cpu":
            torch.cuda.empty_cache()  # activations, buckets: a rollout in another process has use for it

    def onload(self) -> None:
        """Bring back what left."""
        self.engine.reload()
        if self.reference is not None:
            self.reference.reload()

    def masters(self) -> int | None:
        """A fingerprint of the fp32 master weights: see `Engine.master_fingerprint`."""
        return self.engine.master_fingerprint()

    def plan_sync(self, assignments: list[list[ReceiverSpec]]) -> list[Ticket]:
        """Who takes weights from which rank from now on: tickets for those that take them from this one."""
        if self._server is None:
            self._server = WeightServer(
                self._exported,
                self.shape,
                DTYPES[self.dtype],
                build.device(),
                self.recipe.rollout.bucket_mib,
                quantization=self.recipe.rollout.quantization,
                host=self.place.host,
                timeout_s=min(SYNC_TIMEOUT_S, self.place.collective_timeout_s / 2),
            )
        return self._server.plan(assignments)

    def _exported(self) -> list[Shard]:
        recipe = self.recipe
        return self.engine.exported(adapters=adapters_separate(recipe), scaled=adapters_scaled(recipe))

    def serve(self) -> Served:
        """Hand the present weights to the receivers planned for."""
        assert self._server is not None, "plan_sync comes first"
        return self._server.serve()

    def digest(self) -> Digest:
        """Of what this rank hands out, to be compared with what rollouts hold; beside adapters that travel alone, also of the
        frozen weights, which the rollout has from elsewhere."""
        shards = self._exported()
        if adapters_separate(self.recipe):
            shards = [*split_adapters(self.engine.shard_map())[0], *shards]
        if self.recipe.rollout.quantization == "fp8":
            return self._witness.digest(*quantized_fingerprints(shards, self.shape, build.device()))
        shapes = {one.name: one.shape for one in shards}
        return self._witness.digest(shard_fingerprints(shards), shapes)

    def statement(self, known: list[bytes]) -> Statement:
        """What it stands for: see `Witness.statement`."""
        return self._witness.statement(known)

    def score(self, sequences: list[list[int]]) -> Scores | None:
        """Log-probs of fixed tokens, for rollouts whose weights cannot be read back."""
        return engine_scores(self.engine, sequences)

    # the rollout in this process

    def sync(self) -> None:
        """Bring it the engine's weights."""
        self.rollout.sync()

    def sleep_rollout(self, level: int) -> None:
        """Take its memory."""
        self.rollout.sleep(level)

    def wake_rollout(self, part: Part) -> None:
        """Give it memory again."""
        self.rollout.wake(part)

    def rollout_digest(self) -> Digest:
        """Of its live weights."""
        prints, unreadable = self.rollout.fingerprints()
        return self._rollout_witness.digest(prints, unreadable=unreadable)

    def rollout_statement(self, known: list[bytes]) -> Statement:
        """What it stands for: see `Witness.statement`."""
        return self._rollout_witness.statement(known)

    def save(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory, and its adapters as one of peft's beside it."""
        self.engine.save_hf(path, self.model_dir)
        if self.lora is not None:
            self.engine.save_adapters(adapter_directory(path), self.model_dir.absolute())

    # checkpoints

    def parameter_type(self) -> str:
        """fp32 or bf16."""
        return self.dtype

    def save_checkpoint(self, path: Path, reference: bool) -> str | None:
        """Copy this rank's state and begin to write it; what went wrong, or None."""
        engine = self.reference if reference else self.engine
        assert engine is not None
        self._saving = engine
        try:
            engine.save(path, wait=False)
        except UserError as error:
            return str(error)
        return None

    def checkpoint_finished(self, wait: bool) -> tuple[bool, str | None]:
        """Whether this rank has written its part, and what went wrong."""
        try:
            return self._saving.save_finished(wait), None
        except UserError as error:
            return True, str(error)

    def load_checkpoint(self, path: Path) -> None:
        """Take up a saved state; the reference policy stays what `start_optimizer` made it."""
        self.engine.load(path)

    def load_reference(self, path: Path) -> None:
        """Take up a stored reference policy, where one is needed."""
        if self.reference is not None:
            self.reference.load(path)

    def memory(self) -> dict[str, float | None]:
        """Peak memory of this rank so far, and of each phase since the last time it was asked."""
        return memory_peaks() | self.peaks.take()


def _nothing() -> Batch:
    """The part of a dp rank that has no sample in a mini-batch."""
    empty = make_batch([], torch.empty(0, dtype=torch.int64))
    empty["advantages"] = torch.empty(0)
    set_tokens(empty, "rollout_logprobs", torch.empty(0))
    return empty
