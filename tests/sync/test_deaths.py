"""Receivers that die, join later or never come: the others get their weights, and the trainer says who did not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.models import save
from tests.sync import receivers

KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate", marks=pytest.mark.slow)]
EMBEDDING = "model.embed_tokens.weight"


def same(found: Any, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(found, dict), found
    return set(found) == set(expected) and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize("colocated", KINDS)
def test_the_others_go_on_without_one_that_dies(pool, tmp_path_factory, beside, colocated):
    """First it dies holding a bucket; then it is missing; then another takes its place, and one more joins."""
    path = save("qwen3", tmp_path_factory.getbasetemp() / "sync-qwen3")
    expected = load_file(path / "model.safetensors")
    first = [[("dies", None), ("lives", EMBEDDING)], [("other", None)]]
    joined = [[("dies", None), ("lives", EMBEDDING)], [("other", None), ("later", EMBEDDING)]]
    beside.start("dies", [0], dies_in=0)
    beside.start("lives", [0, 1, 2])
    beside.start("other", [0, 1, 2])
    with ThreadPoolExecutor() as threads:
        args = (receivers.train, 2, path, beside.root, {0: first, 2: joined}, 3, colocated)
        serving = threads.submit(pool.run, *args)
        beside.took(1, "other")
        beside.start("dies", [2])
        beside.start("later", [2])
        ranks = serving.result()
    for number in range(3):
        assert same(beside.took(number, "other"), expected)
        assert same(beside.took(number, "lives"), {EMBEDDING: expected[EMBEDDING]})
    assert same(beside.took(2, "dies"), expected)
    assert same(beside.took(2, "later"), {EMBEDDING: expected[EMBEDDING]})
    lost = [[served.lost for served, _ in syncs] for syncs in ranks]
    assert lost[1] == [{}, {}, {}]
    assert [list(one) for one in lost[0]] == [["dies"], ["dies"], []]
    assert "its connection closed" in lost[0][0]["dies"]
    assert "did not come for its weights within 12 s" in lost[0][1]["dies"]
    for syncs in ranks:  # nothing is left open but what the next sync uses
        files = [count for _, count in syncs]
        assert files[1] <= files[0]


@pytest.mark.slow
def test_one_that_dies_breaks_its_process_group_alone(pool, tmp_path_factory, beside):
    path = save("qwen3", tmp_path_factory.getbasetemp() / "sync-qwen3")
    plan = [[("dies", None), ("together", None)], [("other", None)]]
    beside.start("dies", [0], dies_in=0)
    beside.start("together", [0, 1])
    beside.start("other", [0, 1])
    ranks = pool.run(receivers.train, 2, path, beside.root, {0: plan}, 2, False)
    expected = load_file(path / "model.safetensors")
    (first, _), (second, _) = ranks[0]
    assert set(first.lost) == {"dies", "together"}
    assert first.lost["together"] == "of its process group dies went away"
    assert "receiver together: " in beside.took(0, "together")
    assert set(second.lost) == {"dies"}
    assert same(beside.took(1, "together"), expected)  # in a new group
    assert same(beside.took(0, "other"), expected)
