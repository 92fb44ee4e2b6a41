"""The training engine: one rank of a megatron-core model in a layout.

    engine = Engine(shape, layout, ...)
    engine.load_hf(path)
    engine.forward_backward(batch, cells, loss)      # a whole mini-batch: its gradients replace the last's
    engine.optimizer_step()

Every method that communicates is called by all ranks of the layout, in the same order. Losses are normalised by
global counts (the caller's), so results do not depend on how a batch was cut into micro-batches and ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine import megatron_compat

megatron_compat.install()

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.expert_load import ExpertLoad
from quintet.data.batch import Batch, offsets
from quintet.engine import build, lora
from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.ahead import AheadLoss
from quintet.engine.balance import Load, RouterLosses, move_biases
from quintet.engine.checkpoint.checkpoints import Checkpoints
from quintet.engine.clip import clipped_step
from quintet.engine.device import upload
from quintet.engine.layers.attention_backends import kernel_title
from quintet.engine.layers.mtp import freeze_ahead
from quintet.engine.layers.router import Router
from quintet.engine.layers.specs import choose_backend
from quintet.engine.model import PolicyModel
from quintet.engine.offload import Offloader
from quintet.engine.optimizer import build_optimizer, freeze, gradient_sets, set_learning_rate
from quintet.engine.outputs import Loss, MiniBatchResult, fields_of, flat_fields
from quintet.engine.parameter_gather import ParameterGather
from quintet.engine.pipeline import Pipeline
from quintet.engine.routes import Routes
from quintet.engine.row import MicroBatch
from quintet.engine.schedule import learning_rate
from quintet.engine.weights import hf, peft
from quintet.engine.weights.fingerprint import Fingerprints
from quintet.engine.weights.master_fingerprint import master_fingerprint
from quintet.engine.weights.shards import Shard, shard_fingerprints, shard_map
from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.lora import LoraShape
from quintet.models.weights_on_disk import fingerprint
from quintet.packing.plan import RankCell
from quintet.recipe import schema

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Engine:
    """One rank of a model that is trained, or, without an optimizer, only evaluated."""

    def __init__(
        self,
        shape: ModelShape,
        layout: schema.Layout,
        *,
        engine: schema.Engine,
        optimizer: schema.Optimizer | None,
        dtype: str,
        total_steps: int = 1,
        lora: LoraShape | None = None,
        mtp: schema.Mtp | None = None,
    ) -> None:
        if shape.mtp_layers and optimizer is not None and mtp is None:
            raise UserError(
                f"the {shape.family} model has {shape.mtp_layers} layers for multi-token prediction, and nothing says whether "
                "they are trained: give the engine `mtp`, or build it without them (ModelShape.without_mtp); a saved model "
                "takes them along"
            )
        self.shape, self.layout, self.recipe = shape, layout, engine
        self.dtype = DTYPES[dtype]
        self.mesh = build.mesh_of(layout, dist.get_world_size())
        self._groups_bytes = build.warm_groups(self.mesh)
        self.lora, self.mtp = lora, mtp
        self.chunks = build.build_chunks(shape, layout, self.mesh, self.dtype, engine, lora)
        if mtp is not None and not mtp.train:
            freeze_ahead(self.chunks)
        if optimizer is not None:
            freeze(self.chunks, self.mesh, optimizer)
        self.config = self.chunks[0].config
        self.steps, self.total_steps = 0, total_steps
        self._wrapped: list[Any] = list(self.chunks)
        self._optimizer: Any = None
        self._optimizer_recipe = optimizer
        if optimizer is not None:
            self._wrapped = build.wrap_for_training(self.chunks, self.mesh, engine)
        overlaps = optimizer is not None and engine.overlap_param_gather
        self._gather = ParameterGather(self._wrapped if overlaps else [])
        self._offloader = Offloader(self._wrapped)
        self._checkpoints = Checkpoints(self)
        self.base: tuple[str, str] | None = None
        """Of an engine with adapters: where the frozen weights were read, and their fingerprint."""
        self._incomplete: str | None = None  # why the weights are none, after a load that failed midway
        self._pipeline = Pipeline(shape, self.chunks, self._wrapped, self.mesh, layout, engine)
        self._counts: Tensor | None = None
        """`Load.total` of the mini-batch that the gradients are of, over all ranks."""

    @property
    def model(self) -> PolicyModel:
        """The pipeline stage. Of an interleaved pipeline's several chunks, the first."""
        return self.chunks[0]

    @property
    def depths(self) -> int:
        """Layers for multi-token prediction that are trained."""
        return self.shape.mtp_layers if self.mtp is not None and self.mtp.train else 0

    @property
    def trains(self) -> bool:
        """Whether it was made with an optimizer."""
        return self._optimizer_recipe is not None

    def tell_turns(self, told: Callable[[str], None]) -> None:
        """Have `told` hear which micro-batch this rank comes to, and which ranks share it; "" once all are done."""
        self._pipeline.turn = told

    def describe(self) -> str:
        """Return which layers and which attention kernel this machine and recipe came to."""
        backend = choose_backend(self.recipe.backend)
        kernel = kernel_title(build.device(), self.dtype, backend, sinks=self.shape.sinks)
        products = f" · products in 8 bits: {self.recipe.fp8}" if self.recipe.fp8 else ""
        torch_experts = " · experts: torch" if self.recipe.experts == "torch" else ""
        return " · ".join([f"layers: {backend}{torch_experts} · attention: {kernel}{products}", *self.groups])

    @property
    def groups(self) -> list[str]:
        """Groups of ranks that share a row, where rows differ in that, with the memory that they took on a GPU; else nothing."""
        sizes = ", ".join(str(size) for size in self.mesh.cp_groups if size > 1)
        on_gpu = f" ({self._groups_bytes >> 20} MiB)" if build.device().type == "cuda" else ""
        return [f"groups of {sizes} ranks for a row{on_gpu}"] if self.layout.dynamic_cp else []

    # weights

    def load_hf(self, path: Path, *, adapters: Path | None = None, seed: int = 0) -> None:
        """Read weights from a Hugging Face directory and (re)start the optimizer from them. Collective.

        With LoRA, adapters are read from a directory of peft's, or fresh ones are drawn from the seed.

        Raises UserError on every rank when one finds fault with a file. Where only reading the data could show it, the
        engine has no weights any more: it refuses to compute and to save until others are loaded.
        """
        weights = hf.check_hf(self.shape, path)
        self._gather.finish()
        self._offloader.require("params")
        self._incomplete = f"{path} could not be read to its end"
        base, low_rank = lora.split_adapters(shard_map(self.chunks, self.shape, self.mesh))
        hf.fill_hf(base, weights)
        if self.lora is not None and adapters is not None:
            peft.load_adapters(low_rank, self.shape, self.lora, adapters)
        else:
            lora.start(low_rank, seed)
        if self.lora is not None:
            self.base = str(path), run_on_all_or_raise(lambda: fingerprint(weights))
        self._incomplete = None
        self.start_optimizer(self._optimizer_recipe, self.total_steps)

    def start_optimizer(self, optimizer: schema.Optimizer | None, total_steps: int) -> None:
        """Start a fresh optimizer (master weights, zero moments, step 0) on the present weights. Collective."""
        before = self._optimizer_recipe
        if optimizer is not None and before is not None and optimizer.frozen != before.frozen:
            raise UserError(
                f"{optimizer.key}.frozen=[{', '.join(optimizer.frozen)}]: the engine was made with {before.key}.frozen="
                f"[{', '.join(before.frozen)}], which says what has gradients; give both the same"
            )
        self._optimizer_recipe, self.total_steps, self.steps = optimizer, total_steps, 0
        self._gather.finish()
        self.reload()
        self._optimizer = self._offloader.optimizer = None  # the old state goes before the new one comes
        if optimizer is not None:
            self._optimizer = build_optimizer(
                self._wrapped, self.mesh, self.dtype, optimizer, self.recipe, self.mtp
            )
            self._offloader.optimizer = self._optimizer

    def save_hf(self, path: Path, companions: Path, chat_template: str | None = None) -> None:
        """Write a Hugging Face directory, with adapters merged; `companions` gives config.json and the tokenizer, whose chat template
        may be another. Collective."""
        hf.save_hf(self.exported(), self.shape, self.dtype, build.device(), path, companions, chat_template)

    def save_adapters(self, path: Path, base: Path | None) -> None:
        """Write the adapters as a directory of peft's. base: the model they are for, if its place is known. Collective.

        Raises UserError on every rank when the disk does not take it.
        """
        assert self.lora is not None
        name = None if base is None else str(base)
        peft.save_adapters(self.shard_map(), self.shape, self.lora, self.dtype, build.device(), path, name)

    def shard_map(self, of: str = "param") -> list[Shard]:
        """Return what this rank holds: see `quintet.engine.weights.shards`."""
        self._require("params" if of == "param" else "grads")
        return shard_map(self.chunks, self.shape, self.mesh, of)

    def exported(self, *, adapters: bool = False, scaled: bool = False) -> list[Shard]:
        """Return what others get of the weights: all, with adapters merged; or the adapters alone, `scaled` with their scale in
        B."""
        shards = self.shard_map()
        if self.lora is None:
            return shards
        if not adapters:
            return lora.merged(shards, self.lora)
        alone = lora.split_adapters(shards)[1]
        return lora.scaled(alone, self.lora.scale) if scaled else alone

    def fingerprints(self, *, adapters: bool = False) -> Fingerprints:
        """Return fingerprints of the live weights on this rank, as they are `exported`. No collective."""
        return shard_fingerprints(self.exported(adapters=adapters))

    def master_fingerprint(self) -> int | None:
        """Return one number over this rank's fp32 master weights, which changes when one of them does; None where parameters are
        their own masters, or nothing is trained. No collective."""
        self._require("optimizer")
        if self._optimizer is None:
            return None
        return master_fingerprint(self._optimizer, [p for chunk in self.chunks for p in chunk.parameters()])

    def _require(self, *kinds: str) -> None:
        """Refuse weights that were read in part, and what is offloaded; wait for parameters that are still to come."""
        self._require_here(*kinds)
        if "params" in kinds:
            self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Wait until this rank has what others updated in the last step. Methods do by themselves; who keeps what one of them returned
        (shards, the model) and reads it after another step calls this first. No collective."""
        self._gather.finish()

    def _require_here(self, *kinds: str) -> None:
        """As `_require`, where layers wait for their parameters by themselves."""
        if self._incomplete is not None:
            raise UserError(f"the weights are incomplete, {self._incomplete}: load others first")
        self._offloader.require(*kinds)

    def copy_weights_from(self, other: Engine) -> None:
        """Take another engine's weights, of the same layout. No collective."""
        for mine, theirs in zip(self.shard_map(), other.shard_map(), strict=True):
            mine.write(theirs.read())

    def without_adapters(self) -> AbstractContextManager[None]:
        """Use the model without its adapters, for as long as the context lasts: the base, of which no copy is needed."""
        return lora.disable_adapters(self.chunks)

    # checkpoints

    def save(self, path: Path, *, wait: bool = True, aside: bool = True) -> None:
        """Write model, optimizer, step and random states to a new directory, for any layout to load. Collective.

        wait=False goes on writing in the background, and `save_finished` tells how it went. aside: copies the state to host memory
        first, which the first such save allocates and later ones use again; without it nothing may change before all is written.

        Raises UserError, with wait on every rank alike, when it cannot be written: what was written is removed.
        RuntimeError when something is offloaded, or the last save was not waited for.
        """
        self._require("params", "optimizer")
        self._checkpoints.start(path, aside=aside)
        if wait:
            run_on_all_or_raise(lambda: self.save_finished(wait=True))

    def save_finished(self, wait: bool) -> bool:
        """Return whether this rank's part of the last save is on the disk; on rank 0, whether the whole is. No collective.

        wait: until it is. Raises UserError naming path and reason when it could not be written.
        """
        return self._checkpoints.finished(wait)

    def load(self, path: Path) -> None:
        """Take model, optimizer and step from what `save` wrote, in this or any other layout. Collective. With adapters
        these are saved alone: the weights beside them are read by `load_hf` before.

        Everything is read and checked before anything changes, at the cost of host memory for what the rank holds. An
        engine without an optimizer takes the weights alone. Learning rate, betas and weight decay are this engine's
        own; so is total_steps. fp32 and bf16 engines load each other's checkpoints through the fp32 weights. Random
        states are restored in the layout they were saved in, and stay as they are in any other.

        Raises UserError on every rank for a file that is missing or damaged, and for another model or optimizer.
        """
        self._gather.finish()
        if self.lora is not None:
            assert self.base is not None, "load_hf comes first: a checkpoint of adapters holds nothing else"
            self._require()
        self.reload()
        if self._optimizer_recipe is not None and self._optimizer is None:
            self.start_optimizer(self._optimizer_recipe, self.total_steps)
        self.steps = self._checkpoints.load(path)

    # memory

    def offload(self, *, params: float = 0.0, grads: float = 0.0, optimizer: float = 0.0) -> int:
        """Free shares of this rank's memory between phases: see `quintet.engine.offload`; bytes. Gradients are lost."""
        if params:
            self._gather.finish()
        return self._offloader.offload(params=params, grads=grads, optimizer=optimizer)

    def reload(self, *kinds: str) -> int:
        """Bring back what is offloaded, if anything is, of these kinds or of all; bytes."""
        return self._offloader.reload(*kinds)

    def begin_reload(self) -> int:
        """Begin to bring back all that is offloaded, beside what is computed meanwhile; bytes. Whatever needs it waits for it."""
        return self._offloader.begin_reload()

    def came(self, kind: str) -> tuple[int, float]:
        """Wait for what comes of a kind: its bytes, and the seconds that they took. See `quintet.engine.offload`."""
        return self._offloader.came(kind)

    # compute

    def forward(
        self,
        batch: Batch,
        cells: Sequence[RankCell],
        temperature: float = 1.0,
        routes: Routes | None = None,
    ) -> Any:
        """Return the outputs (of a value model ValueOutputs) of the tokens with loss_mask 1, flat like the batch's values, fp32
        on the CPU. Other tokens get 0, and so do samples of no cell of this rank. Ranks of the last stage return them, others
        None.

        cells, routes: as in `forward_backward`.
        """
        kind = self._pipeline.output_type
        names = [field.name for field in dataclasses.fields(kind)]
        flat = {name: torch.zeros(len(batch["input_ids"].values()), device=build.device()) for name in names}

        def collect(outputs: list[Any], micro: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
            at = upload(micro.targets[0].token_index, build.device())
            for name, out in flat.items():
                out[at] = getattr(outputs[0], name)
            return torch.zeros((), device=build.device()), {}

        self._require("params")
        with torch.no_grad():
            self._pipeline.run(batch, cells, collect, temperature, forward_only=True, routes=routes)
        return kind(*(flat[name].cpu() for name in names)) if self.mesh.last_stage else None

    def forward_backward(
        self,
        batch: Batch,
        cells: Sequence[RankCell],
        loss: Loss,
        temperature: float = 1.0,
        ahead: Sequence[AheadLoss] = (),
        routes: Routes | None = None,
    ) -> MiniBatchResult | None:
        """Compute the gradients of a mini-batch, in place of what was there. Ranks of the last stage return what came of the
        cells of which they are the first rank, others None: over dp and cp, these parts add up to the mini-batch.

        cells: this rank's, as planned, with samples as positions in `batch`; every rank has as many. ahead: the losses of the
        layers for multi-token prediction, each depth's, as `ahead_losses` gives them; the loss that is returned is without them,
        their own are in the tally, nor are those of routers in it, which `expert_load` tells. routes: what tokens' experts are prescribed by, or kept in; without it, whatever the batch
        says of routes, tokens choose by themselves.
        """
        if len(ahead) != self.depths:
            raise ValueError(f"{len(ahead)} losses for {self.depths} layers for multi-token prediction")
        fields = flat_fields(batch, build.device())
        losses: list[Loss] = [loss, *ahead]
        shares: list[Tensor] = []
        tally = Tally()

        def compute(outputs: list[Any], micro: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
            at = [fields_of(fields, targets) for targets in micro.targets]
            told = [one(out, here) for one, out, here in zip(losses, outputs, at, strict=True)]
            if micro.first:  # all ranks of a cell compute the same loss
                shares.append(told[0][0].detach())
                for (_, quantities), here in zip(told, at, strict=True):
                    tally.add(quantities, here["loss_mask"])
            return sum((share for share, _ in told[1:]), told[0][0]), {}

        if self._optimizer_recipe is None:
            raise RuntimeError("this engine was made without an optimizer: it can only be evaluated")
        self._require_here("params", "grads")
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        if self._optimizer is not None:
            # The whole optimizer left the buffers as each parameter's grad: backward would add to them twice.
            self._optimizer.zero_grad()
        load = self._load(batch, cells, temperature, routes)
        how: dict[str, Any] = {"ahead": ahead, "routes": routes, "load": load}
        self._pipeline.run(batch, cells, compute, temperature, forward_only=False, **how)
        self._counts = None if load is None else self._over_ranks(load.total)
        if not self.mesh.last_stage:
            return None
        return MiniBatchResult(float(torch.stack(shares).sum()) if shares else 0.0, tally.cpu())

    def _load(
        self, batch: Batch, cells: Sequence[RankCell], temperature: float, routes: Routes | None
    ) -> Load | None:
        """What counts the load of experts in an update, with the losses of routers that the recipe asks for. Collective."""
        moe, recipe, device = self.shape.moe, self.recipe, build.device()
        if moe is None:
            return None
        if not (recipe.z_loss or recipe.aux_loss):
            return Load(self.shape.layers, moe, device)
        lengths = offsets(batch).diff()
        mine = lengths[[i for cell in cells if cell.first for i in cell.samples]]
        sizes = torch.tensor([int(mine.sum()), len(mine)], device=device)
        dist.all_reduce(sizes, group=self.mesh.groups.dp_cp)
        tokens, samples = sizes.tolist()
        counts = None
        if recipe.aux_loss is not None and recipe.aux_loss.per == "batch":
            before = Load(self.shape.layers, moe, device)
            how: dict[str, Any] = {"routes": None if routes is None else routes.again(), "load": before}
            with torch.no_grad():
                self._pipeline.run(batch, cells, None, temperature, forward_only=True, **how)
            counts = self._over_ranks(before.total)[:, :-2]
        aux = 0.0 if recipe.aux_loss is None else recipe.aux_loss.weight
        losses = RouterLosses(recipe.z_loss, aux, lengths, tokens, samples, counts)
        return Load(self.shape.layers, moe, device, losses)

    def _over_ranks(self, counts: Tensor) -> Tensor:
        """The sum over all ranks of the layout, each of which has layers and tokens of its own. Collective."""
        dist.all_reduce(counts, group=self.mesh.groups.intra_dist_opt)
        return counts

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, move the biases of experts, and return the learning rate used and the gradient norm before clipping;
        `mtp/grad_norm` is that of layers for multi-token prediction, which are clipped by themselves."""
        assert self._optimizer_recipe is not None
        self._require("params", "grads", "optimizer")
        self.steps += 1
        rate = learning_rate(self.steps, self.total_steps, self._optimizer_recipe)
        set_learning_rate(self._optimizer, rate)
        norms = clipped_step(self._optimizer, gradient_sets(self._optimizer_recipe, self.mtp))
        self._gather.start()
        # The norms are the same on all ranks: all stop here, or none. What these weights have become is not saved.
        for name, norm in norms.items():
            if not math.isfinite(norm):
                of = f" of {name}" if name else ""
                raise FloatingPointError(
                    f"optimizer step {self.steps}: the gradient norm{of} is {norm}. Lower {self._optimizer_recipe.key}.lr, or "
                    "look at what the samples and rewards of this step hold"
                )
        told = {"lr": rate} | {f"{name}/grad_norm".lstrip("/"): norm for name, norm in norms.items()}
        if self._counts is not None and self.recipe.expert_bias_rate:
            # After the step: what it changed was computed with the bias as it was.
            routers = (m for chunk in self.chunks for m in chunk.modules() if isinstance(m, Router))
            move_biases(routers, self._counts[:, :-2], self.recipe.expert_bias_rate)
        return told

    def expert_load(self) -> ExpertLoad | None:
        """Return how evenly the mini-batch before used experts, the same on all ranks; None where the model has none. No collective."""
        added = (("experts/aux_loss", self.recipe.aux_loss), ("experts/z_loss", self.recipe.z_loss))
        losses = [name for name, on in added if on]
        return None if self._counts is None else ExpertLoad.of(self._counts, self.shape.moe_layers, losses)
