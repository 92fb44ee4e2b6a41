"""Receivers that die, join later or never come: the others get their weights, and the trainer says who did not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.cluster.environment import LOOPBACK
from quintet.errors import SyncFailure
from quintet.sync.senders import ProcessGroupSender, Store
from quintet.sync.server import ReceiverSpec
from quintet.sync.source import ChannelSource
from quintet.sync.wire import notify_absent
from tests.oracle.models import save
from tests.patience import BUSY
from tests.sync import receivers
from tests.sync.layouts import Taker
from tests.sync.one_rank import NAMES, boxes, server_of, shards

KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate", marks=pytest.mark.slow)]
EMBEDDING = "model.embed_tokens.weight"


def same(found: Any, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(found, dict), found
    return set(found) == set(expected) and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.slow
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "separate"])
def test_one_that_is_known_to_have_ended_is_not_waited_for(colocated):
    """Whether that is told before the trainer waits for it, or meanwhile; and of an earlier plan it does not count."""
    server = server_of(shards(), timeout_s=300.0)
    specs = [ReceiverSpec(who, boxes(*NAMES), colocated) for who in ("dies", "lives")]
    earlier = server.plan(specs)
    dead, alive = server.plan(specs)
    notify_absent(earlier[1])
    for turn in range(2):
        taker = Taker(ChannelSource([alive]), lambda piece: None)
        if turn == 0:
            threading.Timer(0.5, notify_absent, [dead]).start()
        began = time.monotonic()
        served = server.serve()
        taker.finish()
        assert time.monotonic() - began < 2 * BUSY
        assert served.lost == {"dies": "its process ended before it came for its weights"}
    server.plan(specs[:1])
    server.close()
    notify_absent(alive)  # to nobody


def test_a_sender_that_gives_up_tells_those_who_wait_before_it_leaves_the_group():
    """What it leaves may take long: it is a transfer under way."""
    ours, theirs = Pipe()
    sender = ProcessGroupSender(["one"], [], 5.0, Store(LOOPBACK, 5.0), "gloo")
    left = []

    def leave() -> None:
        left.append(theirs.poll())

    sender._lines, sender._heard, sender.lost = {"one": ours}, {"one": -1}, {}
    sender._group = SimpleNamespace(close=leave)
    assert sender.close() == [ours]
    assert left == [True]
    assert sender.lost == {"one": "the trainer failed"}
    assert sender._group is None


@pytest.mark.usefixtures("alone")
def test_a_trainer_without_weights_says_so_to_those_that_came(monkeypatch):
    server = server_of(shards(), timeout_s=60.0)
    source = ChannelSource(server.plan([ReceiverSpec("waits", boxes(*NAMES), True)]))
    taker = Taker(source, lambda piece: None)
    monkeypatch.setattr(server._export, "check", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.serve()
    with pytest.raises(SyncFailure, match="receiver waits: the trainer gave it up: the trainer failed"):
        taker.finish()
    server.close()
