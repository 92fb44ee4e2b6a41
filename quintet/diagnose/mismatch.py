"""`quintet diagnose mismatch`: the samples of a step replayed, with the weights that generated them.

First what needs no model: whether the tokens are the same. Then the recipe's own engine, in its layout and type, and its
rollout, to which the weights are brought as in a run; then the same model in fp32 on one rank, computed the plainest way,
and there once more for each cause that could explain the numbers. `quintet.diagnose.diagnosis` judges what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from quintet.cluster.verbs import StandIn
from quintet.controller.replay import Replay, read, replay_file
from quintet.data.tokenizer import load_tokenizer, remote_code_warning
from quintet.diagnose.diagnosis import Cause, Diagnosis, Evidence, judge, shifted
from quintet.diagnose.find_weights import Weights, find_weights
from quintet.diagnose.token_check import token_faults
from quintet.errors import SyncMismatch, UserError
from quintet.recipe.loader import load_recipe
from quintet.recipe.schema import Layout, Recipe
from quintet.rollout.base import Sampling
from quintet.runs.directory import RunDirectory, replays

if TYPE_CHECKING:
    from quintet.diagnose.oracle_model import PlainWorker as Plain
else:
    Plain = StandIn("quintet.diagnose.oracle_model:PlainWorker")

SAME = 0.02
"""Temperatures as near to each other as this, as a share, are one."""

P = ParamSpec("P")
T = TypeVar("T")


class Ask(Protocol):
    """Calls a method of `PlainWorker`, wherever it is."""

    def __call__(self, verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T: ...


@dataclass(frozen=True)
class Found:
    """A diagnosis, and the step and samples that it is of."""

    step: int
    samples: int
    tokens: int
    weights: Path
    diagnosis: Diagnosis


def diagnose(run: Path, step: int | None, say: Callable[[str], None]) -> Found:
    """Diagnose a step of a run; None is the newest that can be.

    Raises UserError where there is no such run or step, or nothing of it to replay or to replay it with.
    """
    recipe = load_recipe(RunDirectory.begun(run).recipe, ["resume=null"])
    replay, weights = _choose(run, recipe, step, say)
    ids = [s.generated.ids for s in replay.samples]
    prompts = [s.generated.prompt_tokens for s in replay.samples]
    say(f"step {replay.step}: {len(ids)} samples, {sum(map(len, ids))} tokens, generated with {weights.path}")
    if recipe.model.trust_remote_code:
        say(remote_code_warning(weights.model))
    tokenizer = load_tokenizer(weights.model, recipe.model)
    faults = token_faults(replay, tokenizer, special=not recipe.data.chat)
    tokens = sum(map(len, ids)) - sum(prompts)
    if faults:  # nothing that is computed from the one or the other would mean anything
        return Found(replay.step, len(ids), tokens, weights.path, Diagnosis("tokens", faults[0], []))
    say("1 of 2: the recipe's engine in its layout, and its rollout")
    routes = _replayed_routes(recipe, replay)
    own = _in_own_layout(recipe, weights, ids, prompts, routes)
    say("2 of 2: the same model in fp32 on one rank")
    before = find_weights(run, recipe, weights.step - 1) if weights.step else None
    if before is not None and recipe.lora is not None and before.merged != weights.merged:
        say(f"not tried: weights one update behind, for those of step {before.step} are of another kind")
        before = None
    evidence = _beside_plain(recipe, weights, before, replay, own)
    return Found(replay.step, len(ids), tokens, weights.path, judge(evidence))


def recorded_gaps(run: Path) -> dict[int, float]:
    """Return the mean |Δ log-prob| of rollout and trainer in the samples kept of each step, as recorded, whether or not they can
    be replayed."""
    gaps = {}
    for step, file in replays(run).items():
        with suppress(UserError):
            samples = read(file).samples
            pairs = [
                abs(a - b)
                for s in samples
                for a, b in zip(s.trained.rollout_logprobs, s.trained.old_logprobs, strict=True)
            ]
            gaps[step] = sum(pairs) / max(len(pairs), 1)
    return gaps


def _choose(
    run: Path, recipe: Recipe, step: int | None, say: Callable[[str], None]
) -> tuple[Replay, Weights]:
    steps = sorted(replays(run), reverse=True)
    if not steps:
        raise UserError(
            f"{run} keeps no samples for replay: there is no replay/ in it. mismatch.replay_samples_per_step says how many "
            "a step keeps"
        )
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {run}/replay has {_listed(steps)}")
    damaged: UserError | None = None
    for one in steps if step is None else [step]:
        if (weights := find_weights(run, recipe, one - 1)) is not None:
            try:
                return read(replay_file(run, one)), weights
            except UserError as error:
                damaged = damaged or error
                if step is None:
                    say(f"{error}; an earlier step is looked for")
    if damaged is not None:
        raise damaged
    wanted = f"step {step} was" if step is not None else f"steps {_listed(steps)} were"
    raise UserError(
        f"{run}: the weights that {wanted} generated with are not there any more. A run keeps them with checkpoint.every_steps "
        "or checkpoint.hf_every_steps: the samples of the step after each can be replayed"
    )


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown}, …" if len(steps) > 8 else shown


@dataclass(frozen=True)
class OwnLayout:
    """What the recipe's engine and rollout come to, fp32 [response tokens]; None where the sync proof ended it."""

    dtype: str
    engine: Tensor | None
    now: tuple[Tensor, Tensor] | None
    sync: str | None


def _replayed_routes(recipe: Recipe, replay: Replay) -> list[Any] | None:
    """Of each sample the routes that the trainer was told; None where it chose by itself."""
    told = [s.generated.routes for s in replay.samples]
    if recipe.engine.replay_routes != "rollout" or any(one is None for one in told):
        return None
    return told


def _in_own_layout(
    recipe: Recipe, weights: Weights, ids: list[list[int]], prompts: list[int], routes: list[Any] | None
) -> OwnLayout:
    from quintet.train.session import session

    own = _recipe_of(recipe, weights)
    dtype = "unknown"
    try:
        with session(own, "generate") as s:
            dtype = s.controller.dtype()
            if weights.checkpoint is not None:
                s.controller.policy.load(weights.checkpoint)
                s.controller.mark_weights_updated()
            engine = torch.cat(s.controller.logprobs(ids, prompts, s.temperature, routes))
            raw = torch.cat(s.controller.logprobs(ids, prompts, 1.0))  # a rollout's scores replay nothing
            with s.controller.generating():
                scores = s.controller.rollouts.score(ids)
    except SyncMismatch as mismatch:
        return OwnLayout(dtype, None, None, str(mismatch).split("\n", 1)[0])
    now = [torch.tensor(row[prompt - 1 :]) for row, prompt in zip(scores, prompts, strict=True)]
    return OwnLayout(dtype, engine, (torch.cat(now), raw), None)


def _recipe_of(recipe: Recipe, weights: Weights) -> Recipe:
    """The recipe with these weights for its model. A rollout that dies ends it: what it was asked to score nobody asks again."""
    own = recipe.model_copy(deep=True)
    own.model.build, own.model.path = None, weights.model
    if weights.merged:
        own.lora = None
    if own.mtp is not None:
        own.mtp.init_layers = None  # the model has them
    own.train.eval_prompts, own.checkpoint.every_steps, own.rollout.restart = 0, 0, False
    return own


def _beside_plain(
    recipe: Recipe, weights: Weights, before: Weights | None, replay: Replay, own: OwnLayout
) -> Evidence:
    from quintet.cluster.cluster import Cluster
    from quintet.cluster.group import WorkerGroup

    settings = recipe.cluster.model_copy(update={"ranks": 1, "ranks_per_node": None})
    plain = _recipe_of(recipe, weights)
    with Cluster(settings, say=lambda text: None) as cluster:
        group = WorkerGroup(
            cluster,
            Plain,
            1,
            layout=Layout(),
            name="plain",
            recipe=plain,
            model_dir=weights.model.absolute(),
        )

        def ask(verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
            return group.one(verb, phase="diagnose")(*args, **kwargs)

        routes = _replayed_routes(recipe, replay)
        return gather(
            ask, replay, weights, before, own, temperature=recipe.rollout.temperature or 1.0, replayed=routes
        )


def gather(
    ask: Ask,
    replay: Replay,
    weights: Weights,
    before: Weights | None,
    own: OwnLayout,
    *,
    temperature: float,
    replayed: list[Any] | None = None,
) -> Evidence:
    """Return all evidence: what was recorded, what the recipe's own layout came to, and what the plain model comes to.

    replayed: routes that the trainer was told, by sample. The plain model is told the same, and what it chooses by itself is a cause.
    """
    samples = replay.samples
    ids, prompts = [s.generated.ids for s in samples], [s.generated.prompt_tokens for s in samples]
    policy = Sampling(temperature=temperature)
    ask(Plain.load, weights)
    causes = _causes(replay, temperature, ask)
    wanted = [policy, *(sampling for _, sampling in causes)]
    plain, *others = ask(Plain.logprobs, ids, prompts, wanted, replayed)
    lengths = [len(one) - prompt for one, prompt in zip(ids, prompts, strict=True)]
    made = [
        Cause("tokens", f"the token one position {where}", shifted(plain, lengths, by))
        for by, where in ((1, "before"), (-1, "after"))
    ]
    made += [
        Cause("temperature and filters", what, found) for (what, _), found in zip(causes, others, strict=True)
    ]
    routes, told = None, [s.generated.routes for s in samples]
    if all(one is not None for one in told):
        found, routes = ask(Plain.routed, ids, prompts, told, policy)
        if replayed is None:
            made.append(Cause("routes", "the routes that the rollout told", found))
        else:
            (natural,) = ask(Plain.logprobs, ids, prompts, [policy])
            made.append(Cause("routes", "other routes, which the model chose by itself", natural))
    bf16 = ask(Plain.in_bf16, weights, ids, prompts, policy, replayed)
    if before is not None:
        ask(Plain.load, before)
        (stale,) = ask(Plain.logprobs, ids, prompts, [policy], replayed)
        made.append(Cause("weights", f"the weights after step {before.step}, one update behind", stale))
    return Evidence(
        dtype=own.dtype,
        rollout=_flat([s.trained.rollout_logprobs for s in samples]),
        trainer=_flat([s.trained.old_logprobs for s in samples]),
        plain=plain,
        bf16=bf16,
        causes=made,
        engine=own.engine,
        now=own.now,
        sync=own.sync,
        routes=routes,
    )


def _causes(replay: Replay, temperature: float, ask: Ask) -> list[tuple[str, Sampling]]:
    """Other distributions that log-probs could be of, in words."""
    told = replay.sampling
    cut: dict[str, Any] = {"top_p": told.top_p, "top_k": told.top_k, "min_p": told.min_p}
    filters = Sampling(**cut) != Sampling()
    causes = []
    if filters:
        causes.append(
            ("the distribution after top-p, top-k and min-p", Sampling(temperature=temperature, **cut))
        )
    if temperature != 1:
        causes.append(("temperature 1: rollout.temperature is not applied", Sampling()))
        causes.append(("the temperature applied twice", Sampling(temperature=temperature**2)))
        if filters:
            causes.append(("temperature 1 after top-p, top-k and min-p", Sampling(**cut)))
    known = [temperature, *(sampling.temperature for _, sampling in causes)]
    longest = max(replay.samples, key=lambda s: len(s.trained.rollout_logprobs))
    for side in ("rollout_logprobs", "old_logprobs"):
        numbers = getattr(longest.trained, side)
        found = ask(Plain.temperature, longest.generated.ids, longest.generated.prompt_tokens, numbers)
        if all(abs(found / one - 1) > SAME for one in known):
            causes.append((f"temperature {found:.3g}", Sampling(temperature=found)))
            known.append(found)
    return causes


def _flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row])
