"""What vLLM is told of matrices in 8 bits, and how they are taken and read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quintet.engine.fingerprint import fingerprints
from quintet.models import read_shape
from quintet.rollout.base import Piece
from quintet.rollout.vllm.fp8 import fp8_arguments
from quintet.rollout.vllm.weights import Weights, check, combine
from quintet.sync.fp8 import quantized_names
from tests.rollout.vllm.models import save


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_routers_embedding_and_head_stay_as_they_are(name: str, tmp_path: Path) -> None:
    shape = read_shape(save(name, tmp_path))
    config = fp8_arguments(shape)["hf_overrides"]["quantization_config"]
    kept = set(config["modules_to_not_convert"])
    routers = {f"model.layers.{i}.mlp.gate" for i in range(shape.layers) if shape.moe and shape.moe.is_moe(i)}
    assert kept == {"model.embed_tokens", "lm_head"} | routers
    assert not {f"{one}.weight" for one in kept} & quantized_names(shape)


def test_eight_bits_and_scales_arrive_and_are_read() -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(256, 128).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.zeros(2, 1), requires_grad=False)

    def load(weights):  # type: ignore[no-untyped-def]
        for name, tensor in weights:
            half = name.startswith("up")
            target = getattr(layer, name.split(".")[1])
            rows = len(target) // 2
            target.data[half * rows : (half + 1) * rows].copy_(tensor)

    held = Weights([("", layer)], load, lambda name: False)
    for seed in range(2):
        torch.manual_seed(seed)
        sent = {f"{half}.weight": torch.randn(128, 128).to(torch.float8_e4m3fn) for half in ("gate", "up")}
        sent |= {f"{half}.weight_scale_inv": torch.rand(1, 1) for half in ("gate", "up")}
        whole = {name: tuple((0, n) for n in t.shape) for name, t in sent.items()}
        check([held.take(Piece(n, tuple(t.shape), whole[n], t) for n, t in sent.items())])
        found, unreadable = combine([held.read()])
        assert not unreadable
        assert found == fingerprints((n, tuple(t.shape), whole[n], t) for n, t in sent.items())
