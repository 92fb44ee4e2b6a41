"""How the rollout of a run is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.recipe.schema import Recipe
from quintet.rollout.make import make_rollout


@pytest.mark.parametrize(
    ("model", "vllm", "empty"),
    [
        ({}, {}, True),
        ({}, {"enforce_eager": True}, True),
        ({"family": "mine:Family"}, {}, False),
        ({}, {"kv_cache_dtype": "turboquant_4bit_nc"}, False),
    ],
    ids=["usual", "another option", "a user's family", "a cache in codebooks"],
)
def test_vllm_reads_no_weights_where_a_sync_brings_all(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], vllm: dict[str, Any], empty: bool
) -> None:
    """It would make up buffers as well, which no sync brings."""
    made: list[Any] = []
    monkeypatch.setattr(
        "quintet.rollout.vllm.rollout.VllmRollout", lambda *_, **how: made.append(how["empty"])
    )
    recipe = Recipe.model_validate({"model": model, "rollout": {"backend": "vllm", "vllm": vllm}})
    make_rollout(recipe, Path("model"), device="cpu", decode=str)
    assert made == [empty]
