"""vLLM's two model runners: which is taken, and what the second of 0.20.2 lacks. Like `compat`, and a part of it by its length."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quintet.errors import UserError
from quintet.recipe.schema import Recipe
from quintet.recipe.vllm import RUNNER, runner_refusals, runner_taken

if TYPE_CHECKING:
    import torch

if not os.environ.get(RUNNER):
    os.environ.pop(RUNNER, None)  # an empty one vLLM fails to read
_RUNNER_ASKED = os.environ.get(RUNNER)
"""What the user says of it, read before `choose_runner` writes there."""
KEPT = "runner"
"""Tag of what the allocator of sleeping memory is to leave alone."""


def choose_runner(recipe: Recipe) -> str:
    """Choose vLLM's model runner for the engines made from now on; return a line that says which, and why.

    The second runner draws a token's noise in one kernel keyed by (seed, position); the first starts one a sequence (512 sequences
    of a 1.5B model on an H200, vLLM alone: 37,500 tokens/s against 16,400 on another host), draws drafted tokens with the noise that it draws the policy's
    with, and proposes them in captured graphs. VLLM_USE_V2_MODEL_RUNNER in the environment decides instead of the recipe, where it is
    set. Raises UserError for a runner that there is not, and for routes, which the first does not tell.
    """
    for problem in runner_refusals(recipe, _RUNNER_ASKED):
        raise UserError(problem.message)
    os.environ[RUNNER], line = runner_taken(recipe, _RUNNER_ASKED)
    return line


def takes_second() -> bool:
    """Return whether engines made from now on have the second runner."""
    return os.environ.get(RUNNER) == "1"


def other_runner() -> str:
    """Return what to try where an engine does not start with the second runner; nothing where it ran the first."""
    return f" It ran its second model runner; {RUNNER}=0 takes the first." if takes_second() else ""


@contextmanager
def tables_kept(kv_caches: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have what a model runner allocated beside its KV caches stay where it is while the worker falls asleep.

    vLLM 0.20.2 makes all that `initialize_kv_cache` allocates in the pool that sleeping empties: of the second runner also its
    block tables and their addresses, through which the first forward after waking reads memory that is not there
    (tests/rollout/vllm/test_update.py, on a GPU). These come first: a small cache may lie behind them in the same piece of the pool, and
    alone what begins with a cache holds nothing else (test_captured_steps.py, on a GPU).
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    known = CuMemAllocator.get_instance().pointer_to_data
    caches = {cache.untyped_storage().data_ptr() for cache in kv_caches}
    for address, data in known.items():
        if data.tag == "kv_cache" and address not in caches:
            data.tag = KEPT
    kept = {address: known.pop(address) for address in [a for a, data in known.items() if data.tag == KEPT]}
    try:
        yield
    finally:
        known.update(kept)


def complete_runner(runner: Any) -> None:
    """Give a model runner that lacks it what ends it.

    Workers of vLLM 0.20.2 end with their runner's `shutdown`, which the second runner does not have (test_update.py, on a GPU).
    """
    if hasattr(runner, "shutdown"):
        return

    def shutdown() -> None:
        from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
        from vllm.v1.worker.workspace import reset_workspace_manager

        runner.compilation_config.static_forward_context.clear()
        runner.model = runner.speculator = None
        _ROPE_DICT.clear()
        reset_workspace_manager()

    runner.shutdown = shutdown
