"""One rank of a rollout in processes of its own."""

from __future__ import annotations

from pathlib import Path

from quintet.cluster.progress import Progress
from quintet.cluster.worker import Place, Worker
from quintet.controller.rank_rollout import RankRollout
from quintet.data.routes import RouteSizes
from quintet.data.tokenizer import decoder, load_tokenizer
from quintet.models import trained_shape
from quintet.plan.fullest import cheaper_rollout, setup_of
from quintet.plan.out_of_memory import Needs
from quintet.plan.rollout import rollout_bytes
from quintet.recipe import schema
from quintet.recipe.derived import on_device
from quintet.recipe.rollout import placement_of
from quintet.recipe.user_family import use_family
from quintet.rollout.make import make_rollout


class RolloutWorker(Worker):
    """The worker of one rank of a rollout. `model_dir` is a Hugging Face directory that this rank's node can read."""

    def __init__(self, place: Place, recipe: schema.Recipe, model_dir: Path) -> None:
        super().__init__(place)
        self.recipe, self.model_dir = recipe, model_dir

    def setup(self) -> None:
        """Make the rollout; of a native one, join the process group of its ranks first."""
        recipe, progress = self.recipe, Progress()
        if recipe.rollout.backend == "native":
            super().setup()
        use_family(recipe.model.family)
        self.shape = trained_shape(self.model_dir, mtp=recipe.mtp is not None)
        decode = decoder(load_tokenizer(self.model_dir, recipe.model))
        backend = make_rollout(recipe, self.model_dir, device=self.device, decode=decode, progress=progress)
        owns_output = self.rank == self.world_size - placement_of(recipe).layout.tp or self.world_size == 1
        replayed = recipe.engine.replay_routes == "rollout"
        routes = RouteSizes.of(self.shape) if replayed else None
        self.rollout = RankRollout(
            backend, recipe, progress, self.coords(), owns_output=owns_output, routes=routes
        )

    def coords(self) -> dict[str, int]:
        """Return the place in the rollout's layout: tp fastest, as everywhere. Its ranks share all requests, so dp is 1."""
        pp, tp = divmod(self.rank, placement_of(self.recipe).layout.tp)
        return {"tp": tp, "pp": pp, "cp": 0, "dp": 0}

    def memory_needed(self, device_bytes: int | None) -> Needs:
        if not hasattr(self, "shape"):
            return Needs()
        recipe = on_device(self.recipe, self.device, self.model_dir)
        weights, cache = rollout_bytes(recipe, setup_of(recipe, self.shape), device_bytes)
        return Needs(
            {"weights": weights, "KV cache": cache},
            cheaper_rollout(recipe, self.shape, device_bytes),
            doing="generates",
            on_top="what it computes",
            others="its engine's, and training state beside it",
            less_of_others="Training state beside a colocated rollout takes less with engine.offload_params, engine.offload_grads and "
            "engine.offload_optimizer at 1.",
        )
