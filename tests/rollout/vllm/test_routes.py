"""The experts that vLLM tells of are those that transformers chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quintet.errors import QuintetError
from quintet.models import read_shape
from quintet.rollout import Request, Sampling
from quintet.rollout.vllm.routes import routes_of
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.greedy import made
from tests.rollout.vllm.models import save


def chosen_by_transformers(name: str, ids: list[int]) -> np.ndarray:
    """Sorted experts [tokens - 1, layers with experts, top-k]."""
    one = made(name)
    with torch.no_grad():
        logits = one(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    return (
        torch.stack([of_layer.topk(one.config.num_experts_per_tok).indices for of_layer in logits], 1)
        .sort(-1)
        .values.numpy()
    )


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_routes_are_those_of_transformers(start: Any) -> None:
    rollout = start("qwen3_moe", layout={"tp": 2}, return_routes=True)
    long = [k % 60 for k in range(30)]
    rows = rollout.generate(
        [Request(p, samples=3, seed=5) for p in [*PROMPTS, long]], Sampling(max_response_tokens=9)
    )
    for prompt, samples in zip([*PROMPTS, long], rows, strict=True):
        for sample in samples:
            ids = prompt + sample.response_ids
            assert sample.routes.dtype == np.int16
            assert np.array_equal(np.sort(sample.routes, -1), chosen_by_transformers("qwen3_moe", ids))


def test_routes_that_are_not_all_known_are_refused(tmp_path: Any) -> None:
    shape = read_shape(save("glm4_moe", tmp_path))  # its first layer is dense
    told = np.arange(10 * 4 * 2).reshape(10, 4, 2)
    assert np.array_equal(routes_of(told, shape, 10), told[:9, 1:])
    assert np.array_equal(routes_of(told[:, 1:], shape, 11), told[:, 1:])
    with pytest.raises(QuintetError, match=r"routes \[10, 4, 2\] of 12 tokens"):
        routes_of(told, shape, 12)
    told[3, 2] = -1
    with pytest.raises(QuintetError, match="those of every token but the last are needed"):
        routes_of(told, shape, 10)
