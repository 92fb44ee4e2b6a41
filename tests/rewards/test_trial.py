"""A reward is tried before a run starts: what would end the run at its first step ends it before."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.data.prompts import Prompt
from quintet.errors import UserError
from quintet.recipe.schema import Reward
from quintet.rewards.load import load_reward
from quintet.rewards.trial import try_reward

PROMPTS = [
    Prompt(n, "", [1], f"prompt {n}", f"{n}", None, [], f"prompts.jsonl:{n}", {"level": n}) for n in (1, 2, 3)
]


def trial(path: Path, body: str, **settings: object) -> None:
    (path / "mine.py").write_text(f"def reward(prompt, response, answer, row):\n    {body}\n")
    reward = load_reward(f"{path / 'mine.py'}:reward")
    try_reward(reward, Reward(function=reward.spec, **settings), PROMPTS)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return", r"mine\.py:1\) returned None.*end in `return`"),
        ("return '1.0'", r"mine\.py:1\) returned '1\.0'.*return float"),
        ("return float('nan')", r"mine\.py:1\) returned nan.*return 0\.0"),
        ("return [1.0]", r"mine\.py:1\) returned \[1\.0\].*one sample"),
        ("return {'score': 1.0}", r"mine\.py:1\) returned a dict without \"reward\".*put the number"),
        ("return answer.nothing", r"mine\.py:2\) raised AttributeError"),
        ("__import__('os')._exit(7)", r"(?s)ended its process with code 7; it printed nothing$"),
        ("print('as it was'); __import__('os')._exit(7)", r"(?s)ended its process with code 7.*as it was"),
    ],
)
def test_what_is_no_reward_is_told_before_the_start(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        trial(tmp_path, body)
    assert "tried with a made-up response to prompts.jsonl:1 before anything starts" in str(caught.value)


def test_two_prompts_with_their_rows_are_tried(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    trial(
        tmp_path, f"print(prompt, answer, row['level'], file=open({str(seen)!r}, 'a')); return row['level']"
    )
    assert seen.read_text().splitlines() == ["prompt 1 1 1", "prompt 2 2 2"]


def test_one_that_may_fail_may_fail_at_one_of_them(tmp_path: Path) -> None:
    trial(tmp_path, "return {'1': 'text'}.get(answer, 1.0)", on_error="zero")
    with pytest.raises(UserError, match="returned 'text'"):
        trial(tmp_path, "return 'text'", on_error="zero")
    with pytest.raises(UserError, match="returned 'text'"):
        trial(tmp_path, "return {'2': 'text'}.get(answer, 1.0)")
