"""vLLM engines, started once a test module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.recipe import schema
from tests.oracle import pool
from tests.rollout.prompts import text
from tests.rollout.vllm.models import save

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4 if DEVICE == "cpu" else 0.25
"""Of a log-prob against transformers' in fp32; on a GPU, vLLM's attention is in bf16."""


def recipe_of(
    max_prompt_tokens: int = 32,
    lora: dict[str, Any] | None = None,
    dtype: str | None = None,
    **rollout: Any,
) -> schema.Recipe:
    """A recipe whose rollout is vLLM."""
    sizes = {"backend": "vllm", "max_response_tokens": 32, "sequences_per_rank": 16, "memory_fraction": 0.1}
    return schema.Recipe.model_validate(
        {
            "model": {"dtype": dtype},
            "data": {"max_prompt_tokens": max_prompt_tokens},
            "lora": lora,
            "rollout": sizes | rollout,
        }
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`start(model, **rollout)`: a VllmRollout that ends with the module; `empty`: with no weights before the first update."""
    from quintet.rollout.vllm.rollout import VllmRollout
    from tests.rollout.vllm import sent

    made: list[VllmRollout] = []

    def one(name: str, path: Path | None = None, empty: bool = False, **rollout: Any) -> VllmRollout:
        path = path or save(name, tmp_path_factory.mktemp(name))
        made.append(VllmRollout(recipe_of(**rollout), path, device=DEVICE, decode=text, empty=empty))
        return made[-1]

    yield one
    for rollout in made:
        rollout.close()
    sent.end()
    for child in of_vllm():
        child.join(30)
    assert not of_vllm()


def of_vllm() -> list[Any]:
    """This process's children, but for those of the session's pool."""
    return [one for one in multiprocessing.active_children() if not one.name.startswith(pool.NAME)]
