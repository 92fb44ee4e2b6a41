"""Progress of a call while it runs: what is posted, when, and that it never leaks into the next call."""

from __future__ import annotations

import pytest

from quintet.cluster.group import WorkerGroup
from quintet.cluster.progress import FIRST_POST_S, KEY_VARIABLE, POST_EVERY_S, Progress
from tests.cluster.workers import Light


def test_short_calls_post_nothing_and_long_ones_not_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a/0")
    now, posts = [100.0], []
    progress = Progress(lambda key, done: posts.append((key, done)), lambda: now[0])
    progress.begin()
    for done in range(200):
        now[0] = 100 + done / 100
        progress(done)
    assert posts[0] == ("a/0", round(FIRST_POST_S * 100))
    assert len(posts) == 1 + int((1.99 - FIRST_POST_S) / POST_EVERY_S)
    posts.clear()
    progress.begin()
    progress(1)
    assert posts == []


def test_outside_a_group_nothing_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    progress = Progress(lambda key, done: pytest.fail("posted"), iter([0.0, 0.0, 9.0]).__next__)
    progress.begin()
    progress(1)


def test_the_controller_sees_counts_while_it_waits_and_none_afterwards(quartet: WorkerGroup) -> None:
    seen: list[int] = []
    quartet.all(Light.count).submit(14, 0.1).result(lambda: seen.append(quartet.posted([1, 3])))
    assert seen == sorted(seen)
    assert 0 < max(seen) <= 28
    assert quartet.posted(range(4)) == 0
