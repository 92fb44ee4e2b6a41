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

from tests.oracle import balance_mistakes as wrong
from tests.oracle import gather_mistakes as gathers
from tests.oracle import route_mistakes as routes
from tests.oracle.cases import GATHER, Case
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
    raises: str = ""
    """Of a mistake that an error names: a pattern of its text. Then nothing has to show it."""


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


def _equal_stages(original: Any, self: Any, *args: Any, **kwargs: Any) -> int:
    """The number of the first layer as if every stage had as many."""
    return self._stage * sum(len(one) for stage in self._chunks for one in stage) // len(self._chunks)


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


def _divided(original: Any, pipeline: Any, batch: Any, cells: Any, use: Any, *args: Any, **how: Any) -> None:
    def less(outputs: Any, micro: Any) -> Any:
        value, extra = use(outputs, micro)
        return value / micro.cp, extra

    original(pipeline, batch, cells, less, *args, **how)


def _twice(original: Any, *args: Any) -> Any:
    """A cell without samples has the first one's too. (One that had some would have a row longer than the budget, which is an error.)"""
    cells = original(*args)
    return [cell if cell.samples else replace(cell, samples=cells[0].samples[:1]) for cell in cells]


def _left_out(original: Any, *args: Any) -> Any:
    """A round's last cell has lost its last sample."""
    cells = original(*args)
    cells[-1] = replace(cells[-1], samples=cells[-1].samples[:-1])
    return cells


def _in_order_of_ranks(original: Any, values: Any, place: Any, count: int, group: Any) -> Any:
    """What ranks know of a row is put together as it comes."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    torch.distributed.all_gather(counts, torch.tensor([len(place)]), group=group)
    before = int(sum(int(one) for one in counts[: group.rank()]))
    return original(values, torch.arange(before, before + len(place)), count, group)


class _Latest:
    """What the newest row of a rank says, whenever it is asked."""

    row: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(_Latest.row, name)


def _of_the_newest(original: Any, exchange: Any, *args: Any) -> Any:
    """Backward communicates as the micro-batch that passed last."""
    _Latest.row = exchange
    return original(_Latest(), *args)


def _recomputed_as_the_newest(original: Any, exchange: Any, *args: Any) -> Any:
    """What is computed again communicates as the micro-batch that passed last. The first time no gradient is recorded."""
    if not torch.is_grad_enabled():
        _Latest.row = exchange
        return original(exchange, *args)
    return original(_Latest.row, *args)


def _ahead_by_layout(original: Any, *args: Any) -> Any:
    """What a depth is trained on, of a row that ranks share, is cut into the parts of the largest cell: the rest is nobody's."""
    micro = original(*args)
    if micro.cp == 1:
        return micro
    own, *ahead = micro.targets
    for number, one in enumerate(ahead):
        kept = one.predictors < micro.tokens * micro.cp // 4
        left = {name: getattr(one, name)[kept] for name in ("predictors", "ids", "place", "own")}
        ahead[number] = replace(one, **left)
    return replace(micro, targets=[own, *ahead])


def _routes_by_layout(original: Any, micro: Any, field: Any, fill: Any, slices: int, part: int) -> Any:
    """A row's routes are cut into the parts of the largest cell."""
    return original(micro, field, fill, slices * 4 // micro.cp, part)


def _planned_anew(original: Any, training: Any, batch: int) -> Any:
    """The pass that records has other cells than the update."""
    from tests.oracle import ranks

    cut = ranks.recut
    with mock.patch.object(ranks, "recut", lambda cells, number: cut(cells, number + 1)):
        return original(training, batch)


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
    "a cell's loss is divided by its size": Mistake(
        Case("qwen3", cp=2, mixed=True),
        ("gradients", "norm"),
        "quintet.engine.pipeline:Pipeline.run",
        _divided,
    ),
    "a sample is in two cells": Mistake(
        Case("qwen3", cp=2, mixed=True), ("losses", "norms"), "tests.oracle.ranks:recut", _twice
    ),
    "a sample is in no cell": Mistake(
        Case("qwen3", cp=2, mixed=True),
        (),
        "tests.oracle.ranks:recut",
        _left_out,
        raises="samples without outputs",
    ),
    "outputs of a row stand in the order of its ranks": Mistake(
        Case("qwen3", cp=2, mixed=True),
        ("outputs",),
        "quintet.engine.pipeline:gather_places",
        _in_order_of_ranks,
    ),
    "backward is of the newest row's group": Mistake(
        Case("qwen3", cp=2, pp=2, vpp=2, mixed=True),
        ("gradients", "norm"),
        "quintet.engine.layers.context_parallel:AllGather.before",
        _of_the_newest,
    ),
    "what is computed again is of the newest row's group": Mistake(
        Case("qwen3", cp=2, pp=2, vpp=2, recompute="full", mixed=True),
        ("gradients", "norm"),
        "quintet.engine.layers.context_parallel:AllGather.before",
        _recomputed_as_the_newest,
    ),
    "targets ahead are cut by the layout's cp": Mistake(
        Case("mimo", mtp=1, cp=4, mixed=True),
        ("gradients", "ahead"),
        "quintet.engine.pipeline:pack",
        _ahead_by_layout,
    ),
    "routes are cut by the layout's cp": Mistake(
        Case("qwen3_moe", cp=4, mixed=True, replay="rollout"),
        (),
        "quintet.engine.row:MicroBatch.cut",
        _routes_by_layout,
        raises=r"layer \d+: routes \[\d+, \d+\] for choices",
    ),
    "the pass for old log-probs is planned by itself": Mistake(
        Case("qwen3_moe", cp=2, mixed=True, replay="old"),
        (),
        "tests.oracle.ranks:Training._record",
        _planned_anew,
        raises=r"layer \d+: routes \[\d+, \d+\] for choices",
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
    "routes are one token late": Mistake(
        Case("qwen3_moe", replay="rollout"),
        ("outputs", "loss", "gradients"),
        "quintet.engine.routes:BatchRoutes._row",
        routes.one_late,
    ),
    "dense layers are counted in routes": Mistake(
        Case("deepseek_v3", replay="rollout"),
        ("outputs", "loss", "gradients"),
        "quintet.engine.routes:BatchRoutes._row",
        routes.dense_counted,
    ),
    "tp ranks have each other's slices of routes": Mistake(
        Case("qwen3_moe", tp=2, sp=True, etp=2, replay="rollout"),
        ("outputs", "loss", "gradients"),
        "quintet.engine.routes:BatchRoutes._row",
        routes.other_slice,
    ),
    "layers are numbered as on equal stages": Mistake(
        Case("qwen3", pp=2, stages="1.3"),
        (),
        "quintet.engine.config:StageLayers.get_layer_offset",
        _equal_stages,
        raises="parameters without an entry in the qwen3 table",
    ),
    "routes are cut into stripes": Mistake(
        Case("qwen3_moe", cp=2, replay="rollout"),
        ("outputs", "loss", "gradients"),
        "quintet.engine.row:MicroBatch.cut",
        routes.in_stripes,
    ),
    "recomputed layers take the newest micro-batch's routes": Mistake(
        Case("mixtral", pp=2, vpp=2, recompute="selective", replay="rollout"),
        ("gradients", "parameters"),
        "quintet.engine.routes:RowRoutes.of",
        routes.newest,
    ),
    "routes are recorded anew in each update": Mistake(
        Case("qwen3_moe", replay="old", optimizer="sgd"),
        ("losses", "parameters"),
        "quintet.engine.routes:ReplayedRoutes._row",
        routes.anew,
    ),
    "what is computed again overwrites the record": Mistake(
        Case("qwen3_moe", replay="old", recompute="full", optimizer="sgd"),
        ("norms", "parameters"),
        "quintet.engine.routes:LayerRoutes.get_replay_topk",
        routes.recorded_again,
    ),
    "the reference overwrites the record": Mistake(
        Case("qwen3_moe", replay="old", optimizer="sgd"),
        ("loss", "gradients", "parameters"),
        "tests.oracle.ranks:Training._record",
        routes.of_reference,
    ),
    "padding takes a record": Mistake(
        Case("deepseek_v3", pp=2, vpp=2, replay="old"),
        ("loss", "gradients"),
        "quintet.engine.routes:ReplayedRoutes._row",
        routes.eaten,
    ),
    "weights of experts are replayed": Mistake(
        Case("qwen3_moe", replay="rollout"),
        ("gradients", "parameters"),
        "quintet.engine.routes:LayerRoutes.get_replay_topk",
        routes.weights_replayed,
    ),
    "routes are taken to be in order of weight": Mistake(
        Case("qwen3_moe", replay="rollout"),
        ("outputs", "gradients"),
        "quintet.engine.routes:LayerRoutes.get_replay_topk",
        routes.in_order_of_weight,
    ),
    "layers for multi-token prediction are told routes": Mistake(
        Case("deepseek_v3", mtp=2, replay="rollout"),
        ("gradients", "ahead"),
        "quintet.engine.routes:RowRoutes.of",
        routes.ahead_too,
    ),
    "padding counts as load": Mistake(
        Case("deepseek_v3", tp=2, sp=True, etp=2, expert_bias=True),
        ("balance", "balances"),
        "quintet.engine.balance:Load.next",
        wrong.padding_counted,
    ),
    "the mask of load is cut by cp and not by sp": Mistake(
        Case("deepseek_v3", tp=2, sp=True, cp=2, etp=2, expert_bias=True),
        ("balance",),
        "quintet.engine.balance:Load.next",
        wrong.first_slice,
    ),
    "what is computed again is counted again": Mistake(
        Case("deepseek_v3", pp=2, recompute="full", expert_bias=True, z_loss=True),
        ("balance",),
        "quintet.engine.balance:RowLoad.count",
        wrong.recomputation_counted,
    ),
    "the bias follows one dp rank's counts": Mistake(
        Case("deepseek_v3", dp=2, expert_bias=True),
        ("balance", "copies", "parameters"),
        "quintet.engine.engine:Engine._over_ranks",
        wrong.own_counts,
    ),
    "the bias moves before its mini-batch": Mistake(
        Case("deepseek_v3", expert_bias=True),
        ("gradients",),
        "quintet.engine.engine:Engine.forward_backward",
        wrong.moved_before,
    ),
    "the bias rises where there is much": Mistake(
        Case("deepseek_v3", expert_bias=True),
        ("parameters",),
        "quintet.engine.engine:move_biases",
        wrong.other_way,
    ),
    "losses of routers are divided by a rank's tokens": Mistake(
        Case("qwen3_moe", dp=2, z_loss=True, aux_loss="sequence"),
        ("gradients", "balance"),
        "quintet.engine.engine:Engine._load",
        wrong.own_tokens,
    ),
    "a sample's load is that of a part of it": Mistake(
        Case("qwen3_moe", tp=2, sp=True, etp=2, aux_loss="sequence"),
        ("gradients", "balance"),
        "quintet.engine.balance:Load.next",
        wrong.own_part,
    ),
    "a sample's load is that of one part of its cell": Mistake(
        Case("qwen3_moe", cp=2, mixed=True, aux_loss="sequence"),
        ("gradients", "balance"),
        "quintet.engine.balance:Load.next",
        wrong.own_part,
    ),
    "a sample's load is over its padded length": Mistake(
        Case("qwen3_moe", cp=2, aux_loss="sequence"),
        ("gradients", "balance"),
        "quintet.engine.balance:Load.next",
        wrong.padded_lengths,
    ),
    "the load of the mini-batch is another expert's": Mistake(
        Case("qwen3_moe", dp=2, aux_loss="batch"),
        ("gradients", "balance"),
        "quintet.engine.engine:Engine._load",
        wrong.counts_by_position,
    ),
    "padding is in the losses of routers": Mistake(
        Case("qwen3_moe", cp=2, z_loss=True),
        ("gradients", "balance"),
        "quintet.engine.balance:RowLoad.count",
        wrong.losses_on_padding,
    ),
    "recomputed layers over a frozen embedding have no gradient": Mistake(
        Case("qwen3-tied", frozen="embed_tokens", recompute="full"),
        ("gradients",),
        "quintet.engine.optimizer:requires_grad",
        wrong.not_required,
    ),
    "parameters that others updated never come": Mistake(
        Case("qwen3", dp=2, **GATHER),
        ("parameters",),
        "quintet.engine.parameter_gather:ParameterGather.start",
        nothing,
    ),
    "layers do not wait for their parameters": Mistake(
        Case("qwen3", dp=2, **GATHER),
        ("parameters",),
        "quintet.engine.parameter_gather:_wait_before",
        gathers.layers_do_not_wait,
    ),
    "the head does not wait for its parameters": Mistake(
        Case("qwen3", dp=2, **GATHER),
        ("parameters",),
        "quintet.engine.parameter_gather:ParameterGather.__init__",
        gathers.heads_do_not_wait,
    ),
}
