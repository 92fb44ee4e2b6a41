"""Rewards are found by name, module or file; a user's mistakes come back in words, with the place and the sample."""

from __future__ import annotations

import pickle
import re
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


@pytest.mark.parametrize(("name", "answer"), [("addition", "2"), ("countdown", "1,1:2"), ("gsm8k", "2")])
def test_built_in_says_what_is_correct(name: str, answer: str) -> None:
    right, wrong = (load_reward(name)("", text, answer) for text in ("1+1" if ":" in answer else "2", "3"))
    assert (right.reward, right.correct, wrong.reward, wrong.correct) == (1, True, 0, False)
    assert load_reward("length")("", "", "").correct is None


@pytest.mark.parametrize(
    ("returned", "correct"),
    [
        ("5", None),
        ("True", None),
        ("{'reward': 0.5}", None),
        ("{'reward': 0.5, 'correct': False}", False),
        ("{'reward': -1, 'correct': 1}", True),
        ("{'reward': -1, 'correct': __import__('numpy').bool_(True)}", True),
    ],
)
def test_correct_is_what_the_function_says_and_no_guess(
    tmp_path: Path, returned: str, correct: bool | None
) -> None:
    result = load_reward(reward_file(tmp_path, f"def reward(p, r, a):\n    return {returned}"))("", "", "")
    assert result.correct is correct
    assert result.metrics == {}


def documented() -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    rows = re.findall(r"^\| (`\w+` \| .*) \|$", text.partition("## Built-in rewards")[2], re.MULTILINE)
    return [cells for row in rows if len(cells := row.split(" | ")) == 5]


def test_the_guide_says_what_built_in_rewards_accept() -> None:
    told = {name.strip("`"): [cell[1:-1] for cell in cells] for name, _, *cells in documented()}
    assert set(told) == set(BUILT_IN) - {"length"}
    for name, (answer, right, wrong) in told.items():
        reward = load_reward(name)
        assert [reward("", text, answer).correct for text in (right, wrong)] == [True, False], name


def test_example() -> None:
    reward = load_reward(f"{EXAMPLE}:reward")
    right, wrong, long = (reward("2+2?", text, "4") for text in ("4", "5", "4 " + "because " * 100))
    assert right.reward > long.reward > wrong.reward
    assert (right.correct, long.correct, wrong.correct) == (True, True, False)
    assert set(right.metrics) == {"words"}


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
        ("import sys\nsys.exit(0)", r"importing .*mine\.py failed with SystemExit: 0"),
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
        ("None", "returned None; expected a number, finite and below 1e18"),
        ("'1.0'", "returned '1.0'; expected a number"),
        ("float('nan')", "returned nan"),
        ("float('inf')", "returned inf"),
        ("[1, 2]", r"returned \[1, 2\]"),
        ("{'score': 1}", "a dict without \"reward\", with 'score'"),
        ("{'reward': None}", "returned None"),
        ("{'reward': 1, 'note': 'good'}", "returned 'good' as 'note'"),
        ("{'reward': 1, 'correct': 0.5}", 'returned 0.5 as "correct"; expected True or False'),
        ("{'reward': 1, 'mean': 2}", "returned a number called 'mean'.*name it otherwise"),
        ("10 ** 400", "returned 1000"),
        ("1e18", r"returned 1e\+18; expected a number, finite and below 1e18"),  # squares overflow fp32
        ("{'reward': 1, 'size': -1e308}", r"returned -1e\+308 as 'size'"),
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
    for shape in ("(response)", "(a, b, c, d)", "()"):
        with pytest.raises(UserError, match=r"mine\.py:1: it takes .*def reward\(prompt, response, answer\)"):
            load_reward(reward_file(tmp_path, f"def reward{shape}: return 1"))


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        ("prompt, response, answer", ("p", "r", "a", None)),
        ("prompt, response", ("p", "r", None, None)),
        ("prompt, response, answer=None, weight=0.5", ("p", "r", "a", None)),
        ("prompt, response, answer, row", ("p", "r", "a", {"level": 3})),
        ("prompt, response, *, row", ("p", "r", None, {"level": 3})),
    ],
)
def test_a_function_gets_what_it_takes(tmp_path: Path, shape: str, got: tuple) -> None:
    body = f"def reward({shape}):\n    SEEN.append((prompt, response, locals().get('answer'), locals().get('row')))\n    return 1"
    reward = load_reward(reward_file(tmp_path, f"SEEN = []\n{body}"))
    reward("p", "r", "a", {"level": 3})
    assert reward.function.__globals__["SEEN"] == [got]
    assert reward.takes.answer == (got[2] is not None)
    assert not load_reward("length").takes.answer
    assert load_reward("math").takes.answer


@pytest.mark.parametrize(
    ("body", "turned"),
    [
        (
            "def correct(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]",
            "return correct(prompts=[prompt], completions=[response], answer=[answer])[0]",
        ),
        (
            "def correct(completions, solution): return [float(c == a) for c, a in zip(completions, solution)]",
            "return correct(completions=[response], solution=[row['solution']])[0]",
        ),
        (
            "def correct(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)",
            "return correct(solution_str=response, ground_truth=answer, data_source=row['data_source'])",
        ),
        (
            "def correct(solution_str, ground_truth, method='strict', score=1.0): return score * (solution_str == ground_truth)",
            "return correct(solution_str=response, ground_truth=answer)",
        ),
    ],
)
def test_other_libraries_shapes_are_told_how_to_turn(tmp_path: Path, body: str, turned: str) -> None:
    """The sentence is tried as well: what it says to write works."""
    reward_file(tmp_path, body)
    with pytest.raises(UserError, match=r"mine\.py:1: correct has .*'s shape.*Turn it by") as caught:
        load_reward(f"{tmp_path / 'mine.py'}:correct")
    assert turned in str(caught.value)
    head = re.search(r"def reward\(.*?\):", str(caught.value))
    assert head is not None
    ours = load_reward(reward_file(tmp_path, f"{body}\n{head[0]} {turned}", "ours.py"))
    assert [
        ours("p", response, "4", {"solution": "4", "data_source": "mine"}).reward for response in ("4", "5")
    ] == [1, 0]


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    body = "import math\n\ndef reward(p, r, a):\n    if r == 'raise':\n        return math.sqrt(-1)\n    return None"
    reward = load_reward(reward_file(tmp_path, body))
    with pytest.raises(UserError, match=r"\(\S+mine\.py:5\) raised ValueError") as caught:
        reward("", "raise", "")
    assert re.findall(r'File "(.*?)"', str(caught.value)) == [str(tmp_path / "mine.py")]
    with pytest.raises(UserError, match=r"\(\S+mine\.py:3\) returned None.*end in `return`"):
        reward("", "", "")
    with pytest.raises(UserError, match=r"mine\.py:1: it is `async`"):
        load_reward(reward_file(tmp_path, "async def reward(p, r, a): return 1.0", "other_mine.py"))


def test_a_file_is_executed_once_a_process(tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    file.write_text(
        "import itertools\n_calls = itertools.count(1)\ndef reward(*sample): return next(_calls)\n"
    )
    reward = load_reward(f"{file}:reward")
    again = pickle.loads(pickle.dumps(reward))
    assert [reward("", "", "").reward, again("", "", "").reward] == [1.0, 2.0]
