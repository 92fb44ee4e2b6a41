"""The schema seen as dotted keys: which exist, what each expects, and which one a misspelt key meant."""

from __future__ import annotations

import difflib
import functools
import pathlib
import types
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from quintet.recipe.schema import Recipe, Section

RENAMED = {
    "agreement": "mismatch",
    "rollout.adapters": "rollout.adapter_sync (and its value alone is called separate)",
}
"""Keys that had another name, and the one they have now."""
OTHER_NAMES = {
    "batch_size": "train.prompts_per_step",
    "train_batch_size": "train.prompts_per_step",
    "rollout_batch_size": "train.prompts_per_step",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "learning_rate": "optimizer.lr",
    "lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "use_rslora": "lora.rslora",
    "peft_path": "lora.path",
    "adapter_path": "lora.path",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "grad_clip": "optimizer.clip_grad_norm",
    "beta": "algorithm.kl_coef",
    "tensor_model_parallel_size": "layout.tp",
    "tensor_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "virtual_pipeline_model_parallel_size": "layout.vpp",
    "expert_tensor_parallel_size": "layout.etp",
    "pipeline_parallel_size": "layout.pp",
    "expert_parallel_size": "layout.ep",
    "pipeline_parallel": "layout.pp",
    "tensor_parallel": "layout.tp",
    "context_parallel": "layout.cp",
    "expert_parallel": "layout.ep",
    "sequence_parallel": "layout.sp",
    "data_parallel_size": "cluster.ranks",
    "dp": "cluster.ranks",
    "transformer_impl": "engine.backend",
    "use_distributed_optimizer": "engine.distributed_optimizer",
    "recompute_granularity": "engine.recompute",
    "gradient_checkpointing": "engine.recompute",
    "activation_checkpointing": "engine.recompute",
    "param_offload": "engine.offload_params",
    "grad_offload": "engine.offload_grads",
    "optimizer_offload": "engine.offload_optimizer",
    "optimizer_cpu_offload": "optimizer.cpu_fraction",
    "world_size": "cluster.ranks",
    "num_gpus": "cluster.ranks",
    "gpus": "cluster.ranks",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "micro_batch_size": "engine.tokens_per_microbatch_per_rank",
    "gradient_accumulation_steps": "engine.tokens_per_microbatch_per_rank",
    "model_name_or_path": "model.path",
    "max_steps": "train.steps",
    "report_to": "run.trackers",
    "output_dir": "run.dir",
}
"""What other trainers call it. Only for the hint in an error: none of these is accepted as a key."""


def section_type(field: FieldInfo) -> type[Section] | None:
    """The section class of a field (also of an optional section), or None for a leaf key."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@functools.cache
def leaf_keys() -> dict[str, FieldInfo]:
    """Every key that takes a value, dotted, in schema order."""
    return {key: field for key, field in all_keys().items() if section_type(field) is None}


@functools.cache
def all_keys() -> dict[str, FieldInfo]:
    """Every key, sections included, dotted, in schema order."""
    return _collect(Recipe, ())


def _collect(section: type[Section], prefix: tuple[str, ...]) -> dict[str, FieldInfo]:
    keys = {}
    for name, field in section.model_fields.items():
        keys[".".join((*prefix, name))] = field
        inner = section_type(field)
        if inner is not None:
            keys.update(_collect(inner, (*prefix, name)))
    return keys


def nearest_key(unknown: str) -> str:
    """The valid dotted key that `unknown` most probably meant.

    The last word decides most; where the key stands decides between equal words.
    """
    section, _, word = unknown.rpartition(".")

    def likeness(key: str) -> float:
        key_section, _, key_word = key.rpartition(".")
        return 0.75 * _ratio(word, key_word) + 0.25 * _ratio(section, key_section)

    best = max(all_keys(), key=lambda key: (likeness(key), key.rpartition(".")[2] == word))
    return best if likeness(best) >= 0.85 else OTHER_NAMES.get(word, best)


def _ratio(a: str, b: str) -> float:
    return 1.0 if a == b else difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def expected(field: FieldInfo) -> str:
    """What a key accepts, in words: "a whole number greater than 0, or null"."""
    if section_type(field) is not None:
        return "a section (its keys, indented below it)" + (
            ", or null" if _optional(field.annotation) else ""
        )
    return _describe(field.annotation, list(field.metadata))


def _optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _describe(arguments[0], [*_flat(annotation.__metadata__), *metadata])
    if origin in (Union, types.UnionType):
        inner = [_describe(one, metadata) for one in arguments if one is not type(None)]
        return " or ".join(inner) + (", or null" if type(None) in arguments else "")
    if origin is Literal:
        return "one of " + ", ".join(str(one) for one in arguments)
    if origin is list:
        return f"a list, each item {_describe(arguments[0], [])}"
    if origin is dict:
        value = arguments[1]
        return "a mapping" if value is Any else f"a mapping, each value {_describe(value, [])}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        pathlib.Path: "a path",
    }
    return " ".join(filter(None, [names.get(annotation, str(annotation)), _bounds(metadata)]))


def _flat(metadata: Any) -> list[Any]:
    """Constraints of `Annotated[..., Field(gt=0)]` sit one level down, in the FieldInfo."""
    return [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(metadata: list[Any]) -> str:
    words = []
    for item in _flat(metadata):
        match item:
            case annotated_types.Gt(gt=bound):
                words.append(f"greater than {bound}")
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound:,}")
            case annotated_types.MinLen(min_length=least):
                words.append(f"of at least {least} character{'s' * (least != 1)}")
    return " and ".join(words)
