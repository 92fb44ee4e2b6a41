"""The back end that a recipe names: whether it is there, and one of it in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.recipe.schema import Recipe
from quintet.recipe.vllm import starts_empty
from quintet.rollout.base import Rollout


def check_installed(backend: str) -> None:
    """Raise UserError where the package of a back end is missing, or of a version that is not supported."""
    if backend == "vllm":
        from quintet.rollout.vllm import compat as vllm

        vllm.require()
    elif backend == "sglang":
        from quintet.rollout.sglang import compat as sglang

        sglang.require()


def make_rollout(
    recipe: Recipe,
    model_dir: Path,
    *,
    device: str,
    decode: Callable[[list[int]], str],
    progress: Callable[[int], None] = lambda done: None,
) -> Rollout:
    """Return the rollout of this process. Its weights are good from the first `update_weights` on.

    model_dir: a Hugging Face directory. device: cpu, or the cuda device of this process. decode: token ids → text.
    progress: told how many samples of a call are done. Native takes part in the default process group, whose ranks are its
    layout's; the others make workers of their own.
    """
    kind = device.split(":")[0]
    if recipe.rollout.backend == "vllm":
        from quintet.rollout.vllm.rollout import VllmRollout

        empty = starts_empty(recipe)
        vllm: Any = VllmRollout(recipe, model_dir, device=kind, decode=decode, progress=progress, empty=empty)
        return vllm
    if recipe.rollout.backend == "sglang":
        from quintet.rollout.sglang.rollout import SglangRollout

        return SglangRollout(recipe, model_dir, device=kind, decode=decode, progress=progress)
    from quintet.rollout.native.standalone import native_rollout

    made: Any = native_rollout(recipe, model_dir, device=device, decode=decode, progress=progress)
    return made
