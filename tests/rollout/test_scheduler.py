"""Continuous batching keeps its books: every sample runs once, slots are never exceeded, prompts are computed once."""

from hypothesis import given
from hypothesis import strategies as st

from quintet.rollout.base import Request, Sampling
from quintet.rollout.native.scheduler import Scheduler


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 20),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_every_sample_runs_once(shapes, slots, prefill_tokens, rng):
    requests = [Request([1] * length, samples=n) for length, n in shapes]
    scheduler = Scheduler(requests, Sampling(max_response_tokens=5), slots, prefill_tokens)
    started, prefills = [], {}
    for _ in range(10_000):
        if scheduler.done:
            break
        groups = scheduler.admit()
        for group in groups:
            prefills[group[0].request] = prefills.get(group[0].request, 0) + 1
            assert len({sequence.request for sequence in group}) == 1
            started += [(sequence.request, sequence.number) for sequence in group]
        assert len(scheduler.active) <= slots
        assert scheduler.active, "nothing runs and nothing is done"
        for sequence in scheduler.active:
            if rng.random() < 0.3:
                sequence.finish = "stop"
        before = list(scheduler.active)
        source, target = scheduler.retire()
        for a, b in zip(source, target, strict=True):
            assert scheduler.active[b] is before[a]
        assert all(not sequence.finish for sequence in scheduler.active)
    assert scheduler.done
    assert sorted(started) == [(r, k) for r, (_, n) in enumerate(shapes) for k in range(n)]
    for r, (_, n) in enumerate(shapes):
        assert prefills[r] == -(-n // slots)
