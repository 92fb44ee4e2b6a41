"""What a user is told of a recipe before it runs, by `quintet check` and by the run itself."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.length import shortened
from quintet.recipe.rules.facts import written
from quintet.recipe.schema import Algorithm, Recipe
from quintet.recipe.sections.training import NAME_SETS
from quintet.recipe.vllm import runner_asked, runner_taken

_GROUPS = ("clip_low", "clip_high", "aggregation", "normalize_by_std", "kl_coef")
_READ_BY = {
    "grpo": _GROUPS,
    "dr_grpo": _GROUPS,
    "dapo": (*_GROUPS, "max_refills"),
    "ppo": ("clip_low", "clip_high", "aggregation", "gamma", "gae_lambda", "kl_coef"),
}


def told(recipe: Recipe, command: str) -> Iterator[str]:
    """Yield what follows from the name of the algorithm, from the length of the run, and from a model that nothing has trained, which model
    runner vLLM takes, and how long it compiles."""
    if command == "train":
        yield _algorithm(recipe.algorithm)
    if command in ("generate", "eval") and recipe.model.build is not None:
        yield (
            f"Model: built from nothing, so quintet {command} sees random weights. For those of a run: model.build=null "
            "model.path=RUN/checkpoint"
        )
    if command != "sft" and recipe.rollout.backend == "vllm" and recipe.cluster.device != "cpu":
        yield f"{runner_taken(recipe, runner_asked(recipe))[1]}."
        if recipe.rollout.quantization == "fp8":
            yield (
                "vLLM in 8 bits: its first start on a machine compiles kernels, which took 5 minutes on an H200, and keeps them in "
                "~/.cache/vllm (VLLM_CACHE_ROOT)."
            )
    yield from shortened(recipe, command)


def _algorithm(algorithm: Algorithm) -> str:
    keys = [*_READ_BY[algorithm.name], *(("kl_estimator", "kl_in") if algorithm.kl_coef else ())]
    values = ", ".join(f"{key}={written(getattr(algorithm, key))}" for key in keys)
    own = [
        f"{key}={written(value)}"
        for key, value in NAME_SETS.get(algorithm.name, {}).items()
        if getattr(algorithm, key) != value
    ]
    return f"Algorithm: {algorithm.name}, {values}." + (
        f" The name alone would have set {' and '.join(own)}." if own else ""
    )
