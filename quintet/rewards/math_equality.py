"""Whether expressions are equal as mathematics: math-verify, in a child process that answers.

Here it would bring its limits along: its timeouts are signals (main thread only), `9**9**9` in a response stops the
interpreter inside one C call that no signal interrupts, and its logging is loud. The child is forked once all is loaded. A
question may take `PROCESSOR_S` of processor time: then the kernel ends the child, whatever C call it is in, and another is
forked in milliseconds. Processor time, not a clock's: a busy machine loses no answers. Rewards are scored in processes without
threads (`quintet.rewards.pool`), which may fork.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import psutil

PROCESSOR_S = 0.2
TIMEOUT_S = 10.0
"""By the clock, for a child that has no processor time to be ended by."""
MEMORY_BYTES = 2 << 30
"""What the child may take beside what this process holds."""

# What is made at first use (tables of the grammar, modules of sympy) is made before there is a child to pay for it.
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
_EQUAL, _OTHER = b"1", b"0"


class _Child:
    """A process that answers, forked at the first question and again after it had to be ended."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._questions: Connection

    def ask(self, gold: str, answer: str) -> bool | None:
        """Whether the two are equal; None if it cannot tell in time."""
        if self.pid is None or os.waitpid(self.pid, os.WNOHANG)[0]:
            self._fork(_math_verify())
        with suppress(EOFError, OSError):
            self._questions.send_bytes(json.dumps([gold, answer]).encode())
            if self._questions.poll(TIMEOUT_S):
                return self._questions.recv_bytes(len(_EQUAL)) == _EQUAL
        self.end()
        return None

    def end(self) -> None:
        """End it, if there is one."""
        pid, self.pid = self.pid, None
        if pid is not None:
            self._questions.close()
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _fork(self, verify: Verify) -> None:
        ours, its = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):
                ours.close()
                _answer(verify, its)
            os._exit(0)
        its.close()
        self._questions = ours


def _answer(verify: Verify, questions: Connection) -> None:
    """Answer until nobody asks any more."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(4300)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    held = psutil.Process().memory_info().vms
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process that ignores it hands that on
    gc.freeze()  # a collection would touch, and so copy, every page that the two share
    while True:
        question = json.loads(questions.recv_bytes())
        # The timer's signal has no handler, and so ends the process.
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        try:
            equal = verify(*question)
        except Exception:
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        questions.send_bytes(_EQUAL if equal else _OTHER)


@cache
def _child(pid: int) -> _Child:
    """That of this process: one that was forked must not talk on its parent's pipes."""
    atexit.register((child := _Child()).end)
    return child


@lru_cache(maxsize=4096)
def equivalent(gold: str, answer: str) -> bool | None:
    """Return whether two expressions (LaTeX or plain) are equal as mathematics; None where that takes too long to tell.

    Cached: samples of one prompt repeat their answers. Loading takes seconds, a question milliseconds.
    """
    return _child(os.getpid()).ask(gold, answer)


@cache
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

    loud = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    for gold, answer in _FIRST:
        with suppress(Exception):
            equal(gold, answer)
    logging.disable(loud)
    return equal
