"""What vLLM is told of matrices in 8 bits, and how they are taken and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quintet.engine.weights.fingerprint import fingerprints
from quintet.engine.weights.fp8 import dequantize, quantize, quantized_names, scales_shape
from quintet.errors import QuintetError
from quintet.models import read_shape
from quintet.models.mcore import whole_box
from quintet.rollout.base import Piece
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.reload import absorbed_kept, scales_kept
from quintet.rollout.vllm.settings import fp8_config
from quintet.rollout.vllm.weights import Weights, check, combine
from quintet.rollout.vllm.worker_models import WorkerModels
from tests.engine import test_fp8_checkpoints as published
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import greedy, greedy_by_transformers
from tests.rollout.vllm.models import model, save
from tests.rollout.vllm.sent import update
from tests.rollout.vllm.test_update import Source, weights_of


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_routers_embedding_and_head_stay_as_they_are(name: str, tmp_path: Path) -> None:
    shape = read_shape(save(name, tmp_path))
    kept = set(fp8_config(shape)["modules_to_not_convert"])
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

    held = Weights(WorkerModels(layer), load, lambda name: False)
    for seed in range(2):
        torch.manual_seed(seed)
        sent = {f"{half}.weight": torch.randn(128, 128).to(torch.float8_e4m3fn) for half in ("gate", "up")}
        sent |= {f"{half}.weight_scale_inv": torch.rand(1, 1) for half in ("gate", "up")}
        whole = {name: whole_box(t.shape) for name, t in sent.items()}
        check([held.take([Piece(n, tuple(t.shape), whole[n], t)] for n, t in sent.items())])
        found, unreadable = combine([held.read()])
        assert not unreadable
        assert found == fingerprints((n, tuple(t.shape), whole[n], t) for n, t in sent.items())


def test_matrices_made_of_weights_stay_where_graphs_know_them() -> None:
    layers = nn.ModuleList(nn.Module() for _ in range(3))
    stored = torch.zeros(2, 4, 4)
    attention, unquantised, _ = layers
    attention.W_UV, attention.W_UK_T = torch.zeros(4, 4), torch.zeros(4, 4)
    unquantised.W_UV = stored[0].t()
    captured = [attention.W_UV, attention.W_UK_T, unquantised.W_UV]
    with absorbed_kept(layers):
        attention.W_UV, attention.W_UK_T = torch.full((4, 4), 1.0), torch.full((4, 4), 2.0)
        stored.fill_(3.0)
        unquantised.W_UV = stored[0].t()
    assert [one.unique().tolist() for one in captured] == [[1.0], [2.0], [3.0]]
    assert attention.W_UV is captured[0]
    assert attention.W_UK_T is captured[1]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 8 bits that any CPU can do: vLLM's own need AMX or a GPU. All else is vLLM's."""
    if DEVICE != "cpu":
        return
    compat.prepare(DEVICE)
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    class Dequantized(linear.Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return A @ dequantize(B, Bs).to(A.dtype).t()

    monkeypatch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [Dequantized])


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("itself", [False, True])
def test_a_rollout_in_eight_bits(start: Any, tmp_path: Path, itself: bool) -> None:
    """itself: of a directory that is in 8 bits, with scales of its own."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    save("qwen3", tmp_path, **sizes)
    if itself:
        published.in_eight_bits(tmp_path)
    rollout = start("qwen3", tmp_path, dtype="bf16", quantization="fp8")
    for seed in range(2):
        one = model("qwen3", seed=seed, **sizes)
        sent = in_eight_bits(one, quantized_names(read_shape(tmp_path)))
        update(rollout, Source(sent))
        found, unreadable = rollout.fingerprints()
        packed = {"lm_head.weight", "model.embed_tokens.weight"} if DEVICE == "cpu" else set()
        assert set(unreadable) == packed
        assert found == fingerprints((n, tuple(t.shape), whole_box(t.shape), t) for n, t in sent.items())
        ids = [5, 9, 2, 40, 41, 7, 8, 1]
        with torch.no_grad():
            rows = one(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert rollout.score([ids])[0] == pytest.approx(expected, abs=0.05 if DEVICE == "cpu" else 0.5)
    rollout.close()


@pytest.mark.vllm
def test_scales_that_are_powers_of_two_stay() -> None:
    """DeepGEMM, which vLLM takes on a Hopper GPU, is not there: what vLLM does to weights for it is."""
    compat.prepare(DEVICE)
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    torch.manual_seed(0)
    numbers = torch.randn(256, 256)
    numbers[:128, :128] /= numbers[:128, :128].abs().max() / 230  # is rounded to 224
    numbers[128:, 128:] *= 1e-6
    weight, scales = torch.empty_like(numbers, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    quantize(numbers, weight, scales)

    def again(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = weight.clone(), scales.clone()
        fp8_utils.requant_weight_ue8m0_inplace(*held, block_size=(128, 128))
        return held

    others = scales * 1.25
    by_vllm, by_vllm_of_others = again(scales), again(others)
    for at in ((0, 0), (1, 1)):
        assert by_vllm[1][at] != scales[at]
    with scales_kept():
        kept, kept_of_others = again(scales), again(others)
    assert torch.equal(kept[0].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(kept[1], scales)
    assert torch.equal(kept_of_others[1], by_vllm_of_others[1])
    assert not torch.equal(kept_of_others[1], others)


@pytest.mark.vllm
def test_a_directory_in_eight_bits_waits_for_the_trainers_weights(start: Any, tmp_path: Path) -> None:
    published.in_eight_bits(save("qwen3", tmp_path))
    rollout = start("qwen3", tmp_path)
    with pytest.raises(QuintetError, match="the rollout's weights are undefined"):
        greedy(rollout)
    update(rollout, weights_of("qwen3"))
    assert greedy(rollout) == greedy_by_transformers("qwen3", 8)
    rollout.close()


def in_eight_bits(made: Any, eight: set[str]) -> dict[str, torch.Tensor]:
    """A model's weights as they are sent, the names of `eight` in 8 bits; the model then computes with what they say."""
    sent = {}
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if name not in eight:
                sent[name] = tensor.bfloat16()
                continue
            scales = torch.empty(scales_shape(tuple(tensor.shape)))
            sent[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
            quantize(tensor, sent[name], scales)
            sent[name + "_scale_inv"] = scales
            tensor.copy_(dequantize(sent[name], scales))
    return sent
