"""A rank's engines, one a role: the policy, a reference policy, a critic. They share the rank's device.

A role that rests is offloaded as `engine.offload_*` says: what the recipe wants away is on the device for one role at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quintet.algorithms.expert_load import ExpertLoad
from quintet.cluster.progress import turn
from quintet.controller.held_batches import HeldMiniBatch
from quintet.engine import build
from quintet.engine.ahead import ahead_losses
from quintet.engine.engine import Engine
from quintet.engine.mesh import Mesh
from quintet.engine.outputs import Loss, MiniBatchResult
from quintet.engine.reference import AdapterReference
from quintet.engine.routes import Routes
from quintet.engine.weights.reshard import Resharder
from quintet.models import ModelShape
from quintet.models.weights_on_disk import VALUE_HEAD
from quintet.recipe import schema
from quintet.recipe.derived import critic_shape, layout_of, optimizer_of, roles_of
from quintet.recipe.lora import lora_shape
from quintet.recipe.offload import KINDS, shares_asked


class Engines(dict[str, Engine | AdapterReference]):
    """By role. recipe: with a number for each `engine.offload_*` (`quintet.plan.offload`). command: what is not needed for it is not made;
    gradients, optimizer state and other roles cost memory. shares: of each kind of training state, that leave."""

    def __init__(
        self, recipe: schema.Recipe, shape: ModelShape, model_dir: Path, command: str, dtype: str
    ) -> None:
        super().__init__()
        self._recipe, self._dtype, self._lora = recipe, dtype, lora_shape(recipe, shape)
        self.shares = shares_asked(recipe)
        self._due: set[str] = set()  # roles with gradients that no step was taken on yet
        self._active = "policy"
        trains = command in ("train", "sft")
        first = recipe.sft.optimizer if command == "sft" and recipe.sft else recipe.optimizer
        self["policy"] = self.policy = self._engine(
            shape, recipe.layout, model_dir, first if trains else None
        )
        for role in roles_of(recipe) if command == "train" else ():
            self._rest(self._active)
            self[role] = self._made(role, shape, model_dir)
            self._active = role
        self.use("policy")

    def _made(self, role: str, shape: ModelShape, model_dir: Path) -> Engine | AdapterReference:
        recipe = self._recipe
        if role == "critic":
            value, directory = critic_shape(recipe, shape), recipe.critic.path or model_dir
            return self._engine(value, layout_of(recipe, role), directory, optimizer_of(recipe, role))
        if self._lora is not None:
            return AdapterReference(self.policy)
        return self._engine(shape.without_mtp(), layout_of(recipe, role), model_dir, None)

    def _engine(
        self, shape: ModelShape, layout: schema.Layout, directory: Path, optimizer: schema.Optimizer | None
    ) -> Engine:
        recipe = self._recipe
        engine = Engine(
            shape,
            layout,
            engine=recipe.engine,
            optimizer=optimizer,
            dtype=self._dtype,
            lora=self._lora,
            mtp=recipe.mtp if shape.mtp_layers else None,
        )
        engine.tell_turns(turn)
        adapters = recipe.lora.path if recipe.lora is not None and shape.head == "lm" else None
        engine.load_hf(directory, adapters=adapters, seed=recipe.run.seed)
        return engine

    def mesh(self, role: str) -> Mesh:
        """Return the mesh of a role's layout."""
        return self.behind(role).mesh

    # whose turn it is

    def use(self, role: str) -> Engine | AdapterReference:
        """Return the role's engine, its parameters on the device; the other roles leave it, as far as the recipe says. No collective."""
        self.bring(role, "params")
        return self[role]

    def whole(self, role: str) -> Engine | AdapterReference:
        """Return the role's engine as `use` does, with gradients and optimizer state, which may come while something else is computed."""
        engine = self.use(role)
        self.behind(role).begin_reload()
        return engine

    def bring(self, role: str, *kinds: str) -> int:
        """Bring these kinds of a role's training state to the device, as for `use`; bytes that came."""
        mine = self.behind(role)
        for name in self:
            if self.behind(name) is not mine:
                self._rest(name)
        self._active = role
        return mine.reload(*kinds)

    def onload(self) -> int:
        """Bring back the policy's parameters and gradients; bytes. Its optimizer state comes beside what is computed next (`Engine.came`),
        or when it is used where roles take turns. So do other roles. No collective."""
        came = self.bring("policy", "params", "grads")
        if all(self.behind(role) is self.policy for role in self):
            self.policy.begin_reload()
        return came

    def offload(self, kinds: Sequence[str]) -> int:
        """Take the recipe's shares of these kinds off the device, of all roles; bytes that left. Of the policy nothing else is away.
        No collective."""
        if self.behind(self._active) is not self.policy:
            self.use("policy")
        return sum(self._rest(role, kinds) for role in self)

    def behind(self, role: str) -> Engine:
        """Return the engine that a role computes with."""
        engine = self[role]
        return engine.engine if isinstance(engine, AdapterReference) else engine

    def _rest(self, role: str, kinds: Sequence[str] = tuple(KINDS)) -> int:
        engine = self.behind(role)
        if isinstance(self[role], AdapterReference):
            return 0
        kept = {"grads"} if role in self._due else set()
        if not engine.trains:
            kept |= {"grads", "optimizer"}
        shares = {kind: self.shares[kind] for kind in kinds if kind not in kept}
        return engine.offload(**shares) if any(shares.values()) else 0

    # training

    def start_optimizer(self, role: str, optimizer: schema.Optimizer, total_steps: int) -> None:
        """Start a fresh optimizer on the present weights. Collective. With the policy's, the reference policy becomes the present
        policy; with the critic's, its trunk does, where it has no directory of its own."""
        engine = self._trained(role)
        self._due.discard(role)
        if role == "critic" and self._recipe.critic.path is None:
            _copy(self.policy, engine)
            self.use(role)
        engine.start_optimizer(optimizer, total_steps)
        if role == "policy" and "reference" in self:
            reference = self["reference"]
            if isinstance(reference, AdapterReference):
                reference.copy_weights_from(engine)
            else:
                _copy(engine, reference)
                self.use(role)

    def forward_backward(
        self, role: str, mini: HeldMiniBatch, loss: Loss, temperature: float, routes: Routes | None = None
    ) -> MiniBatchResult | None:
        """Compute the gradients of a mini-batch: see `Engine.forward_backward`. Raises RuntimeError when the gradients of the
        mini-batch before had no step yet."""
        if role in self._due:
            raise RuntimeError(
                f"{role}: forward_backward before optimizer_step. A mini-batch's gradients take the place of the last one's, which "
                "no step was taken on; take one after each mini-batch, or make the mini-batch larger (train.mini_batches_per_step)"
            )
        engine = self._trained(role)
        ahead = ahead_losses(engine.mtp, mini.assignment.targets)
        result = engine.forward_backward(mini.batch, mini.cells, loss, temperature, ahead, routes)
        self._due.add(role)
        return result

    def optimizer_step(self, role: str) -> tuple[dict[str, float], ExpertLoad | None]:
        """Take an optimizer step: see `Engine.optimizer_step`, and `Engine.expert_load` of its mini-batch. Raises RuntimeError
        where there are no gradients to take it on."""
        if role not in self._due:
            raise RuntimeError(
                f"{role}: optimizer_step without forward_backward: there are no gradients that no step was taken on"
            )
        self._due.discard(role)
        engine = self._trained(role)
        return engine.optimizer_step(), engine.expert_load()

    def _trained(self, role: str) -> Engine:
        engine = self.whole(role)
        if not isinstance(engine, Engine) or not engine.trains:
            raise RuntimeError(f"the {role} is not trained: it has no optimizer")
        return engine


def _copy(source: Engine, target: Engine) -> None:
    """Bring over all weights but a value head, whatever the two layouts. Collective."""
    source.reload()
    target.reload()
    targets = [one for one in target.shard_map() if one.name != VALUE_HEAD]
    Resharder(source.shard_map(), targets, dtype=target.dtype, device=build.device()).run()
