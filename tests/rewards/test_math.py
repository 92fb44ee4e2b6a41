"""The `math` reward: numbers by our own comparison, the rest by math-verify in a process that cannot hang us."""

from __future__ import annotations

import os
import signal
import time

import pytest

from quintet.rewards import math_equality
from quintet.rewards.verifiers import exact_match, length, math


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The answer is 18.", "18"),
        ("\\boxed{18.0}", "$18$"),
        ("\\boxed{18}", "The result is \\boxed{18}"),
        ("so it is $1,234$", "1234"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{\\dfrac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{\\text{blue}}", "blue"),
        ("The answer is (B).", "(B)"),
        ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}"),
        ("\\boxed{(x+1)^2}", "x^2+2x+1"),
        ("\\boxed{2^3}", "8"),
        ("\\boxed{\\sqrt{16}}", "4"),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
        ("The answer is $x = 5$.", "5"),
        ("\\boxed{x = 18}", "18"),
        ("\\boxed{\\$18.00}", "18"),
        ("\\boxed{18 \\%}", "18"),
        ("The answer is => 18", "18"),
        ("\\boxed{\\frac{\\pi}{4}}", "\\frac{1}{4}\\pi"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("\\boxed{1.8e3}", "1800"),
        ("\\boxed{- 18}", "-18"),
        ("\\boxed{1.5\\text{ million}}", "1500000"),
        ("The answer is:\n\\[\n18\n\\]", "18"),
    ],
)
def test_equal(response: str, gold: str) -> None:
    assert math("", response, gold) == 1.0


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The answer is 17.", "18"),
        ("It was 18.\nThe answer is 17.", "18"),
        ("\\boxed{18x}", "18"),
        ("\\boxed{> 18}", "18"),
        ("\\boxed{x > 18}", "18"),
        ("\\boxed{18 < x}", "18"),
        ("\\boxed{\\geq 18}", "18"),
        ("\\boxed{\\ne 18}", "18"),
        ("\\boxed{\\sqrt{16}}", "16"),
        ("\\boxed{2^3}", "2"),
        ("\\boxed{|-18|}", "-18"),
        ("\\boxed{- 18}", "18"),
        ("\\boxed{\\frac{1}{3}}", "0.5"),
        ("\\boxed{x^2+1}", "x^2+2x+1"),
        ("\\boxed{x^2+2x+1} or \\boxed{x}", "x^2+2x+1"),
        ("\\boxed{\\text{red}}", "blue"),
        ("\\boxed{(2, 1)}", "(1,2)"),
        ("\\boxed{", "1"),
        ("", ""),
        ("x", ""),
        ("\\boxed{__import__('os').getpid()}", "\\sqrt{2}"),
    ],
)
def test_not_equal(response: str, gold: str) -> None:
    assert math("", response, gold) == 0.0


def test_pathological_expressions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower of powers stops its interpreter for good: it costs a time limit and a new process, not the run."""
    monkeypatch.setattr(math_equality, "TIMEOUT_S", 0.5)
    math_equality.equivalent.cache_clear()
    assert math_equality.equivalent("\\sqrt{12}", "2\\sqrt{3}")
    start = time.perf_counter()
    for tower in ("9^{9^{9^{9}}}", "(9^{9})!^{9^9}", "9**9**9**9", "{" * 400 + "}" * 400):
        assert math("", f"\\boxed{{{tower}}}", "\\sqrt{12}") == 0.0
    assert math("", "\\boxed{2\\sqrt{3}}", "\\sqrt{12}") == 1.0
    assert time.perf_counter() - start < 60


def test_a_dead_child_is_replaced_and_none_is_left() -> None:
    math_equality.equivalent.cache_clear()
    assert math_equality.equivalent("\\sqrt{12}", "2\\sqrt{3}")
    child = math_equality._child(os.getpid())
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert math_equality.equivalent("\\sqrt{20}", "2\\sqrt{5}")
    second = child.pid
    assert second not in (None, first)
    # It ends with its questions, so it cannot outlive a process that was killed.
    child._questions.close()
    assert os.waitpid(second, 0) == (second, 0)
    child.pid = None


def test_exact_match_and_length() -> None:
    assert exact_match("", " a b\n", "a b") == 1.0
    assert exact_match("", "a  b", "a b") == 0.0
    assert length("", "x" * 100) == 0.5
    assert length("", "x") > length("", "xx")
