"""Ways from rewards to advantages: what a rank makes of its samples is what one process makes of all of them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintet.algorithms.advantages import Scored, group_advantages, grpo_advantages, value_advantages
from quintet.algorithms.gae import final_rewards, gae, moments, whiten
from quintet.algorithms.kl import kl
from quintet.rewards.overlong import overlong_penalty

GAE: dict[str, Any] = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.3, "kl_estimator": "k1"}
FIELDS = ("loss_mask", "old_values", "old_logprobs", "ref_logprobs")


def example(lengths: list[tuple[int, int]]) -> tuple[dict[str, Tensor], Tensor, Scored]:
    """Samples of (prompt, response) tokens; what stands on prompts is no number."""
    torch.manual_seed(len(lengths))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor([p + r for p, r in lengths]))
    mask = torch.cat([torch.tensor([0.0] * p + [1.0] * r) for p, r in lengths])
    fields = {name: torch.where(mask > 0, torch.randn(len(ids)), torch.nan) for name in FIELDS[1:]}
    rewards = torch.randint(0, 3, (len(lengths),)).float()
    return {"loss_mask": mask, **fields}, ids, Scored(rewards, torch.arange(len(lengths)) // 2)


def of(fields: dict[str, Tensor], ids: Tensor, chosen: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """The part of some samples."""
    at = (
        torch.cat([(ids == i).nonzero()[:, 0] for i in chosen])
        if chosen
        else torch.empty(0, dtype=torch.int64)
    )
    new = [torch.full((int((ids == i).sum()),), n) for n, i in enumerate(chosen)]
    return {k: v[at] for k, v in fields.items()}, torch.cat(new) if new else at


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=2, max_size=8),
    split=st.randoms(use_true_random=False),
)
def test_a_split_over_ranks_changes_nothing(lengths: list[tuple[int, int]], split: Any) -> None:
    fields, ids, scored = example(lengths)
    everyone = torch.arange(len(lengths))
    ways: dict[str, Any] = {
        "gae": partial(value_advantages, **GAE),
        "group": partial(group_advantages, normalize_by_std=True),
    }
    order = list(range(len(lengths)))
    split.shuffle(order)
    cut = split.randint(0, len(order))
    parts = [sorted(order[:cut]), sorted(order[cut:])]
    for name, way in ways.items():
        way = pickle.loads(pickle.dumps(way))
        whole = way(fields, ids, everyone, scored, lambda values: values)
        raw = [of(fields, ids, part) for part in parts]
        if name == "gae":
            # What ranks sum is what they hold of the whole: here the other part's moments are added by hand.
            both = [_advantages(*one, scored.rewards[part]) for one, part in zip(raw, parts, strict=True)]
            total = sum(moments(a, f["loss_mask"]) for a, (f, _) in zip(both, raw, strict=True))
        else:
            total = None
        for part, (some, here) in zip(parts, raw, strict=True):
            found = way(some, here, torch.tensor(part, dtype=torch.int64), scored, partial(_always, total))
            for field, values in found.items():
                wanted = whole[field]
                expected = of({"x": wanted}, ids, part)[0]["x"] if name == "gae" else wanted[part]
                torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def _always(total: Any, values: Tensor) -> Any:
    return total


def _advantages(fields: dict[str, Tensor], ids: Tensor, rewards: Tensor) -> Tensor:
    mask = fields["loss_mask"]
    on = mask > 0
    old, ref = (torch.where(on, fields[name], 0.0) for name in ("old_logprobs", "ref_logprobs"))
    shaped = final_rewards(rewards, mask, ids) - 0.3 * kl(old, ref, "k1")
    return gae(shaped, fields["old_values"], mask, ids, 0.9, 0.8)[0]


def test_gae_is_what_it_is_made_of() -> None:
    fields, ids, scored = example([(2, 3), (1, 4), (3, 1)])
    made = value_advantages(fields, ids, torch.arange(3), scored, lambda values: values, **GAE)
    raw = _advantages(fields, ids, scored.rewards)
    mask = fields["loss_mask"]
    torch.testing.assert_close(made["advantages"], whiten(raw, mask, moments(raw, mask)))
    on = mask > 0
    torch.testing.assert_close(made["returns"][on], (raw + fields["old_values"])[on])
    assert not made["returns"][~on].any()


def test_groups_lie_on_any_ranks() -> None:
    fields, ids, scored = example([(1, 1)] * 6)
    way = partial(group_advantages, normalize_by_std=False)
    found = way(fields, ids, torch.tensor([5, 0]), scored, lambda values: values)["advantages"]
    assert found.tolist() == grpo_advantages(scored.rewards, scored.groups, False)[[5, 0]].tolist()


@pytest.mark.parametrize(("tokens", "share"), [(0, 0), (80, 0), (85, 0.25), (100, 1), (120, 1)])
def test_overlong(tokens: int, share: float) -> None:
    assert overlong_penalty(tokens, 100, 20) == share
