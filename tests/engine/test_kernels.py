"""Attention with sliding windows and sinks equals a softmax written out, forwards and backwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.engine.layers.attention_backends import AttentionParams, choose_kernel, spans
from quintet.engine.layers.attention_sinks import with_sinks
from quintet.rollout.native.cache import SlotCache

ROWS = {
    "sequences": ([3, 7, 2, 7], [3, 7, 2, 7]),
    "one length": ([5, 5], [5, 5]),
    "chunks of sequences": ([4, 2, 9, 1], [4, 12, 18, 13]),
}
HOWS = {
    "window": (3, False),
    "window of one": (1, False),
    "window of all": (50, False),
    "sinks": (None, True),
    "both": (4, True),
}
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def written_out(
    query: Any, key: Any, value: Any, q: list[int], k: list[int], how: AttentionParams
) -> torch.Tensor:
    """Span by span, scores and weights as matrices."""
    out, repeat = [], query.shape[1] // key.shape[1]
    for a, b, c in zip(query.split(q), key.split(k), value.split(k), strict=True):
        b, c = (t.repeat_interleave(repeat, 1) for t in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) * how.scale_of(a)
        place = torch.arange(len(a))[:, None] + len(b) - len(a)
        seen = torch.arange(len(b)) <= place
        if how.window is not None:
            seen &= torch.arange(len(b)) > place - how.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if how.sinks is not None:
            scores = torch.cat((scores, how.sinks[:, None, None].expand(-1, len(a), 1)), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(b)], c))
    return torch.cat(out)


def inputs(q: list[int], k: list[int], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    """Query, key, value, sinks and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    kv = (sum(k), KV_HEADS, WIDTH)
    sizes = ((sum(q), HEADS, WIDTH), kv, kv, (HEADS,), (sum(q), HEADS, WIDTH))
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in sizes]
    return [t.requires_grad_() for t in made[:4]] + made[4:]


def compare(found: Any, want: Any, leaves: Any, grad: torch.Tensor, **close: float) -> None:
    torch.testing.assert_close(found, want, **close)
    got, expected = (torch.autograd.grad(out, leaves, grad) for out in (found, want))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize(("window", "sinks"), HOWS.values(), ids=HOWS)
@pytest.mark.parametrize(("q", "k"), ROWS.values(), ids=ROWS)
def test_rectangles(q, k, window, sinks):
    *leaves, grad = inputs(q, k)
    leaves = leaves[: 3 + sinks]
    how = AttentionParams(0.5, window, leaves[3] if sinks else None)
    cpu = torch.device("cpu")
    row = spans(q, q if q == k else k, cpu, rectangles=True)
    found = choose_kernel(cpu, torch.float32, "portable", sinks=sinks)(*leaves[:3], row, how)
    compare(found, written_out(*leaves[:3], q, k, how), leaves, grad, rtol=1e-4, atol=1e-5)


class FlashStandIn:
    """What flash kernels compute, by their contract: the backward pass knows the weights only from out and lse."""

    def __init__(self, q: list[int], k: list[int], how: AttentionParams) -> None:
        self.q, self.k, self.how = q, k, AttentionParams(how.scale, how.window)

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        lse = self._scores(query, key).logsumexp(-1)
        return written_out(query, key, value, self.q, self.k, self.how), lse

    def backward(self, grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any) -> Any:
        repeat = query.shape[1] // key.shape[1]
        keys, values = (t.repeat_interleave(repeat, 1) for t in (key, value))
        weights = (self._scores(query, key) - lse[..., None]).exp()
        total = (grad * out).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", grad, values) - total) * self.how.scale_of(query)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query)
        of_value = torch.einsum("hqk,qhd->khd", weights, grad)
        grouped = [t.unflatten(1, (-1, repeat)).sum(2) for t in (of_key, of_value)]
        return torch.einsum("hqk,khd->qhd", of_scores, keys), *grouped

    def _scores(self, query: Any, key: Any) -> Any:
        """[heads, all queries, all keys], −∞ where a query does not see a key."""
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.how.scale_of(query)
        place = torch.cat([torch.arange(n) + m - n for n, m in zip(self.q, self.k, strict=True)])
        column = torch.cat([torch.arange(m) for m in self.k])
        span_q, span_k = (torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in (self.q, self.k))
        seen = (span_q[:, None] == span_k) & (column <= place[:, None])
        if self.how.window is not None:
            seen &= column > place[:, None] - self.how.window
        return scores.masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("q", "k"), ROWS.values(), ids=ROWS)
def test_flash_kernels_need_not_know_of_sinks(q, k, window):
    *leaves, grad = inputs(q, k, torch.float64)
    how = AttentionParams(None, window, leaves[3])
    found = with_sinks(*leaves, FlashStandIn(q, k, how))
    compare(found, written_out(*leaves[:3], q, k, how), leaves, grad, rtol=1e-12, atol=1e-12)


def test_a_sink_far_above_the_scores_takes_everything():
    *leaves, grad = inputs([4], [4], torch.float64)
    how = AttentionParams(None, None, torch.full((HEADS,), 60.0, dtype=torch.float64, requires_grad=True))
    out = with_sinks(*leaves[:3], how.sinks, FlashStandIn([4], [4], how))
    (of_sinks,) = torch.autograd.grad(out, [how.sinks], grad)
    assert out.abs().max() < 1e-20
    assert of_sinks.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash kernels run on GPUs")
@pytest.mark.parametrize("backend", ["portable", "transformer_engine"])
@pytest.mark.parametrize(("window", "sinks"), HOWS.values(), ids=HOWS)
@pytest.mark.parametrize(("q", "k"), ROWS.values(), ids=ROWS)
def test_gpu_kernels(q, k, window, sinks, backend):
    if backend == "transformer_engine":
        pytest.importorskip("transformer_engine")
    *leaves, grad = inputs(q, k, torch.bfloat16, "cuda")
    leaves = leaves[: 3 + sinks]
    gpu = torch.device("cuda")
    how = AttentionParams(None, window, leaves[3] if sinks else None)
    row = spans(q, q if q == k else k, gpu, rectangles=False)
    found = choose_kernel(gpu, torch.bfloat16, backend, sinks=sinks)(*leaves[:3], row, how)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    plain = AttentionParams(None, window, exact[3] if sinks else None)
    want = written_out(*exact[:3], q, k, plain)
    got = torch.autograd.grad(found, leaves, grad)
    expected = torch.autograd.grad(want, exact, grad.cpu().double())
    for a, b in zip((found, *got), (want, *expected), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0.03, atol=0.05)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "sinks"), HOWS.values(), ids=HOWS)
def test_decoding_from_a_cache(device, window, sinks):
    """One token of each sequence sees what the last token of the whole sequence sees."""
    lengths = [5, 1, 9]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value, logits, _ = (t.detach() for t in inputs(lengths, lengths, dtype, device))
    how = AttentionParams(0.5, window, logits if sinks else None)
    cache = SlotCache([1], 4, 16, KV_HEADS, WIDTH, dtype, torch.device(device))
    ends = torch.tensor(lengths, device=device).cumsum(0)
    starts = ends - torch.tensor(lengths, device=device)
    for i, n in enumerate(lengths):
        cache.keys[1][i, :n], cache.values[1][i, :n] = (t[starts[i] : ends[i]] for t in (key, value))
    cache.decode(torch.tensor(lengths, device=device) - 1, max(lengths))
    attention = SimpleNamespace(layer_number=1, weighing=how)
    found = cache.attend(attention, query[ends - 1], key[ends - 1], value[ends - 1], None)
    wide = [t.cpu().double() for t in (query, key, value)]
    plain = AttentionParams(0.5, window, logits.cpu().double() if sinks else None)
    want = written_out(*wide, lengths, lengths, plain)[ends.cpu() - 1]
    close = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 0.02, "atol": 0.03}
    torch.testing.assert_close(found.cpu().double(), want, **close)
