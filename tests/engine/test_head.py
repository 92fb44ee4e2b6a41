"""The LM head says what log_softmax says, forward and backward, however its work is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine import device, head
from quintet.engine.head import VocabSlice, log_probs_and_entropy

HIDDEN, VOCAB = 24, 61
SCALE = 4.0  # of the logits: some distributions are sharp, some flat


class Alone:
    """A tp group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Hidden states, a head over VOCAB tokens, targets, and what a loss sends back. First and last token are targets."""
    generator = torch.Generator().manual_seed(tokens)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[:2] = torch.tensor([0, VOCAB - 1])[:tokens]
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {
            "hidden": (tokens, HIDDEN),
            "weight": (VOCAB, HIDDEN),
            "of_logprob": (tokens,),
            "of_entropy": (tokens,),
        }.items()
    }
    made["weight"] *= SCALE / math.sqrt(HIDDEN)
    return {name: value.to(dtype) for name, value in made.items()} | {"targets": targets}


def expected(data: dict[str, Tensor], temperature: float, with_entropy: bool) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and weight, by log_softmax in fp64."""
    hidden, weight = (data[name].double().requires_grad_() for name in ("hidden", "weight"))
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    chosen = log_p.gather(1, data["targets"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (chosen * data["of_logprob"].double()).sum()
    if with_entropy:
        loss = loss + (entropy * data["of_entropy"].double()).sum()
    loss.backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


def found(
    data: dict[str, Tensor], temperature: float, with_entropy: bool, group: Any = None, rows: int = VOCAB
) -> list[Tensor]:
    """The same by the head; a rank of a group takes `rows` rows of the weight, ones after the last real one."""
    group = group or Alone()
    full = torch.ones(rows * group.size(), HIDDEN, dtype=data["weight"].dtype, device=data["weight"].device)
    full[:VOCAB] = data["weight"]
    weight = full[group.rank() * rows :][:rows].clone().requires_grad_()
    hidden = data["hidden"].clone().requires_grad_()
    vocab = VocabSlice(rows, VOCAB, group)
    logprobs, entropy, _ = log_probs_and_entropy(hidden, weight, data["targets"], vocab, temperature)
    loss = (logprobs * data["of_logprob"]).sum()
    if with_entropy:
        loss = loss + (entropy * data["of_entropy"]).sum()
    loss.backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


def close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Within a tolerance relative to the largest element of each."""
    for name, a, b in zip(("log-probs", "entropy", "of hidden", "of weight"), got, want, strict=True):
        worst = (a.double().cpu() - b.cpu()).abs().max() if b.numel() else 0.0
        largest = b.abs().max() if b.numel() else 1.0
        assert worst <= tolerance * largest, f"{name}: off by {worst / largest:.1e}"


@pytest.fixture
def limits(monkeypatch):
    """Sets how many tokens' logits are kept, in a chunk, and fp32 at once."""

    def limit(kept: int, chunk: int, fp32: int, element_size: int = 4, rows: int = VOCAB) -> None:
        for kind in ("cpu", "cuda"):
            monkeypatch.setitem(head.KEPT_BYTES, kind, kept * rows * element_size)
            monkeypatch.setitem(head.CHUNK_BYTES, kind, chunk * rows * element_size)
        monkeypatch.setattr(head, "_FP32_ELEMENTS", fp32 * rows)

    return limit


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("kept", "chunk", "fp32"),
    [(100, 100, 100), (0, 100, 100), (0, 4, 3), (7, 4, 100), (13, 1, 2), (12, 1, 1), (100, 100, 5)],
    ids=str,
)
def test_equals_log_softmax_however_it_is_cut(limits, kept, chunk, fp32, temperature, with_entropy) -> None:
    limits(kept, chunk, fp32)
    data = inputs(13)
    close(found(data, temperature, with_entropy), expected(data, temperature, with_entropy), 1e-5)


def test_padding_of_the_vocabulary_is_no_token_and_gets_no_gradient() -> None:
    data = inputs(9)
    *got, of_weight = found(data, 0.8, True, rows=VOCAB + 7)
    want = expected(data, 0.8, True)
    close([*got, of_weight[:VOCAB]], want, 1e-5)
    assert not of_weight[VOCAB:].any()


def test_gradients_are_those_of_the_outputs(limits) -> None:
    limits(3, 2, 1, element_size=8)
    data = inputs(6, torch.float64)
    vocab = VocabSlice(VOCAB, VOCAB, Alone())

    def scores(hidden: Tensor, weight: Tensor) -> Any:
        return tuple(log_probs_and_entropy(hidden, weight, data["targets"], vocab, 0.7))

    arguments = [data[name].requires_grad_() for name in ("hidden", "weight")]
    assert torch.autograd.gradcheck(scores, arguments, fast_mode=True, nondet_tol=1e-12)


def test_a_second_backward_pass_finds_the_same(limits) -> None:
    """The kept logits are used up by the first: they are computed again."""
    limits(4, 2, 100)
    data = inputs(7)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    scores = log_probs_and_entropy(hidden, weight, data["targets"], VocabSlice(VOCAB, VOCAB, Alone()))
    first, again = (
        torch.autograd.grad(scores.logprobs.sum(), (hidden, weight), retain_graph=True) for _ in range(2)
    )
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen) -> None:
    data = inputs(5)
    other = "weight" if frozen == "hidden" else "hidden"
    data[other].requires_grad_()
    vocab = VocabSlice(VOCAB, VOCAB, Alone())
    log_probs_and_entropy(data["hidden"], data["weight"], data["targets"], vocab).entropy.sum().backward()
    assert data[frozen].grad is None
    assert data[other].grad.isfinite().all()
    assert data[other].grad.any()


def test_no_token_is_trained() -> None:
    logprobs, entropy, of_hidden, of_weight = found(inputs(0), 1.0, True)
    assert logprobs.shape == entropy.shape == (0,)
    assert of_hidden.shape == (0, HIDDEN)
    assert of_weight.shape == (VOCAB, HIDDEN)
    assert not of_weight.any()


def test_a_certain_token_has_no_entropy_and_large_logits_lose_no_precision() -> None:
    """Logits of thousands: differences of log-sum-exps would be off by 1e-4."""
    hidden, weight = torch.full((2, 1), 1000.0), torch.zeros(VOCAB, 1)
    weight[:3, 0] = torch.tensor([4.0, 4.0, 3.9])
    logprobs, entropy, _ = log_probs_and_entropy(
        hidden, weight, torch.tensor([0, 2]), VocabSlice(VOCAB, VOCAB, Alone())
    )
    log_p = (hidden.double() @ weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(logprobs, log_p[[0, 1], [0, 2]].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(2.0)), rtol=1e-6, atol=1e-6)


def test_bf16_is_within_its_rounding(limits) -> None:
    """Logits, their gradients and the results are rounded to 8 bits of mantissa; what lies between is fp32."""
    limits(7, 4, 100, element_size=2)
    data = inputs(13, torch.bfloat16)
    close(found(data, 0.8, True), expected(data, 0.8, True), 0.02)
    limits(0, 1, 100, element_size=2)
    data = {
        name: value[:1].expand(600, *value.shape[1:]) if name != "weight" else value
        for name, value in data.items()
    }
    want = expected(data, 0.8, True)
    close([*want[:3], found(data, 0.8, True)[3]], want, 0.02)  # a sum of 600 chunks' shares


def _on_rank(tokens: int, temperature: float) -> list[Tensor]:
    ranks = dist.get_world_size()
    rows = -(-VOCAB // ranks)
    got = found(inputs(tokens), temperature, True, dist.group.WORLD, rows)
    dist.all_reduce(got[2])  # what PolicyModel.for_head does
    return got


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 9), (4, 9), (2, 0)])
def test_the_vocabulary_is_cut_over_tp(pool, ranks, tokens) -> None:
    results = pool.run(_on_rank, ranks, tokens, 0.8)
    want = expected(inputs(tokens), 0.8, True)
    for *got, _ in results:
        close([*got, want[3]], want, 1e-5)
    of_weight = torch.cat([result[3] for result in results])[:VOCAB]
    close([*want[:3], of_weight], want, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on GPUs")
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [61, 64, 9000, 151936])
def test_fused_kernels_compute_what_the_plain_path_does(monkeypatch, rows, dtype, with_entropy) -> None:
    assert device._HAS_TRITON
    torch.manual_seed(0)
    tokens, valid = 50, rows - 3
    z = (torch.randn(tokens, rows, device="cuda") * SCALE).to(dtype)
    targets = torch.randint(-5, rows + 5, (tokens,), device="cuda")
    lse, entropy = z[:, :valid].float().div(0.7).logsumexp(-1), torch.rand(tokens, device="cuda")
    grads = torch.randn(2, tokens, device="cuda")
    found = []
    for fused in (True, False):
        monkeypatch.setattr(device, "_HAS_TRITON", fused)
        statistics, gradient = torch.empty(4, tokens, device="cuda"), z.clone()
        head._statistics(z, targets, valid, 0.7, statistics)
        of_entropy = grads[1] if with_entropy else None
        head._to_gradient_(gradient, targets, valid, 0.7, lse, entropy, grads[0], of_entropy)
        found.append((statistics, gradient))
    (statistics, gradient), (plain_statistics, plain_gradient) = found
    torch.testing.assert_close(statistics, plain_statistics, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient, plain_gradient, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on GPUs")
def test_on_a_gpu_equals_log_softmax(limits) -> None:
    limits(7, 4, 100)
    data = inputs(13)
    want = expected(data, 0.8, True)
    close(found({name: value.cuda() for name, value in data.items()}, 0.8, True), want, 1e-4)


def test_the_likeliest_token_is_told(limits) -> None:
    limits(3, 2, 1, element_size=4)
    data = inputs(20)
    vocab = VocabSlice(VOCAB, VOCAB, Alone())
    best = (data["hidden"] @ data["weight"].t()).argmax(1)
    targets = torch.where(torch.arange(20) % 3 == 0, best, (best + 1) % VOCAB)
    top = log_probs_and_entropy(data["hidden"], data["weight"], targets, vocab, 0.7).top
    assert top.tolist() == [float(k % 3 == 0) for k in range(20)]


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on GPUs")


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("vocabulary", [300, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_drawn_tokens_are_those_of_whole_logits(dtype, vocabulary, device_type):
    """Tokens that were cut off have none of the probability, be they all of a kernel's block."""
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    tokens = torch.arange(7) * (vocabulary // 7)
    logits[3, : vocabulary // 2 - 10] = logits[4, vocabulary - 100 :] = -torch.inf
    wanted = logits.float().log_softmax(-1)[torch.arange(7), tokens]
    found = head.log_probs_of(logits.to(device_type), tokens.to(device_type)).cpu()
    assert found.dtype == torch.float32
    assert torch.isfinite(found).tolist() == [True, True, True, False, True, True, True]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
