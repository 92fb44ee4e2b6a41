"""The process behind `math_process`: answers lines of JSON [gold, answer] by "1", "0", or "x" where it could not tell. Run
as a script.

It imports math-verify once and forks a child that answers. A question may take `PROCESSOR_S` of processor time: then the
kernel ends the child, whatever C call it is in, and another is forked in milliseconds. Processor time, not a clock's: a busy
machine loses no answers.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

PROCESSOR_S = 0.2
MEMORY_BYTES = 2 << 30

# What is made at first use (tables of the grammar, modules of sympy) is made before there is a child.
_FIRST = [
    ("\\frac{1}{2}+\\sqrt{3}", "\\frac{\\sqrt{12}+1}{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("a^{3}b^{7}", "b^{7}a^{3}"),
    ("\\{1,2\\}", "\\{2,3\\}"),
    ("(1,2)", "(1,2,3)"),
    ("[1,2]", "(1,2]"),
    ("x \\in (-\\infty,1) \\cup (2,\\infty)", "(-\\infty,1) \\cup [2,\\infty)"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}"),
    ("y=2x+1", "y = 1 + 2 x"),
    ("2x < 3", "x \\le \\frac{3}{2}"),
    ("\\sin 2 x", "\\cos 3x"),
    ("\\log_{2} 3", "\\frac{\\ln 3}{\\ln 2}"),
    ("e^{2x}-1", "\\exp(2x) - 1"),
    ("\\binom{5}{2}", "5!"),
    ("\\frac{3\\pi}{4}", "135^\\circ"),
    ("1+2i", "2i+1"),
]

Verify = Callable[[str, str], bool]


def main() -> None:
    """Load math-verify, say so by an empty line, then have children answer until the input ends."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(4300)
    verify = _math_verify()
    for gold, answer in _FIRST:
        with suppress(Exception):
            verify(gold, answer)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process that ignores it hands that on
    gc.freeze()  # a collection would touch, and so copy, every page that a child shares
    asked = mmap.mmap(-1, 1)  # 1 while a child owes an answer
    print(flush=True)
    while True:
        child = os.fork()
        if child == 0:
            _answer(verify, asked)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        if asked[0]:
            asked[0] = 0
            print("x", flush=True)


def _math_verify() -> Verify:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]

    def equal(gold: str, answer: str) -> bool:
        # Its own time limits are signals that Python handles between two of its instructions: too late in a long C call.
        sides = [
            parse(f"${text}$", extraction_config=configs, parsing_timeout=None, raise_on_error=False)
            for text in (gold, answer)
        ]
        return bool(all(sides) and verify(sides[0], sides[1], timeout_seconds=None, raise_on_error=False))

    return equal


def _answer(verify: Verify, asked: mmap.mmap) -> None:
    """Answer until the input ends."""
    while line := sys.stdin.buffer.readline():
        asked[0] = 1
        # The timer's signal has no handler, and so ends the process.
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        try:
            result = verify(*json.loads(line))
        except Exception:
            result = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        asked[0] = 0
        print(int(result), flush=True)


if __name__ == "__main__":
    main()
