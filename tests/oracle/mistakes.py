"""Mistakes that the oracle must find: each made in the running ranks by name, in a layout where it matters, and taken back.

They are of the kinds that layouts invite: a sum left out, a sum too many, a token in the wrong place, a state that
is not the newest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch

from tests.oracle.cases import Case
from tests.oracle.data import TEMPERATURE


@dataclass(frozen=True)
class Mistake:
    """The case in which it is made, the errors (`compare.Bounds`) that must show it, and what it does instead.

    target: "module:attribute" that is replaced. change: called in its place, with the original before the arguments.
    """

    case: Case
    shows: tuple[str, ...]
    target: str
    change: Callable[..., Any]


@contextlib.contextmanager
def made(name: str | None) -> Iterator[None]:
    """Make the mistake of this name, if any."""
    if name is None:
        yield
        return
    import quintet.engine.engine  # noqa: F401  (adapts megatron-core before a target imports it)

    target, change = MISTAKES[name].target, MISTAKES[name].change
    original = resolve_name(target)

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    instead: Any = property(mistaken) if isinstance(original, property) else mistaken

    owner, _, attribute = target.rpartition("." if "." in target.partition(":")[2] else ":")
    with mock.patch.object(resolve_name(owner), attribute, instead):
        yield


def nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    """The call is forgotten."""


def unchanged(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A collective, and its gradient's, is forgotten."""
    return x


def _not_zigzag(original: Any, cp: int, rank: int) -> tuple[int, int]:
    return rank, cp + rank


def _average(original: Any, *args: Any) -> dict[str, Any]:
    return original(*args) | {"calculate_per_token_loss": False}


def _train_on_padding(original: Any, *args: Any) -> Any:
    """The row's last token, which is padding, predicts like the token trained last."""
    micro = original(*args)
    (targets,) = micro.targets
    if not len(targets.predictors) or micro.lengths[-1] > 1:
        return micro
    row = micro.tokens - 1
    again = {
        name: torch.cat((t := getattr(targets, name), t[-1:])) for name in ("ids", "token_index", "sample")
    }
    places = torch.cat((targets.place, targets.place[-1:] + 1))
    predictors = torch.cat((targets.predictors, torch.tensor([row])))
    return replace(micro, targets=[replace(targets, **again, place=places, predictors=predictors)])


def _as_dense(original: Any, weight: Any, groups: Any, **kwargs: Any) -> None:
    original(weight, groups, **kwargs)
    weight.allreduce = True


def _by_place_on_the_rank(original: Any, model: Any, positions: torch.Tensor) -> Any:
    return original(model, torch.arange(len(positions), device=positions.device))


def _one_sequence(original: Any, lengths: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return original([sum(lengths)], [sum(keys)], *args, **kwargs)


def _own_slice_of_gradient(original: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return original(x, **kwargs | {"tensor_parallel_output_grad": False})


def _summed_gradient(original: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return original(x, **kwargs | {"tensor_parallel_output_grad": True})


def _optimizer_first(original: Any, engine: Any, path: Any, **kwargs: Any) -> None:
    """The master weights are those from before the weights were read."""
    engine.start_optimizer(engine._optimizer_recipe, engine.total_steps)
    with mock.patch.object(engine, "start_optimizer"):
        original(engine, path, **kwargs)


def _decay_all(original: Any, chunks: Any, mesh: Any, dtype: Any, recipe: Any, *args: Any) -> Any:
    optimizer = original(chunks, mesh, dtype, recipe, *args)
    for group in optimizer.param_groups:
        group["weight_decay"] = recipe.weight_decay
    return optimizer


def _softmax_of_all(original: Any, *args: Any) -> dict[str, Any]:
    return original(*args) | {"moe_router_pre_softmax": True}


def _constant_entropy(original: Any, *args: Any) -> Any:
    scores = original(*args)
    return scores._replace(entropy=scores.entropy.detach())


def _always(original: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def _unscaled(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args)


def _other_norms(original: Any, shape: Any) -> Any:
    """A MiMo's layer reads the trunk after its final norm."""
    return replace(original(shape), reads_normed=True)


def _with_ahead(micro: Any, at: torch.Tensor, kept: torch.Tensor) -> Any:
    """The first depth's targets are these of the model's own, at row positions `at`; on one rank alone."""
    own = micro.targets[0]
    made = replace(
        own,
        predictors=at[kept] - 2,
        ids=own.ids[kept],
        place=torch.arange(int(kept.sum())),
        own=own.own[kept],
        token_index=own.token_index[kept],
        sample=own.sample[kept],
    )
    return replace(micro, targets=[own, made, *micro.targets[2:]])


def _across_sequences(original: Any, *args: Any) -> Any:
    """A sample's first targets are predicted from the sample before it."""
    micro = original(*args)
    at = micro.targets[0].predictors + 1
    return _with_ahead(micro, at, at >= 2)


def _mask_of_predictors(original: Any, *args: Any) -> Any:
    """What is trained is what is predicted from trained tokens."""
    micro = original(*args)
    at = micro.targets[0].predictors + 1
    return _with_ahead(micro, at, torch.isin(at - 2, at))


def _one_count(original: Any, settings: Any, counts: Any) -> Any:
    return original(settings, counts[:1] * len(counts))


def _count_of_micro_batch(original: Any, loss: Any, outputs: Any, fields: Any) -> Any:
    return original(replace(loss, count=len(outputs.losses)), outputs, fields)


def _temperature_of_rollout(original: Any, *args: Any) -> Any:
    return [replace(one, temperature=TEMPERATURE) for one in original(*args)]


def _attached(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Whatever is to be detached is not."""
    return original(*args[:-1], False)


def _as_no_copy(original: Any, parameter: Any, *, copy: bool) -> None:
    original(parameter, copy=False)


def _in_another_bucket(original: Any, parameter: Any, *, copy: bool) -> None:
    original(parameter, copy=copy)
    parameter.shared_embedding = not copy


def _one_norm(original: Any, optimizer: Any, name: str) -> Any:
    """The policy's norm and clipping are of all gradients."""
    return [p for other in ("", "mtp") for p in original(optimizer, other)] if name == "" else []


_FINALIZE = "megatron.core.distributed.finalize_model_grads"
MISTAKES = {
    "norms under sp are not summed over tp": Mistake(
        Case("qwen3", tp=2, sp=True),
        ("gradients", "copies", "parameters"),
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
        nothing,
    ),
    "tied embeddings are not summed over stages": Mistake(
        Case("qwen3-tied", pp=2),
        ("gradients", "copies", "parameters"),
        f"{_FINALIZE}:_allreduce_word_embedding_grads",
        nothing,
    ),
    "attention takes a row that is cut into stripes": Mistake(
        Case("qwen3", cp=2), ("outputs", "loss", "gradients"), "quintet.engine.row:zigzag", _not_zigzag
    ),
    "gradients are averaged over micro-batches": Mistake(
        Case("qwen3"), ("gradients", "norm"), "quintet.engine.config:_model", _average
    ),
    "gradients of the last step are kept": Mistake(
        Case("qwen3"),
        ("norms", "losses", "parameters"),
        "megatron.core.optimizer.optimizer:FP32Optimizer.zero_grad",
        nothing,
    ),
    "padding is trained on": Mistake(
        Case("qwen3", tp=2, sp=True), ("loss", "gradients"), "quintet.engine.pipeline:pack", _train_on_padding
    ),
    "experts are summed with what is not theirs": Mistake(
        Case("qwen3_moe", dp=2, ep=2),
        ("gradients", "norm"),
        "quintet.engine.layers.experts:mark_expert",
        _as_dense,
    ),
    "rotary positions count tokens of the rank": Mistake(
        Case("qwen3", cp=2),
        ("outputs", "gradients"),
        "quintet.engine.model:PolicyModel.rotary",
        _by_place_on_the_rank,
    ),
    "all ranks of a cell count it": Mistake(
        Case("qwen3", cp=2), ("loss", "losses"), "quintet.engine.row:MicroBatch.first", _always
    ),
    "tokens attend to other sequences": Mistake(
        Case("qwen3"), ("outputs", "gradients"), "quintet.engine.row:spans", _one_sequence
    ),
    "the rotary key's gradient is not summed over tp": Mistake(
        Case("deepseek_v3", tp=2, sp=True, etp=2),
        ("gradients", "parameters"),
        "quintet.engine.layers.mla:gather_from_sequence_parallel_region",
        _own_slice_of_gradient,
    ),
    "master weights are older than the weights": Mistake(
        Case("qwen3", dtype="bf16", dp=2, distributed_optimizer=True),
        ("parameters",),
        "quintet.engine.engine:Engine.load_hf",
        _optimizer_first,
    ),
    "norms decay": Mistake(
        Case("qwen3"), ("parameters",), "quintet.engine.engine:build_optimizer", _decay_all
    ),
    "weights of chosen experts do not sum to one": Mistake(
        Case("qwen3_moe"), ("outputs", "gradients"), "quintet.engine.config:_experts", _softmax_of_all
    ),
    "the entropy is a constant": Mistake(
        Case("qwen3"), ("gradients",), "quintet.engine.model:log_probs_and_entropy", _constant_entropy
    ),
    "values of all tp ranks are summed": Mistake(
        Case("qwen3", head="value", tp=2, sp=True),
        ("gradients", "norm"),
        "quintet.engine.model:gather_from_sequence_parallel_region",
        _summed_gradient,
    ),
    "adapters are not scaled": Mistake(
        Case("qwen3", lora=True), ("outputs", "gradients"), "torch:addmm", _unscaled
    ),
    "gradients of whole adapters under sp are not summed over tp": Mistake(
        Case("qwen3", lora=True, tp=2, sp=True),
        ("gradients", "copies", "parameters"),
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
        nothing,
    ),
    "gradients of experts' whole adapters are not summed over etp": Mistake(
        Case("qwen3_moe", lora=True, tp=2, sp=True, etp=2),
        ("gradients", "copies"),
        "quintet.engine.gradients:sum_over_etp",
        nothing,
    ),
    "the embedding's copy is not summed with it": Mistake(
        Case("mimo", mtp=1, pp=2),
        ("copies", "parameters"),
        "quintet.engine.gradients:sum_over_ends",
        nothing,
    ),
    "the embedding's copy counts in the norm too": Mistake(
        Case("mimo", mtp=1, pp=2),
        ("norm", "norms"),
        "quintet.engine.model:mark_embedding_copy",
        _as_no_copy,
    ),
    "the embedding's copy is cut otherwise over dp": Mistake(
        Case("mimo", mtp=1, pp=2, dp=2, distributed_optimizer=True),
        ("copies", "parameters"),
        "quintet.engine.model:mark_embedding_copy",
        _in_another_bucket,
    ),
    "a MiMo's layer reads the normed state": Mistake(
        Case("mimo", mtp=1), ("gradients", "ahead"), "quintet.engine.model:mtp_names", _other_norms
    ),
    "targets ahead cross sequences": Mistake(
        Case("mimo", mtp=1), ("gradients", "ahead"), "quintet.engine.pipeline:pack", _across_sequences
    ),
    "the predictor's mask is taken for the target's": Mistake(
        Case("mimo", mtp=1), ("gradients", "ahead"), "quintet.engine.pipeline:pack", _mask_of_predictors
    ),
    "targets ahead are counted as the model's own": Mistake(
        Case("mimo", mtp=2), ("gradients", "ahead"), "quintet.engine.ahead:ahead_losses", _one_count
    ),
    "the loss ahead is a mean over its micro-batch": Mistake(
        Case("mimo", mtp=1),
        ("gradients", "ahead"),
        "quintet.engine.ahead:AheadLoss.__call__",
        _count_of_micro_batch,
    ),
    "the loss ahead is at the rollout's temperature": Mistake(
        Case("mimo", mtp=1),
        ("gradients", "ahead"),
        "quintet.engine.ahead:ahead_losses",
        _temperature_of_rollout,
    ),
    "the trunk is not detached": Mistake(
        Case("mimo", mtp=1), ("gradients", "norm"), "quintet.engine.model:PolicyModel.look_ahead", _attached
    ),
    "the head is not detached": Mistake(
        Case("mimo", mtp=1), ("gradients", "norm"), "quintet.engine.ahead:head_of", _attached
    ),
    "gradients ahead are in the policy's norm": Mistake(
        Case("mimo", mtp=1), ("norm", "parameters"), "quintet.engine.clip:_parameters", _one_norm
    ),
    "replicated gradients count once a rank in the norm": Mistake(
        Case("qwen3", tp=2, distributed_optimizer=True),
        ("norm", "norms"),
        "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate",
        _always,
    ),
}
