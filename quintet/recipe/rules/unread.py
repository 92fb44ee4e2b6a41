"""The rule of keys that nothing reads with the recipe's other keys, as a table: none of them is ignored without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quintet.recipe.derived import layout_of, optimizers, roles_of
from quintet.recipe.problem import Problem
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.schema import Optimizer, Recipe

_Row = tuple[str, Callable[[Recipe], bool], str]


def _one_part(recipe: Recipe) -> bool:
    """Whether no role's sequences are cut over ranks."""
    return max(layout_of(recipe, role).cp for role in ("policy", *roles_of(recipe))) == 1


_KL = "while algorithm.kl_coef=0"
_OTHER = "by algorithm.name={0.algorithm.name}, but by "
_TASK = "by data.task={0.data.task}"
_UNSAVED = "while checkpoint.every_steps=0"
_NATIVE = "by the native rollout, "
_SHARED = "by a rollout on the engine's own parameters, to which nothing travels"
_KEPT = "by a rollout that gets adapters alone in any case: the frozen weights come once, and stay"
_GREEDY = "with rollout.temperature=0, which takes the likeliest token"
_COLOCATED = "by a colocated rollout, which is on the cluster.ranks devices that train, but with rollout.placement=separate"

_FROZEN = "with mtp.train=false, which keeps these layers as they are"
_UNREAD: list[_Row] = [
    (
        "mtp.loss_weight mtp.detach mtp.loss mtp.clip_grad_norm",
        lambda r: r.mtp is not None and not r.mtp.train,
        _FROZEN,
    ),
    ("algorithm.kl_estimator algorithm.kl_in", lambda r: r.algorithm.kl_coef == 0, _KL),
    ("algorithm.gamma algorithm.gae_lambda", lambda r: r.algorithm.name != "ppo", f"{_OTHER}ppo"),
    ("algorithm.kl_in", lambda r: r.algorithm.name != "ppo", f"{_OTHER}ppo"),
    ("algorithm.max_refills", lambda r: r.algorithm.name != "dapo", f"{_OTHER}dapo"),
    ("algorithm.normalize_by_std", lambda r: r.algorithm.name == "ppo", f"{_OTHER}those with groups"),
    (
        "reward.overlong_penalty",
        lambda r: not r.reward.overlong_tokens,
        "while reward.overlong_tokens is null",
    ),
    ("model.revision", lambda r: not r.model.of_hub, "by a model that is a directory here, or built"),
    ("data.answer_key data.eval_prompt_key data.eval_answer_key", lambda r: r.data.makes_problems, _TASK),
    ("data.prompt_key", lambda r: r.data.makes_problems and r.data.sft_path is None, _TASK),
    # gsm8k's is its worked answer
    ("data.response_key", lambda r: r.data.task != "jsonl" and r.data.sft_path is None, _TASK),
    ("engine.cp_comm", _one_part, "while layout.cp=1"),
    ("checkpoint.keep_last checkpoint.async_save", lambda r: not r.checkpoint.every_steps, _UNSAVED),
    (
        "checkpoint.on_error",
        lambda r: not max(r.checkpoint.every_steps, r.checkpoint.hf_every_steps),
        _UNSAVED,
    ),
    ("rollout.ranks", lambda r: not placement_of(r).separate, _COLOCATED),
    (
        "rollout.sleep_level",
        lambda r: placement_of(r).separate,
        "by a separate rollout, which keeps its weights",
    ),
    ("rollout.sleep_level rollout.bucket_mib", lambda r: placement_of(r).shares_weights, _SHARED),
    ("rollout.sync_proof", lambda r: placement_of(r).shares_weights, _SHARED),
    (
        "rollout.sleep_level",
        lambda r: placement_of(r).adapters_separate and r.rollout.sleep_level != 0,
        _KEPT,
    ),
    ("rollout.probe_tolerance", lambda r: not r.rollout.sync_proof, "with rollout.sync_proof=false"),
    (
        "rollout.probe_tolerance",
        lambda r: r.rollout.backend == "native",
        f"{_NATIVE}all of which is read back",
    ),
    ("rollout.mode", lambda r: r.rollout.backend == "native", f"{_NATIVE}but by vllm"),
    ("rollout.quantization", lambda r: r.rollout.backend == "native", f"{_NATIVE}but by vllm"),
    ("rollout.memory_fraction", lambda r: r.rollout.backend == "native", f"{_NATIVE}but by vllm and sglang"),
    ("rollout.top_p rollout.top_k rollout.min_p", lambda r: r.rollout.temperature == 0, _GREEDY),
]
"""Keys, the recipes in which nothing reads them, and which these are in words."""
_BY_OPTIMIZERS: list[tuple[str, Callable[[Optimizer], bool], str]] = [
    ("beta1 beta2 eps", lambda o: o.name not in ("adamw", "adam"), "name={0.name}, but by adamw and adam"),
    ("momentum", lambda o: o.name != "sgd", "name={0.name}, but by sgd"),
    (
        "decay_steps min_lr_ratio",
        lambda o: o.schedule == "constant",
        "schedule=constant, but by cosine and wsd",
    ),
]
"""The same of each optimizer's keys."""


@rule
def keys_are_read(facts: Facts) -> Iterator[Problem]:
    """A key is given only where something reads it; the default may be written out, as the resolved recipe does."""
    recipe = facts.recipe
    unread = [
        (key, why.format(recipe)) for keys, when, why in _UNREAD if when(recipe) for key in keys.split()
    ]
    for section, optimizer in optimizers(recipe).items():
        for names, of_this, why in _BY_OPTIMIZERS:
            if of_this(optimizer):
                unread += [(f"{section}.{n}", f"by {section}.{why.format(optimizer)}") for n in names.split()]
    told = set()
    for key, why in unread:
        if (said := facts.said(key)) is not None and key not in told:
            told.add(key)
            yield Problem(f"{said} is not read {why}; remove it, or change that")
