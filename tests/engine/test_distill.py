"""Cross-entropy to a distribution: the value, its gradients and the likeliest token, by plain arithmetic and over tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine import distill
from quintet.engine.distill import distilled
from quintet.engine.head import VocabSlice, log_probs_and_entropy

VOCAB, TOKENS, HIDDEN = 61, 9, 16


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    made = {"hidden": drawn(TOKENS, HIDDEN), "teacher": drawn(TOKENS, HIDDEN), "weight": drawn(VOCAB, HIDDEN)}
    targets[::2] = (made["hidden"] @ made["weight"].t()).argmax(1)[::2]
    return made | {"targets": targets, "outer": drawn(TOKENS)}


def plain(data: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, whether the target is the likeliest, and gradients of hidden and weight."""
    hidden, weight = (data[name].double().requires_grad_() for name in ("hidden", "weight"))
    q = (data["teacher"].double() @ data["weight"].double().t() / temperature).softmax(-1)
    z = hidden @ weight.t() / temperature
    loss = -(q * z.log_softmax(-1)).sum(-1)
    (loss * data["outer"].double()).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), (z.argmax(-1) == data["targets"]).double(), hidden.grad, weight.grad


class Alone:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("at_once", [1 << 24, 2 * VOCAB])
def test_equals_plain_arithmetic(monkeypatch: pytest.MonkeyPatch, temperature: float, at_once: int) -> None:
    monkeypatch.setattr(distill, "_FP32_ELEMENTS", at_once)
    data = inputs()
    vocab: Any = VocabSlice(VOCAB, VOCAB, Alone())  # type: ignore[arg-type]
    hidden, weight = (data[name].requires_grad_() for name in ("hidden", "weight"))
    loss, top = distilled(hidden, weight, data["teacher"], data["targets"], vocab, temperature)
    (loss * data["outer"]).sum().backward()
    found = (loss.detach(), top, hidden.grad, weight.grad)
    for one, want in zip(found, plain(inputs(), temperature), strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)
    assert 0 < top.sum() < TOKENS


def test_a_teacher_that_is_sure_makes_it_the_log_prob() -> None:
    data = inputs(torch.float64)
    vocab: Any = VocabSlice(VOCAB, VOCAB, Alone())  # type: ignore[arg-type]
    sure = torch.linalg.lstsq(data["weight"].t() @ data["weight"], data["weight"].t()).solution.t() * 1e4
    targets = (sure @ data["weight"].t()).argmax(1)[:TOKENS]
    loss, _ = distilled(data["hidden"], data["weight"], sure[:TOKENS], targets, vocab, 1.0)
    scores = log_probs_and_entropy(data["hidden"], data["weight"], targets, vocab)
    torch.testing.assert_close(loss, -scores.logprobs)


def test_gradients_are_those_of_the_loss() -> None:
    data = inputs(torch.float64)
    vocab: Any = VocabSlice(VOCAB, VOCAB, Alone())  # type: ignore[arg-type]

    def loss(hidden: Tensor) -> Tensor:
        return distilled(hidden, data["weight"], data["teacher"], data["targets"], vocab, 0.7)[0]

    assert torch.autograd.gradcheck(loss, [data["hidden"].requires_grad_()])


def over_tp(temperature: float, real: int) -> tuple[Tensor, ...]:
    """On one rank, with its rows of the vocabulary, of which `real` are no padding."""
    group = dist.group.WORLD
    assert group is not None
    data, ranks = inputs(), group.size()
    rows = -(-VOCAB // ranks) if real == VOCAB else VOCAB
    padded = torch.cat([data["weight"], torch.full((rows * ranks - VOCAB, HIDDEN), 9.0)])
    weight = padded[group.rank() * rows :][:rows].clone().requires_grad_()
    hidden = data["hidden"].requires_grad_()
    loss, top = distilled(
        hidden, weight, data["teacher"], data["targets"], VocabSlice(rows, VOCAB, group), temperature
    )
    (loss * data["outer"]).sum().backward()
    dist.all_reduce(hidden.grad)
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), top, hidden.grad, weight.grad


@pytest.mark.parametrize("real", [VOCAB, 1])
def test_the_vocabulary_is_cut_over_tp(pool: Any, real: int) -> None:
    """Also where a rank has nothing but padding."""
    results = pool.run(over_tp, 2, 0.7, real)
    loss, top, hidden, weight = plain(inputs(), 0.7)
    for found in results:
        for one, want in zip(found[:3], (loss, top, hidden), strict=True):
            torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)
    whole = torch.cat([found[3] for found in results]).double()
    torch.testing.assert_close(whole[:VOCAB], weight, rtol=1e-5, atol=1e-5)
    assert not whole[VOCAB:].any()
