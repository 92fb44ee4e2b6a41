"""Rewards are found by name, module or file; a user's mistakes come back in words, with the place and the sample."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.rewards.load import BUILT_IN, load_reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward" / "reward.py"


def reward_file(path: Path, body: str, name: str = "mine.py") -> str:
    (path / name).write_text(body)
    return f"{path / name}:reward"


def test_built_in() -> None:
    assert set(BUILT_IN) == {"math", "gsm8k", "exact_match", "length", "addition", "countdown"}
    results = [load_reward("addition")("1+1=", response, "2") for response in ("2", "3", "x")]
    assert [r.reward for r in results] == [1, 0, 0]
    assert [r.metrics for r in results] == [{"well_formed": 1}, {"well_formed": 1}, {"well_formed": 0}]
    assert load_reward("gsm8k")("q", "#### 5", "5").reward == 1


def test_example() -> None:
    reward = load_reward(f"{EXAMPLE}:reward")
    right, wrong, long = (reward("2+2?", text, "4") for text in ("4", "5", "4 " + "because " * 100))
    assert right.reward > long.reward > wrong.reward
    assert set(right.metrics) == {"correct", "words"}


def test_file_with_a_neighbour_and_pickling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("BONUS = 0.5")
    reward_file(
        tmp_path, "from neighbour_of_mine import BONUS\ndef reward(p, r, a):\n    return BONUS + (r == a)"
    )
    monkeypatch.chdir(tmp_path)
    reward = load_reward("mine.py:reward")
    assert reward("", "a", "a").reward == 1.5
    monkeypatch.chdir(tmp_path.parent)
    assert pickle.loads(pickle.dumps(reward))("", "a", "b").reward == 0.5


def test_module() -> None:
    assert load_reward("quintet.rewards.verifiers:exact_match")("", "a", "a").reward == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maths", r"no reward 'maths'; built in are math, .*module:function or file\.py:function"),
        ("no_such_module:f", r"no module 'no_such_module'.*path/file\.py:function"),
        ("no_such.module:f", r"no module 'no_such\.module'"),
        ("missing.py:f", r"there is no file .*missing\.py"),
        ("quintet.rewards.verifiers:f", r"verifiers has no function 'f'; it has .*exact_match"),
        ("quintet.rewards.numbers:LONGEST_TEXT", "is int, not a function"),
    ],
)
def test_not_found(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_reward(spec)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reward(:", r"importing .*mine\.py failed with SyntaxError"),
        ("import no_such_thing", r"importing .*mine\.py failed with ModuleNotFoundError: .*no_such_thing"),
        ("1 / 0", r"mine\.py failed with ZeroDivisionError"),
        ("def other(p, r, a): ...", r"mine\.py has no function 'reward'; it has other"),
        ("reward = 5", r"'reward' in .* is int, not a function"),
    ],
)
def test_bad_file(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_reward(reward_file(tmp_path, body))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned None; expected a finite number"),
        ("'1.0'", "returned '1.0'; expected a finite number"),
        ("float('nan')", "returned nan"),
        ("float('inf')", "returned inf"),
        ("[1, 2]", r"returned \[1, 2\]"),
        ("{'score': 1}", "a dict without \"reward\", with 'score'"),
        ("{'reward': None}", "returned None"),
        ("{'reward': 1, 'note': 'good'}", "returned 'good' as 'note'"),
        ("10 ** 400", "returned 1000"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("p.nothing", "raised AttributeError.*"),
    ],
)
def test_bad_return(tmp_path: Path, returned: str, message: str) -> None:
    reward = load_reward(reward_file(tmp_path, f"def reward(p, r, a):\n    return {returned}"))
    with pytest.raises(UserError, match=message) as caught:
        reward("my prompt", "my response", "my answer")
    for part in ("mine.py:reward", "my prompt", "my response", "my answer"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "returned", ["True", "1", "0.5", "{'reward': False}", "__import__('torch').tensor(0.5)"]
)
def test_good_return(tmp_path: Path, returned: str) -> None:
    reward = load_reward(reward_file(tmp_path, f"def reward(p, r, a):\n    return {returned}"))
    assert isinstance(reward("", "", "").reward, float)


def test_wrong_number_of_arguments(tmp_path: Path) -> None:
    reward = load_reward(reward_file(tmp_path, "def reward(response): return 1"))
    with pytest.raises(UserError, match=r"mine\.py:reward raised TypeError.*takes 1 positional"):
        reward("", "", "")


def test_a_file_is_executed_once_a_process(tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    file.write_text(
        "import itertools\n_calls = itertools.count(1)\ndef reward(*sample): return next(_calls)\n"
    )
    reward = load_reward(f"{file}:reward")
    again = pickle.loads(pickle.dumps(reward))
    assert [reward("", "", "").reward, again("", "", "").reward] == [1.0, 2.0]
