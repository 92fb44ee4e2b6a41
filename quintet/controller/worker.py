"""One rank that trains: its roles' engines, and a rollout unless that has its own processes.

The controller calls these methods on all ranks (`quintet.controller.controller`, `quintet.controller.roles`). Samples stay on the
ranks that generated them until the controller has planned who trains on what; then each rank cuts out what each other rank needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from quintet.algorithms.advantages import Advantages, Scored
from quintet.cluster.progress import Progress
from quintet.cluster.worker import Place, Worker
from quintet.controller.engines import Engines
from quintet.controller.held_batches import HeldBatches, SampleFields, WatchedObjective
from quintet.controller.in_process_rollout import InProcessRollout
from quintet.controller.messages import (
    Assignment,
    Decisions,
    MiniBatchTold,
    OptimizerTold,
    PartedRoutes,
    RouteUse,
    TrainedTokens,
)
from quintet.controller.objective import Objective, ValueObjective
from quintet.controller.rank_rollout import RankRollout
from quintet.controller.sample_store import Place as Kept
from quintet.controller.sample_store import cut
from quintet.data.batch import Batch, make_batch, offsets, set_tokens, token_count
from quintet.data.routes import RouteSizes
from quintet.data.tokenizer import decoder, load_tokenizer
from quintet.engine import build
from quintet.engine.agree import gathered
from quintet.engine.config import fused_kernels
from quintet.engine.device import free_cached
from quintet.engine.engine import DTYPES
from quintet.engine.fp8 import other_blocks
from quintet.engine.layers.specs import choose_backend
from quintet.engine.lora import split_adapters
from quintet.engine.routes import BatchRoutes
from quintet.engine.weights.fp8_fingerprint import quantized_fingerprints
from quintet.engine.weights.rounds import connect
from quintet.engine.weights.shards import Shard, shard_fingerprints
from quintet.errors import SyncMismatch, UserError
from quintet.models import trained_shape
from quintet.packing.measured import costs_of
from quintet.packing.plan import Cell, rank_cells
from quintet.plan.describe import own_layout
from quintet.plan.fullest import cheaper, fullest_rank
from quintet.plan.kernels import with_kernels
from quintet.plan.offload import SPARE_BYTES, with_shares
from quintet.plan.out_of_memory import Needs
from quintet.recipe import schema
from quintet.recipe.derived import moe_layers_of, on_device, optimizers
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules import Command
from quintet.recipe.user_family import use_family
from quintet.runs.checkpoints import adapter_directory
from quintet.sync.logprob_probe import Scores, engine_scores
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer
from quintet.sync.server import ReceiverSpec, Served, WeightServer
from quintet.sync.wire import Ticket
from quintet.typed import Typed

SYNC_TIMEOUT_S = 60.0
"""How long a rollout may take to come for weights, or to take a bucket."""


_DEVICE: Typed[tuple[int, str]] = Typed(tuple[int, str], "a device's bytes and name")
_LAYERS: Typed[list[str]] = Typed(list[str], "layers and kernels")


class PolicyWorker(Worker):
    """The worker of one rank of the trainer. `model_dir` is a Hugging Face directory that this rank's node can read."""

    def __init__(self, place: Place, recipe: schema.Recipe, model_dir: Path, command: str = "train") -> None:
        super().__init__(place)
        self.asked = self.recipe = recipe
        self.model_dir, self.command = model_dir, command
        self.dtype = recipe.model.dtype_on(place.device)
        self._progress = Progress()
        self._server: WeightServer | None = None
        self._has_room = False
        self._indexer = RankIndexer()
        self.batches = HeldBatches()

    def setup(self) -> None:
        """Join the process group, read the weights, make the rollout."""
        super().setup()
        recipe = self.recipe
        if any(one.cpu_fraction for one in optimizers(recipe).values()):
            torch.set_num_threads(self.place.threads)  # Ray gives a rank on a GPU one
        use_family(recipe.model.family)
        self.tokenizer = load_tokenizer(self.model_dir, recipe.model)
        self.shape = trained_shape(self.model_dir, mtp=recipe.mtp is not None)
        size, name = self._devices()
        layers, *installed = self._layers()
        recipe, self._kernels = with_kernels(recipe, self.shape, name, installed)
        engine = recipe.engine.model_copy(update={"backend": layers})
        recipe = recipe.model_copy(update={"engine": engine})
        recipe, self._offload_reason = with_shares(recipe, self.shape, cast("Command", self.command), size)
        self.recipe, self.placement = recipe, placement_of(recipe)
        self.roles = Engines(recipe, self.shape, self.model_dir, self.command, self.dtype)
        self.engine = self.roles.policy
        if self.command != "sft" and not self.placement.own_processes:
            backend = InProcessRollout(self.engine, recipe, decoder(self.tokenizer), self._progress)
            at, owns = backend.mesh.coordinates, backend.mesh.owns_output
            self.rollout = RankRollout(
                backend, recipe, self._progress, at, owns_output=owns, routes=self._routes()
            )

    def _devices(self) -> tuple[int | None, str | None]:
        """Bytes of the smallest device of all ranks, None on a CPU; and the name of the devices, None where they differ. Collective."""
        size = 0 if self.device == "cpu" else torch.cuda.mem_get_info(self.device)[1]
        ranks = gathered(_DEVICE, (size, self.device_name()))
        names = {name for _, name in ranks}
        return min(ranks)[0] or None, names.pop() if len(names) == 1 else None

    def _layers(self) -> list[str]:
        """The back end of layers, and which kernels of experts can be had with it. Raises UserError where ranks differ. Collective."""
        backend = choose_backend(self.recipe.engine.backend)
        ranks = gathered(_LAYERS, [backend, *fused_kernels(backend)])
        for rank, found in enumerate(ranks):
            if found != ranks[0]:
                raise UserError(
                    f"ranks have unlike layers and kernels: rank 0 {', '.join(ranks[0])}; rank {rank} {', '.join(found)}. Install the same "
                    "TransformerEngine on all nodes, or set engine.backend=portable"
                )
        return ranks[0]

    def decisions(self) -> Decisions:
        """Return what the recipe leaves open and the ranks have decided."""
        return Decisions(
            self.recipe.engine, self.roles.shares, self.placement.sleep_level, self._offload_reason
        )

    def _routes(self) -> RouteSizes | None:
        """Of the model, where updates replay a rollout's."""
        return RouteSizes.of(self.shape) if self.recipe.engine.replay_routes == "rollout" else None

    def describe(self) -> list[str]:
        """Return what the model's layers are made of here, and what each role's own layout comes to, a line each."""
        threads, layout, device = torch.get_num_threads(), self.recipe.layout, self.device_name()
        told = [self.engine.describe(), self._kernels]
        if self.device == "cpu" and threads > 1:
            told.append(f"{threads} threads a rank (OMP_NUM_THREADS sets another number)")
        if layout.dynamic_cp:
            told.append(costs_of(self.shape, layout.tp, device)[1])
        own = ((own_layout(self.recipe, self.shape, role, device), role) for role in self.roles)
        join = " · ".join
        lines = [join([line.rstrip("."), *self.roles.behind(role).groups]) for line, role in own if line]
        return [join(filter(None, told)), *lines]

    def device_name(self) -> str:
        """Return what this rank computes on, by its name."""
        return "cpu" if self.device == "cpu" else torch.cuda.get_device_name(self.device)

    def coords(self, role: str = "policy") -> dict[str, int]:
        """Return the place in a role's layout."""
        return self.roles.mesh(role).coordinates

    def scatter_backup(
        self, samples: dict[str, list[Batch]], chosen: list[list[Kept]], layers: list[list[int] | None]
    ) -> tuple[Any, ...]:
        """Cut samples whose keeper died, from the copies that it left, by call: see `SampleStore.slice_for`."""
        return None, *cut({call: one for call, (one,) in samples.items()}, chosen, layers)

    def memory_needed(self, device_bytes: int | None) -> Needs:
        if self.command not in ("train", "sft") or not hasattr(self, "shape"):
            return Needs()
        recipe, asked = (on_device(one, self.device, self.model_dir) for one in (self.recipe, self.asked))
        what = self.shape, cast("Command", self.command)
        return Needs(fullest_rank(recipe, *what), cheaper(recipe, *what, asked))

    # training

    def start_optimizer(self, optimizer: schema.Optimizer, total_steps: int, role: str) -> None:
        """Start a fresh optimizer on the present weights; with the policy's, other roles become what they begin as."""
        self.roles.start_optimizer(role, optimizer, total_steps)

    def receive(
        self,
        parts: list[tuple[list[Batch], Assignment]],
        *,
        batch: str,
        placement: str,
        forget: list[str],
        scored: Scored | None,
        aggregation: str | int,
    ) -> None:
        """Take this dp rank's part of a batch, by mini-batch: see `HeldBatches.put`. forget: batches that nothing refers to."""
        self.batches.forget(forget)
        place = self.roles.mesh(placement).at("cp")
        self.batches.put((batch, placement), parts, place, scored, aggregation)

    def score_batch(
        self,
        *,
        batch: str,
        role: str,
        placement: str,
        field: str,
        temperature: float,
        routes: RouteUse | None = None,
    ) -> None:
        """Set a field to the log-probs, or values, of a whole batch's trained tokens, whoever of the dp rank computed them. Collective over
        cp."""
        engine, mesh = self.roles.use(role), self.roles.mesh(placement)
        for one in self.batches[batch, placement]:
            outputs = engine.forward(one.batch, one.cells, temperature, one.routes(routes))
            found = _scores(outputs, one.batch)
            if mesh.sizes.dynamic_cp:  # samples of other ranks' cells are 0 here
                found = torch.where(one.counted_tokens(), found, 0.0)
                dist.all_reduce(found, group=mesh.groups.cp)
            set_tokens(one.batch, field, found)

    def advantages(self, *, batch: str, placement: str, way: Advantages) -> None:
        """Set what `way` makes of rewards and scores."""
        self.batches[batch, placement].advantages(way, self.roles.mesh(placement).sum_over_dp)

    def tell_fields(
        self, *, batch: str, placement: str, fields: list[str], wanted: list[list[int]]
    ) -> tuple[Any, ...]:
        """Return the fields of the samples that this rank tells of, for the dp ranks of another layout: the numbers each wants.
        The first value travels to the controller and is empty, the others do not."""
        mesh = self.roles.mesh(placement)
        tells = mesh.last_stage and mesh.at("tp") == 0
        found = self.batches[batch, placement].told(fields) if tells else {}
        return None, *({n: found[n] for n in numbers if n in found} for numbers in wanted)

    def take_fields(
        self, parts: list[SampleFields], *, batch: str, placement: str, fields: list[str]
    ) -> None:
        """Set fields to what the ranks of another layout told."""
        self.batches[batch, placement].take(parts, fields)

    def replayed(self, *, batch: str, placement: str) -> dict[int, TrainedTokens]:
        """Return the samples of a batch whose number is asked for, with the old log-probs as scored."""
        return self.batches[batch, placement].replayed()

    def logprobs(
        self,
        samples: tuple[list[list[int]], list[int], list[list[Cell]], list[np.ndarray] | None],
        temperature: float,
    ) -> dict[int, torch.Tensor]:
        """Return log-probs of these samples' responses under the present policy, by sample, each told by one rank; unread before
        the last stage. samples: tokens of each, of which so many are the prompt, the cells that they are computed in, and routes of
        all layers that are replayed."""
        ids, prompts, rounds, told = samples
        batch = make_batch(ids, prompts)
        cells = rank_cells(rounds, self.engine.mesh.at("cp"))
        routes = None if told is None else BatchRoutes(self._routes_here(ids, prompts, told))
        found = _scores(self.roles.use("policy").forward(batch, cells, temperature, routes), batch)
        ends = offsets(batch)
        counted = {i for cell in cells if cell.first for i in cell.samples}
        return {i: found[ends[i] + prompts[i] : ends[i + 1]].clone() for i in counted}

    def _routes_here(self, ids: list[list[int]], prompts: list[int], told: list[np.ndarray]) -> Any:
        """Those of the layers on this rank, jagged; None without samples."""
        mine = moe_layers_of(self.recipe.layout, self.shape, self.engine.mesh.at("pp"))
        at = [self.shape.moe_layers.index(layer) for layer in mine]
        return make_batch(ids, prompts, routes=[one[:, at] for one in told])["routes"] if ids else None

    def forward_backward(
        self, *, batch: str, number: int, role: str, placement: str, objective: Objective | ValueObjective
    ) -> MiniBatchTold | None:
        """Compute the gradients of a mini-batch. Ranks of the last stage tell what it came to."""
        mini = self.batches[batch, placement].minis[number]
        loss, routes = WatchedObjective(objective, mini, self._progress), mini.routes(objective.routes)
        result = self.roles.forward_backward(role, mini, loss, objective.temperature, routes)
        mini.parted = {} if routes is None else routes.parted()
        return None if result is None else MiniBatchTold(result.loss, result.tally, loss.replayed())

    def parted_routes(self, *, batch: str, number: int, placement: str) -> PartedRoutes:
        """Return of the last update on a mini-batch in how far tokens would have chosen other routes on this rank."""
        return self.batches[batch, placement].minis[number].parted

    def optimizer_step(self, *, role: str) -> OptimizerTold:
        """Take one step on the gradients of the mini-batch before."""
        step, load = self.roles.optimizer_step(role)
        tells = self.engine.mesh.rank == 0
        return OptimizerTold(step.pop("grad_norm"), step.pop("lr"), step, load if tells else None)

    # the devices change hands: see `quintet.controller.colocation`

    def offload(self, kinds: Sequence[str], *, to_come: float | None) -> int:
        """Take the recipe's shares of these kinds of training state off the device; bytes. to_come: the share of the device that the rollout is
        about to take; None where it takes it already. Where that and SPARE_BYTES are free, torch keeps what activations and buckets left: to
        take it again takes time."""
        left = self.roles.offload(kinds)
        if self.device != "cpu":
            if to_come is not None:
                free, total = torch.cuda.mem_get_info()
                self._has_room = free >= to_come * total + SPARE_BYTES
            if not self._has_room:
                free_cached()
        return left

    def onload(self) -> int:
        """Bring back what left, of the policy; bytes that are there on return: see `Engines.onload`."""
        return self.roles.onload()

    def came(self) -> tuple[int, float]:
        """Return the bytes of optimizer state of the policy that came back beside something else, and in how many seconds."""
        return self.engine.came("optimizer")

    def masters(self) -> int | None:
        """Return a fingerprint of the fp32 master weights: see `Engine.master_fingerprint`."""
        self.roles.whole("policy")
        return self.engine.master_fingerprint()

    def open_server(self) -> None:
        """Make what serves this rank's weights, once, and connect the ranks that exchange them. Collective."""
        if self._server is None:
            connect(build.device())
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

    def plan_sync(self, specs: list[ReceiverSpec]) -> list[Ticket]:
        """Plan for those that take weights from this rank from now on: their tickets."""
        assert self._server is not None, "open_server comes first"
        return self._server.plan(specs)

    def _exported(self) -> list[Shard]:
        return self.engine.exported(
            adapters=self.placement.adapters_separate, scaled=self.placement.adapters_scaled
        )

    def serve(self) -> Served:
        """Hand the present weights to the receivers planned for."""
        assert self._server is not None, "plan_sync comes first"
        self.engine.wait_for_parameters()
        return self._server.serve()

    def fingerprints(self) -> RankFingerprints:
        """Return fingerprints of what this rank hands out, to be compared with what rollouts hold; beside adapters that travel
        alone, also of the frozen weights, which the rollout has from elsewhere."""
        shards = self._exported()
        if self.placement.adapters_separate:
            shards = [*split_adapters(self.engine.shard_map())[0], *shards]
        if self.recipe.rollout.quantization == "fp8":
            told = self._indexer.tell(*quantized_fingerprints(shards, self.shape, build.device()))
            self._same_blocks()  # it raises on some ranks, which have met the others by now
            return told
        return self._indexer.tell(shard_fingerprints(shards), {one.name: one.shape for one in shards})

    def _same_blocks(self) -> None:
        """Raise SyncMismatch where this rank multiplies by other bytes or scales than it hands out."""
        others = other_blocks(self.engine.chunks) if self.recipe.engine.fp8 == "blockwise" else []
        if others:
            raise SyncMismatch(
                f"the trainer would multiply by other weights in 8 bits than its rollouts: TransformerEngine has other bytes or scales than "
                f"were sent, of {', '.join(others)}. Set rollout.quantization=null or engine.fp8=null, and report it with the version of "
                "TransformerEngine"
            )

    def score(self, sequences: list[list[int]]) -> Scores | None:
        """Return the log-probs of fixed tokens, for rollouts whose weights cannot be read back."""
        return engine_scores(self.engine, sequences)

    def save(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory, with the chat template that was used, and its adapters as one of peft's
        beside it."""
        self.roles.use("policy")
        given = self.recipe.model.chat_template is not None
        self.engine.save_hf(path, self.model_dir, self.tokenizer.chat_template if given else None)
        if self.engine.lora is not None:
            self.engine.save_adapters(adapter_directory(path), self.model_dir.absolute())

    # checkpoints

    def parameter_type(self) -> Literal["fp32", "bf16"]:
        """Return the parameters' type, fp32 or bf16."""
        return self.dtype

    def save_checkpoint(self, path: Path, role: str) -> str | None:
        """Write this rank's state of a role, or with `checkpoint.async_save` copy it and begin to write; what went wrong, or None."""
        try:
            aside = self.recipe.checkpoint.async_save
            saved = self.roles.whole(role)
            saved.save(path, wait=False, aside=aside)
            if not aside:
                # Before another role takes the device; each rank for itself, for a disk may take long.
                saved.save_finished(wait=True)
        except UserError as error:
            return str(error)
        return None

    def checkpoint_finished(self, wait: bool, roles: Sequence[str]) -> tuple[bool, str | None]:
        """Return whether this rank has written its parts of these roles, and what went wrong."""
        done, wrong = True, None
        for role in roles:  # all of them, also when one failed: what was begun is collected
            try:
                done = self.roles[role].save_finished(wait) and done
            except UserError as error:
                wrong = wrong or str(error)
        return done, wrong

    def load_checkpoint(self, path: Path, role: str) -> None:
        """Take up a role's saved state, if the role is there: what begins as the policy stays what `start_optimizer` made it."""
        if role in self.roles:
            self.roles.use(role).load(path)


def _scores(outputs: Any, batch: Batch) -> torch.Tensor:
    """Of a batch's tokens: log-probs, or a value model's values. Unread before the last stage."""
    if outputs is None:
        return torch.zeros(token_count(batch))
    found: torch.Tensor = outputs.values if hasattr(outputs, "values") else outputs.logprobs
    return found
