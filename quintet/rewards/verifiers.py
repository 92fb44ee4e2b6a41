"""Built-in rewards: 1 for a right final answer, 0 for any other text. None of them raises, whatever the response."""

from __future__ import annotations

import re

from quintet.rewards.math_equality import equivalent
from quintet.rewards.numbers import COMPARED, behind_equals, final_answer, final_number, numbers_in, to_number

_LONGEST_EXPRESSION = 512


class TimedOut(float):
    """The reward 0 of a response that took too long to be scored, so that it can be counted."""


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response is the answer, up to blanks around it."""
    return float(response.strip() == answer.strip())


def length(prompt: str, response: str) -> float:
    """Return a number between 0 and 1, and larger the shorter the response: 100 / (100 + characters). For trying things out."""
    return 100 / (100 + len(response))


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response's final number equals the answer exactly: "#### 18", "\\boxed{18}", "The answer is $18.00."

    See `numbers.final_number` for what counts as final. An answer that is no number never matches.
    """
    gold = to_number(answer.rpartition("####")[2])
    return float(gold is not None and final_number(response) == gold)


def math(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response's final answer is mathematically equal to the answer (text or LaTeX).

    Plain numbers and equal texts are compared at once and exactly; the rest goes to the math-verify library, in a
    process of its own that is ended after 0.2 s of processor time (then `TimedOut`, which is 0).
    """
    marked = final_answer(answer) if re.search(r"\\f?boxed|####", answer) else None
    gold = marked.text if marked else answer.strip()
    found = final_answer(response)
    if not gold or found is None:
        return 0.0
    gold_number = to_number(gold)
    if gold_number is not None and found.kind == "box" and COMPARED.search(found.text):
        return 0.0  # math-verify would leave the sign out of "> 18"
    if gold_number is not None and _is_plain(found.text):
        if found.kind == "end":
            return float(final_number(response) == gold_number)
        numbers = set(numbers_in(behind_equals(found.text)))
        if len(numbers) <= 1:
            return float(numbers == {gold_number})
    expression = _expression(found.text)
    if _bare(expression) == _bare(_expression(gold)):
        return 1.0
    if max(len(expression), len(gold)) > _LONGEST_EXPRESSION:
        return 0.0
    equal = equivalent(_expression(gold), expression)
    return TimedOut() if equal is None else float(equal)


def _is_plain(text: str) -> bool:
    """Whether numbers in `text` stand for themselves: no roots, powers, products, variables glued to them."""
    text = re.sub(r"\\(?:text|mathrm|mathbf)\s*\{[^{}]*\}|\\[dtc]?frac|\\[$%!,;: ()\[\]]|\*\*", "", text)
    text = re.sub(r"\{([-\d.,]*)\}", r"\1", text)
    return not re.search(r"[\\^_*+!|{}()\[\]]|\d(?![eE][+-]?\d)[A-Za-z]|[A-Za-z](?<!\d[eE])\d", text)


def _expression(text: str) -> str:
    """The last formula between dollars or \\( \\) in `text`, or all of it."""
    formulas = re.findall(r"\$([^$]{1,512})\$|\\\(((?:[^\\]|\\[^()]){1,512}+)\\\)", text)
    return (formulas[-1][0] or formulas[-1][1] if formulas else text).strip().rstrip(".").strip()


def _bare(text: str) -> str:
    """`text` without what makes no difference in LaTeX."""
    text = re.sub(r"\\(?:left|right|displaystyle|!|,|;|:| )|[\s$]", "", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\[dtc]frac", r"\\frac", text)
