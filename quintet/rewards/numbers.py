"""The final answer of a response, and numbers as people write them. Time is linear in the text, whatever it holds."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, NamedTuple

# A final answer stands at the end: what comes before this many characters is not looked at.
LONGEST_TEXT = 16_000
_LONGEST_NUMBER = 64
_MOST_MARKS = 16

_IS = r"(?:\s+(?i:is|equals|would be|will be|must be)\b|\*{0,2}\s*[:=])"
# Every alternative begins with one literal character: the search then skips plain text several times faster.
_MARK = re.compile(rf"####|\\boxed\b|\\fboxed\b|answer{_IS}|Answer{_IS}|ANSWER{_IS}")
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)|;\s")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    # A minus is a sign only where it does not join two things: "16-4", "16 -4", "x-2".
    r"(?P<minus>(?<![\w)\]}])(?<![\d)\]}] )-)?"
    r"(?:(?P<whole>\d{1,9})\s(?=\d{1,9}\s?/\s?\d))?"
    rf"(?P<above>{_DIGITS}(?:\.\d+)?|\.\d+)(?P<clock>(?::\d+)+)?"
    r"(?P<exponent>[eE][+-]?\d{1,3}(?!\d))?"
    rf"(?:\s?/\s?(?P<below>{_DIGITS}))?"
    r"(?P<scale>\s{1,3}(?i:thousand|million|billion|trillion)\b)?",
    re.ASCII,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CHARACTERS = str.maketrans("０１２３４５６７８９．，－−–", "0123456789.,---")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]{0,99})\}")
_TENS = re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|×)\s?10\s?\^\s?\{?(-?\d{1,3})\}?")
_UNIT_POWER = re.compile(r"(?:(?<=[A-Za-z]{2})|(?<=[\W\d][ms]))\s?\^\s?\{?[23]\}?")
COMPARED = re.compile(r"[<>≤≥≠]|\\(?:[lg](?:eq?(?:slant)?|t)|neq?)(?![a-z])")
"""What makes a condition of the number beside it."""
_COMPUTED = re.compile(
    rf"{COMPARED.pattern}|[!|]|\w\s?[+*]|\d\s?-\s?\d|\^(?!\{{?\s?(?:\\circ|th))|"
    r"\\(?:sqrt|log|ln|exp|sin|cos|tan|pi|pm|times|cdot|div)(?![a-z])"
)
"""What makes another number of the one that stands in a box."""
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[\d.,]{1,32})\s*\}\s*\{\s*([\d.,]{1,32})\s*\}|(\d)(\d))")


class FinalAnswer(NamedTuple):
    text: str
    kind: Literal["box", "hash", "said", "end"]
    """\\boxed{…}, "#### …", "the answer is …", or just the end of the response."""


def final_answer(response: str) -> FinalAnswer | None:
    """Return what a response gives as its final answer.

    The last "#### …", "\\boxed{…}" or "the answer is …" counts, and nothing before it. Without any mark it is the last line.

    Returns:
        None where there is none: an empty response, a mark with nothing behind it, a brace that never closes.
    """
    text = response[-LONGEST_TEXT:]
    marks = list(_MARK.finditer(text))
    for mark in reversed(marks[-_MOST_MARKS:]):
        rest = text[mark.end() :]
        if mark.group().endswith("boxed"):
            inside = _braced(rest)
            return FinalAnswer(inside, "box") if inside else None
        if mark.group() == "####":
            line = rest.lstrip(" \t").partition("\n")[0].strip()
            # Otherwise it is a heading, "#### Step 3", and the answer stands somewhere below.
            return FinalAnswer(line, "hash") if re.match(r"[^\w\n]{0,6}\d", line) else _end(rest)
        said = _said(rest)
        if said:
            return said
        # "Tell me if the answer is unclear": says nothing, unless it is all there is.
    return None if marks else _end(text.rstrip().rpartition("\n")[2])


def final_number(response: str) -> Fraction | None:
    """Return the number a response ends up with, or None.

    In "#### …" and "the answer is …" it is the first number (behind the last "="), a box must hold just one and
    nothing that makes another of it (5!, \\sqrt{16}), and an unmarked response gives its last.
    """
    found = final_answer(response)
    if found is None:
        return None
    if found.kind == "end":
        # Without a mark, a last line such as "Hope this helps!" is not the answer.
        unmarked = not _MARK.search(response[-LONGEST_TEXT:])
        numbers = numbers_in(found.text) or (numbers_in(response) if unmarked else [])
        return numbers[-1] if numbers else None
    text = behind_equals(found.text)
    numbers = numbers_in(text)
    if found.kind == "box" and (len(set(numbers)) > 1 or _COMPUTED.search(text)):
        return None
    return numbers[0] if numbers else None


def behind_equals(text: str) -> str:
    """Return what stands behind the last "=" in `text`, plain, with a minus in front joined to its number."""
    return re.sub(r"^-\s+", "-", _plain(text.rpartition("=")[2]).strip())


def to_number(text: str) -> Fraction | None:
    """Return the number that `text` is as a whole, with or without currency, % or a full stop; None if it is anything else."""
    match = _NUMBER.fullmatch(_plain(text).strip().rstrip(".% "))
    return _value(match) if match else None


def numbers_in(text: str) -> list[Fraction]:
    """Return all numbers in `text` in order: 1,234.50, -5, -$5, 3/4, \\frac{3}{4}, 1.5e3, 2 million."""
    values = (_value(match) for match in _NUMBER.finditer(_plain(text)))
    return [value for value in values if value is not None]


def _end(text: str) -> FinalAnswer | None:
    text = text.strip()
    return FinalAnswer(text, "end") if text else None


def _said(rest: str) -> FinalAnswer | None:
    """The answer in what follows "the answer is"; None if nothing that looks like one does."""
    start = re.sub(r"^(?:[\s:=*]|(?:\\\[|\$\$)[ \t]*\n)+", "", rest)
    end = _SENTENCE_END.search(start)
    sentence = (start[: end.start()] if end else start).strip()
    if re.search(r"[\d$\\]|^\W*[A-J]\W*$", sentence):
        return FinalAnswer(sentence, "said")
    return _end(rest) if re.search(r"\d", rest) else None


def _braced(text: str) -> str | None:
    """What stands in the braces `text` begins with, or else its first word; None if they do not close."""
    text = text.lstrip()
    if not text.startswith("{"):
        word = re.match(r"[^\s$]{1,64}", text)
        return word.group() if word else None
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i].strip()
    return None


def _plain(text: str) -> str:
    """`text` without the dress of numbers: currency, LaTeX spacing and fractions, emphasis."""
    text = text[-LONGEST_TEXT:].translate(_CHARACTERS).replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\{,\}|\\[!,]", "", text).replace("**", " ")
    text = _UNIT_POWER.sub("", _TENS.sub(r"e\1", _TEXT.sub(r" \1", text)))
    text = _FRACTION.sub(_slashed, text)
    text = re.sub(r"-\s?[$€£]\s?|[$€£]\s?-", "-", text)
    return re.sub(r"[$€£]\s?", " ", text)


def _slashed(match: re.Match[str]) -> str:
    before = match.string[match.start() - 1 : match.start()]
    return (" " if before.isdigit() else "") + f"{match[1] or match[3]}/{match[2] or match[4]} "


def _value(match: re.Match[str]) -> Fraction | None:
    """Exact value; None for a time such as 3:30, and for what no one writes as an answer (hundreds of digits, a zero below the line)."""
    if len(match.group()) > _LONGEST_NUMBER or (match["clock"] or "").strip(":0"):
        return None
    value = Fraction(match["above"].replace(",", "") + (match["exponent"] or ""))
    if match["below"]:
        below = int(match["below"].replace(",", ""))
        if below == 0:
            return None
        value = value / below + int(match["whole"] or 0)
    if match["scale"]:
        value *= _SCALES[match["scale"].strip().lower()]
    return -value if match["minus"] else value
