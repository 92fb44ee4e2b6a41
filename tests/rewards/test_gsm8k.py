"""The GSM8K verifier on every gold answer, in every form people and models write them; right, and off by one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.rewards.numbers import LONGEST_TEXT, numbers_in, to_number
from quintet.rewards.verifiers import gsm8k, math
from tests.examples import examples

# One gold answer of each kind that occurs, so that this file says something without the data set.
GOLD_FIXTURE = ["18", "3", "0", "-5", "1,234", "70,000", "2,125,000", "1234567", "0.5", "12.25"]


def gold_answers() -> list[str]:
    folder = Path(os.environ.get("QUINTET_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    path = folder / "gsm8k_test.jsonl"
    if not path.is_file():
        pytest.skip(
            f"no {path}: set QUINTET_DATA to the folder with gsm8k_test.jsonl to check all 1,319 answers"
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1319
    return [row["answer"].rpartition("####")[2].strip() for row in rows]


def forms(gold: str) -> list[str]:
    """Responses whose final answer is `gold`."""
    plain = gold.replace(",", "")
    whole, _, decimals = plain.lstrip("-").partition(".")
    sign = "-" if plain.startswith("-") else ""
    commas = f"{sign}{int(whole):,}" + (f".{decimals}" if decimals else "")
    latex_commas = commas.replace(",", "{,}")
    dollars = f"-${commas[1:]}" if sign else f"${commas}"
    two = f"{float(plain):.2f}"
    return [
        plain,
        commas,
        two,
        f"{float(plain):,.2f}",
        f"#### {gold}",
        f"#### {plain}",
        f"Work: 7 * 8 = 56 and 5 more.\n#### {commas}",
        f"####{plain}\n",
        f"#### ${plain}" if not sign else f"#### -${plain[1:]}",
        f"#### {plain} dollars",
        f"#### **{plain}**",
        f"\\boxed{{{plain}}}",
        f"So 7 * 8 = 56, which is $\\boxed{{{commas}}}$.",
        f"$$\\boxed{{{latex_commas}}}$$",
        f"\\boxed{{\\${plain}}}" if not sign else f"\\boxed{{-\\${plain[1:]}}}",
        f"\\boxed{{{plain} \\text{{ dollars}}}}",
        f"\\boxed{{x = {plain}}}",
        f"\\boxed{{\\text{{{plain}}}}}",
        f"\\boxed{{{plain}\\%}}",
        f"The answer is {plain}",
        f"The answer is {plain}.",
        f"The answer is {dollars}.",
        f"The answer is ${plain}$.",
        f"The final answer is: $\\boxed{{{plain}}}$. I hope it is correct.",
        f"The answer is 3 + 4 + 5 = {commas}.",
        f"the ANSWER is **{plain}**.",
        f"**Answer:** {commas} dollars",
        f"Answer: {two}",
        f"Final answer = {plain}\nThat took 2 steps.",
        f"The answer is:\n\n{plain}",
        f"{plain} dollars",
        f"{dollars}",
        f"She has 4 and 5, so she makes {commas} dollars every day.",
        f"She makes {dollars} in all.\nHope this helps!",
        f"\\boxed{{99999}} was too much.\n\\boxed{{{plain}}}",
        f"#### 99999\n#### {plain}",
    ] + (
        [f"\\boxed{{\\frac{{{2 * int(plain)}}}{{2}}}}", f"#### {2 * int(plain)}/2"]
        if not (decimals or sign)
        else []
    )


def off_by_one(gold: str) -> list[str]:
    """The same answer, one more and one less, written with as many decimals."""
    plain = gold.replace(",", "")
    places = len(plain.partition(".")[2])
    return [f"{float(plain) + step:.{places}f}" for step in (1, -1)]


def check(gold: str) -> None:
    for response in forms(gold):
        assert gsm8k("", response, gold) == 1.0, (gold, response)
    for wrong in off_by_one(gold):
        for response in forms(wrong):
            assert gsm8k("", response, gold) == 0.0, (gold, response)
            # The right number earlier in the text does not help a wrong final answer.
            assert gsm8k("", f"First we get {gold}.\nThen {gold}.\n" + response, gold) == 0.0, (
                gold,
                response,
            )
            if "nswer" in response or "oxed" in response or "####" in response:
                assert gsm8k("", f"\\boxed{{{gold}}} #### {gold}\n" + response, gold) == 0.0, (gold, response)


@pytest.mark.parametrize("gold", GOLD_FIXTURE)
def test_forms(gold: str) -> None:
    check(gold)


def test_all_gold_answers() -> None:
    for gold in sorted(set(gold_answers())):
        check(gold)


def test_all_gold_responses_as_they_stand() -> None:
    """The data set's own worked answers, and `math` on them too."""
    for gold in gold_answers():
        for reward in (gsm8k, math):
            assert reward("", f"Some work.\n#### {gold}", gold) == 1.0
            assert reward("", f"It is \\boxed{{{gold}}}.", gold.replace(",", "")) == 1.0


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("", "18"),
        ("I do not know.", "18"),
        ("####", "18"),
        ("18 is what we know.\n####", "18"),
        ("\\boxed{18", "18"),  # cut off: it may have become 180
        ("\\boxed{}", "18"),
        ("\\boxed{17, 18}", "18"),
        ("\\boxed{18 or 19}", "18"),
        ("The answer is 17 or 18.", "18"),
        ("The answer is 1 2 3 18", "18"),
        ("It is 18.\nThe answer is seventeen.", "18"),
        ("It is 18.\n#### seventeen", "18"),
        ("#### 17 18", "18"),
        ("180", "18"),
        ("118", "18"),
        ("1.8", "18"),
        ("0.18", "18"),
        ("18.5", "18"),
        ("18e2", "18"),
        ("-18", "18"),
        ("18 million", "18"),
        ("1,18", "1"),
        ("18/5", "18"),
        ("18/0", "18"),
        ("\\frac{18}{5}", "18"),
        ("2\\frac{1}{2}", "21/2"),
        ("She arrives at 3:30 PM", "30"),
        ("The answer is 3:30 PM.", "3"),
        ("The answer is 18 1/2.", "18"),
        ("#### - 18", "18"),
        ("18", "no number"),
        ("18", ""),
    ],
)
def test_wrong(response: str, gold: str) -> None:
    assert gsm8k("", response, gold) == 0.0


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("\\boxed{2\\frac{1}{2}}", "2.5"),
        ("\\boxed{-2 \\frac12}", "-2.5"),
        ("The answer is 2 1/2.", "2.5"),
        ("The answer is 5:00 PM.", "5"),
        ("\\boxed{- 18}", "-18"),
        ("The answer is –5.", "-5"),
        ("The answer is:\n\\[\n18\n\\]", "18"),
        ("The answer is\n$$\n6 \\times 3 = 18\n$$", "18"),
        ("18", "6 * 3 = <<6*3=18>>18\n#### 18"),
        ("#### 2 million", "2000000"),
        ("The answer is 3/4.", "0.75"),
        ("\\boxed{\\dfrac{3}{4}}", "3/4"),
        ("\\boxed{18}\nTell me if the answer is unclear!", "18"),
        ("#### Step 1: double\nTwice 9 is 18.", "18"),
        ("20 - 2 = 18", "18"),
        ("so we take 20 -2", "2"),
        ("The answer is −5.", "-5"),
        ("The answer is $-5$.", "-5"),
        ("1.8e1", "18"),
        ("The answer is 18 instead of 17.", "18"),
        (
            "The answer is 18. Wait, actually it is 17.",
            "18",
        ),  # words are not weighed: a mark says what counts
        ("The answer is 17. Wait, the answer is 18.", "18"),
        ("1 + 1 = 2\nThe answer is 18!", "18"),
    ],
)
def test_right(response: str, gold: str) -> None:
    assert gsm8k("", response, gold) == 1.0


@pytest.mark.parametrize(
    "box",
    [
        "18!", "\\sqrt{18}", "|-18|", "18-18", "18 + 18", "18*18", "18 \\times 18", "18\\pi", "\\log 18",
        "18^{18}", "18 + x", "x \\le 18", "> 18", "≥ 18", "\\ne 18", "x \\geqslant 18", "18:30", "18=9+9", "- 18", "18\\text{ million}",
        "18 \\times 10^3", "18 x^2",
    ],
)  # fmt: skip
def test_boxes_with_another_number_than_the_one_that_stands_in_them(box: str) -> None:
    assert gsm8k("", f"\\boxed{{{box}}}", "18") == 0.0


@pytest.mark.parametrize(
    "box",
    [
        "1800 \\text{ ft}^2", "1800\\text{ cm}^{3}", "1800\\,\\mathrm{m}^2", "1800\\ \\text{m/s}^2",
        "1800 ft^2", "1800^\\circ", "1.8 \\times 10^3", "1.8\\cdot 10^{3}", "1.8\\text{ thousand}",
        "1.8 Thousand", "１８００", "1800:00", "+1800",
    ],
)  # fmt: skip
def test_boxes_with_units_powers_and_other_scripts(box: str) -> None:
    assert gsm8k("", f"\\boxed{{{box}}}", "1800") == 1.0


@settings(max_examples=examples(200))
@given(
    st.one_of(
        st.text(max_size=300),
        st.text(alphabet="0123456789.,-/eE$%#*=\\{} \n", max_size=300),
        st.lists(
            st.sampled_from(
                [
                    "####",
                    "\\boxed{",
                    "}",
                    "{",
                    "answer is ",
                    "Answer:",
                    "18",
                    "\\frac",
                    "{1}{0}",
                    "$",
                    "\n",
                    "wait ",
                    "-",
                    "1e999",
                ]
            ),
            max_size=40,
        ).map("".join),
    ),
    st.sampled_from(["18", "", "x", "1/0"]),
)
def test_never_raises(text: str, gold: str) -> None:
    assert gsm8k(text, text, gold) in (0.0, 1.0)
    assert gsm8k("", "18", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    "unit",
    [
        "9", "1,", "1,111", "{", "}", "\\boxed{", "\\boxed", "answer is ", "answer is 1", "answer:", "answer  ", "####", "####\n",
        "\\frac{", "\\frac{1}{", "$", "$-", "-", "- ", "1/", "1e9", "\\(", "\\text{", "wait 1 ", " ", "\n", ". ", "*", "\\", "(", "\u0661", "\U0001f600",
        "1:", "1 1/", "\\text{ft}", "ft^2", "^ ", "1\\times 10^", "answer is \\[\n", "＄１，",
    ],
)  # fmt: skip
def test_time_is_bounded_on_long_text(unit: str) -> None:
    text = unit * (2 * LONGEST_TEXT // len(unit)) + "\\boxed{" + unit * LONGEST_TEXT
    math("", "\\boxed{x+1}", "y")  # loads what it needs
    start = time.process_time()
    for response in (text, text + "}", "answer is " + text):
        assert gsm8k("", response, "18") in (0.0, 1.0)
        math("", response[: LONGEST_TEXT // 2], "18")
    assert time.process_time() - start < 2


def test_numbers() -> None:
    assert [str(n) for n in numbers_in("-5, 1,234.50 and -$2; 16-4, .5 3/4 1.5e3 2 thousand 7%")] == [
        "-5", "2469/2", "-2", "16", "4", "1/2", "3/4", "1500", "2000", "7",
    ]  # fmt: skip
    assert to_number(" $1,234. ") == 1234
    assert to_number("18 dollars") is None
    assert to_number("9" * 5000) is None
    assert to_number("٣") is None
