"""Built-in tasks: right answers verify, wrong ones do not, and no held-out problem is trained on in any guise."""

from __future__ import annotations

import itertools
import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.data.tasks import TASKS, Addition, Countdown, draw_problems, is_held_out, make_task
from quintet.data.tasks.countdown import evaluate
from quintet.errors import UserError
from quintet.recipe.schema import Data

CASES = [
    ("addition", {}),
    ("addition", {"digits": 2, "reverse": 1}),
    ("addition", {"digits": 4, "min_digits": 4, "terms": 3}),
    ("addition", {"digits": 3, "min_digits": 3, "scratchpad": 1}),
    ("countdown", {}),
    ("countdown", {"numbers": 4, "max_number": 20, "max_target": 200}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_own_responses_are_right_and_in_the_alphabet(name: str, options: dict[str, int]) -> None:
    task = make_task(name, options)
    for problem in draw_problems(task, "train", 200, seed=1):
        prompt, response, answer = task.prompt(problem), task.response(problem), task.answer(problem)
        assert set(prompt + response) <= set(task.alphabet)
        assert task.verify(prompt, response, answer) == {"reward": 1.0, "correct": True, "well_formed": 1.0}
        assert task.verify(prompt, response + "1", answer)["reward"] == 0.0
        assert task.verify(prompt, "", answer) == {"reward": 0.0, "correct": False, "well_formed": 0.0}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_split_is_disjoint_under_every_symmetry(name: str, options: dict[str, int]) -> None:
    """The orders of the numbers in a prompt are the tasks' symmetries: strip them here, independently of `canonical`."""
    task = make_task(name, options)

    def essence(prompt: str) -> tuple[str, ...]:
        left, _, target = prompt.rstrip("=").partition(":")
        return (*sorted(left.replace(",", "+").split("+"), key=int), target)

    train = {essence(task.prompt(p)) for p in draw_problems(task, "train", 2000, seed=1)}
    held_out = [essence(task.prompt(p)) for p in draw_problems(task, "eval", 300, seed=2)]
    assert train.isdisjoint(held_out)
    assert len(set(held_out)) == len(held_out) > 30
    assert len(train) > 200


def test_all_orders_of_a_problem_fall_on_one_side() -> None:
    task = Addition(terms=3)
    for problem in ((1, 2, 3), (10, 20, 999), (7, 7, 8)):
        assert len({is_held_out(task.canonical(order)) for order in itertools.permutations(problem)}) == 1


def test_held_out_share_and_reproducibility() -> None:
    task = Addition(digits=2, min_digits=2)
    everything = [task.canonical((a, b)) for a in range(10, 100) for b in range(a, 100)]
    assert sum(map(is_held_out, everything)) / len(everything) == pytest.approx(1 / 8, abs=0.02)
    # Literal: were the hash to depend on the process or the version, results of different runs could not be compared.
    assert [c for c in everything[:40] if is_held_out(c)] == HELD_OUT
    assert draw_problems(task, "train", 50, 3) == draw_problems(task, "train", 50, 3)
    assert draw_problems(task, "train", 50, 3) != draw_problems(task, "train", 50, 4)


HELD_OUT = ["10+12", "10+27", "10+44", "10+46", "10+49"]


def test_a_small_task_gives_what_it_has() -> None:
    task = Addition(digits=1)
    train, held_out = (draw_problems(task, which, 1000, 0) for which in ("train", "eval"))
    assert len(set(train)) == len(train)
    covered = {task.canonical(p) for p in train} | {task.canonical(p) for p in held_out}
    assert len(covered) == 55


def test_addition_options() -> None:
    rng = random.Random(0)
    task = Addition(digits=3, min_digits=2, terms=3, reverse=1)
    for _ in range(50):
        problem = task.sample(rng)
        assert len(problem) == 3
        assert all(10 <= x <= 999 for x in problem)
        assert task.answer(problem) == str(sum(problem))[::-1]
    assert Addition.verify("1+2=", "abc", "3") == {"reward": 0.0, "correct": False, "well_formed": 0.0}
    assert Addition.verify("1+2=", "4", "3") == {"reward": 0.0, "correct": False, "well_formed": 1.0}


@pytest.mark.parametrize(
    ("response", "reward", "well_formed"),
    [
        ("3*5+7", 1, 1),
        (" (3 * 5) + 7 ", 1, 1),
        ("7+5*3", 1, 1),
        ("3*5", 0, 1),
        ("22", 0, 1),  # right value, a number that was not given
        ("5+5+5+7", 0, 1),  # right value, 5 used three times
        ("3*5+7=22", 0, 0),
        ("3**5", 0, 0),
        ("9**9**9", 0, 0),
        ("3//5", 0, 0),
        ("__import__('os')", 0, 0),
        ("3*(5+", 0, 0),
        ("(" * 300 + "3" + ")" * 300, 0, 0),
        ("(" * 99 + "3" + ")" * 99, 0, 1),
        ("-3", 0, 0),
        ("03+5", 0, 0),
        ("３+5", 0, 0),
        ("", 0, 0),
    ],
)
def test_countdown_verifier(response: str, reward: float, well_formed: float) -> None:
    assert Countdown.verify("3,5,7:22=", response, "3,5,7:22") == {
        "reward": reward,
        "correct": reward == 1,
        "well_formed": well_formed,
    }


@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*() ", max_size=250)))
def test_evaluate_agrees_with_python_and_never_raises(text: str) -> None:
    got = evaluate(text)
    if got is not None:
        assert got[0] == eval(text.strip())
    for kind in TASKS.values():
        assert kind.verify("", text, "3,5,7:22")["reward"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("addition", {"digit": 3}, r"'digit'.*digits \(default 3\)"),
        ("addition", {"digits": 0}, "min_digits <= digits"),
        ("addition", {"terms": 1}, "terms must be"),
        ("addition", {"reverse": 2}, "must be 0 or 1"),
        ("addition", {"scratchpad": 1}, "scratchpad needs min_digits = digits"),
        ("countdown", {"numbers": 1}, "numbers must be"),
        ("countdown", {"max_number": 1}, "max_number must be"),
        ("countdown", {"max_target": 3}, "max_target must be"),
    ],
)
def test_bad_options(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task(name, options)


def test_scratchpad_shows_column_sums_and_is_scored_by_its_answer() -> None:
    task = Addition(digits=3, min_digits=3, scratchpad=1)
    assert task.response((964, 494)) == "081514>1458"
    assert task.response((237, 682)) == "091109>0919"
    assert task.answer((983, 969)) == ">1952"
    assert task.verify("", "000000>1458", ">1458") == {"reward": 1.0, "correct": True, "well_formed": 1.0}
    assert task.verify("", "081514>1459", ">1458") == {"reward": 0.0, "correct": False, "well_formed": 1.0}
    for malformed in ("1458", "081514>458", "81514>1458", "081514>1458>1458"):
        assert task.verify("", malformed, ">1458") == {"reward": 0.0, "correct": False, "well_formed": 0.0}


def test_a_recipe_knows_which_tasks_are_built_in() -> None:
    names = get_args(Data.model_fields["task"].annotation)
    assert {name for name in names if Data(task=name).makes_problems} == TASKS.keys()
