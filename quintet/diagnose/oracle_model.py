"""A model computed in the plainest way there is, for comparison: one rank, one sample at a time, whole logits.

Here the sampling distribution is made from the logits themselves, and routes can be told and prescribed, which neither the
engine in its layout nor a rollout back end need be able to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.cluster.worker import Place, Worker
from quintet.diagnose.find_weights import Weights
from quintet.engine.engine import Engine
from quintet.engine.routes import RowRoutes
from quintet.engine.row import pack
from quintet.errors import UserError
from quintet.models import trained_shape
from quintet.packing.align import alignment_of
from quintet.recipe import schema
from quintet.recipe.lora import lora_shape
from quintet.recipe.user_family import use_family
from quintet.rollout.base import Sampling
from quintet.rollout.native.sampler import keep_mask

TEMPERATURES = (0.05, 20.0)
"""Where a temperature that explains log-probs is looked for."""


class OracleModel:
    """One rank of a model in `dtype`, with portable layers. model_dir: config.json and the weights that are loaded first."""

    def __init__(self, recipe: schema.Recipe, model_dir: Path, dtype: str) -> None:
        self._recipe, self._model_dir = recipe, model_dir
        self._shape = trained_shape(model_dir, mtp=recipe.mtp is not None)
        self._engine = Engine(
            self._shape,
            schema.Layout(),
            engine=schema.Engine(backend="portable"),
            optimizer=None,
            dtype=dtype,
            lora=lora_shape(recipe, self._shape),
        )
        self._model = self._engine.model.eval()
        self._routes = RowRoutes([])  # of the last sample

    def load(self, weights: Weights) -> None:
        """Take these weights. Raises UserError for files that are damaged or of another model."""
        recipe = self._recipe
        if weights.checkpoint is None:
            adapters = recipe.lora.path if recipe.lora is not None else None
            self._engine.load_hf(weights.model, adapters=adapters, seed=recipe.run.seed)
            return
        if recipe.lora is not None:
            self._engine.load_hf(self._model_dir, adapters=recipe.lora.path, seed=recipe.run.seed)
        self._engine.load(weights.checkpoint)

    @torch.no_grad()
    def logits(self, ids: list[int], prompt: int, routes: Any = None) -> Tensor:
        """Return what predicts the response's tokens: fp32 [tokens - prompt, vocabulary]. routes: prescribed, [tokens - 1,
        layers with experts, top-k], for all tokens but the last, which predicts nothing."""
        values, model = torch.tensor(ids), self._model
        align = alignment_of(self._engine.layout, cp=1, engine=None)
        micro = pack(values, torch.tensor([0, len(ids)]), torch.zeros(len(ids)).bool(), [0], align)
        row = model.row(micro)
        self._routes = row.routes = RowRoutes(self._shape.moe_layers, keep=True)
        if routes is not None:
            told = torch.as_tensor(routes).to(model.device)
            filler = told.new_zeros(micro.tokens - len(told), *told.shape[1:])
            row.routes.prescribed = torch.cat((told, filler))
            row.routes.prescribed_to = torch.arange(micro.tokens, device=model.device) < len(told)
        hidden = model.for_head(model(micro.input_ids.to(model.device), row))
        rows = hidden[prompt - 1 : len(ids) - 1]
        return (rows @ model.head_weight().t()).float()[:, : self._shape.vocab_size]

    def routes(self, tokens: int) -> Tensor | None:
        """Return experts of the first tokens in the last call of `logits`, int64 [tokens, layers with experts, top-k]."""
        heard = self._routes.heard
        if not heard:
            return None
        return torch.stack([heard[layer][:tokens].long().cpu() for layer in self._routes.layers], 1)


class PlainWorker(Worker):
    """The one rank on which the plain model is computed: in fp32, and in bf16 for what that alone parts."""

    def __init__(self, place: Place, recipe: schema.Recipe, model_dir: Path) -> None:
        super().__init__(place)
        self.recipe, self.model_dir = recipe, model_dir

    def setup(self) -> None:
        """Make the fp32 model."""
        super().setup()
        use_family(self.recipe.model.family)
        self.model = self._make("fp32")

    def _make(self, dtype: str) -> OracleModel:
        try:
            return OracleModel(self.recipe, self.model_dir, dtype)
        except torch.OutOfMemoryError:
            raise UserError(
                f"the model in {dtype} does not fit one device, and without it the log-probs have nothing to be held against"
            ) from None

    def load(self, weights: Weights) -> None:
        """Take these weights."""
        self.model.load(weights)

    def logprobs(
        self,
        ids: list[list[int]],
        prompts: list[int],
        samplings: list[Sampling],
        routes: list[Any] | None = None,
    ) -> list[Tensor]:
        """Return log-probs of the responses' tokens, under each sampling: fp32 [response tokens] all samples after one another.
        routes: prescribed, of each sample."""
        return scored(self.model, ids, prompts, samplings, routes)

    def in_bf16(
        self,
        weights: Weights,
        ids: list[list[int]],
        prompts: list[int],
        sampling: Sampling,
        routes: list[Any] | None = None,
    ) -> Tensor:
        """Return log-probs as `logprobs`, of a model in bf16."""
        model = self._make("bf16")
        model.load(weights)
        return scored(model, ids, prompts, [sampling], routes)[0]

    def routed(
        self, ids: list[list[int]], prompts: list[int], routes: list[Any], sampling: Sampling
    ) -> tuple[Tensor, float]:
        """Return the log-probs with prescribed routes; and the share of them, by token and layer, where the model itself chooses
        others."""
        found, other, total = [], 0, 0
        for one, prompt, told in zip(ids, prompts, routes, strict=True):
            self.model.logits(one, prompt)
            chosen, prescribed = self.model.routes(len(one) - 1), torch.as_tensor(told).long()
            if chosen is None or chosen.shape != prescribed.shape:
                shape = None if chosen is None else list(chosen.shape)
                raise UserError(
                    f"routes of shape {list(prescribed.shape)} were kept, and the model's are {shape}"
                )
            other += int((chosen.sort(-1)[0] != prescribed.sort(-1)[0]).any(-1).sum())
            total += chosen.shape[0] * chosen.shape[1]
            logits = self.model.logits(one, prompt, told)
            found.append(_under(logits, torch.tensor(one[prompt:]), sampling).cpu())
        return torch.cat(found), other / max(total, 1)

    def temperature(self, ids: list[int], prompt: int, logprobs: list[float]) -> float:
        """Return the temperature at which the log-probs of a response's tokens come nearest to the given ones."""
        logits, chosen = self.model.logits(ids, prompt), torch.tensor(ids[prompt:])
        wanted = torch.tensor(logprobs, device=logits.device)

        def gap(log_temperature: float) -> float:
            sampling = Sampling(temperature=math.exp(log_temperature))
            return float((_under(logits, chosen, sampling) - wanted).abs().mean())

        low, high = map(math.log, TEMPERATURES)
        for _ in range(6):  # each time around the best of seventeen, between its neighbours
            points = torch.linspace(low, high, 17, dtype=torch.float64).tolist()
            best = min(range(len(points)), key=lambda i: gap(points[i]))
            low, high = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
        return math.exp((low + high) / 2)


def scored(
    model: OracleModel,
    ids: Sequence[list[int]],
    prompts: Sequence[int],
    samplings: Sequence[Sampling],
    routes: Sequence[Any] | None = None,
) -> list[Tensor]:
    """Return log-probs of the responses' tokens: see `PlainWorker.logprobs`."""
    rows: list[list[Tensor]] = [[] for _ in samplings]
    for one, prompt, told in zip(ids, prompts, routes or [None] * len(ids), strict=True):
        logits = model.logits(one, prompt, told)
        for row, sampling in zip(rows, samplings, strict=True):
            row.append(_under(logits, torch.tensor(one[prompt:]), sampling).cpu())
    return [torch.cat(row) for row in rows]


def _under(logits: Tensor, chosen: Tensor, sampling: Sampling) -> Tensor:
    """Log-prob of each chosen token under the sampling distribution; -inf where that leaves it out."""
    log_p = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    kept = keep_mask(log_p, sampling)
    if kept is not None:
        log_p = log_p.masked_fill(~kept, float("-inf")).log_softmax(-1)
    return log_p.gather(1, chosen.to(log_p.device)[:, None])[:, 0]
