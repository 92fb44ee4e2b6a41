"""The command line: `quintet COMMAND RECIPE.yaml [key=value ...]`, one thin file a command.

Nothing heavy is imported before a command has read its recipe: `--help` and what rules refuse stay instant.
Exit codes: 0 done, 1 a bug, 2 something for the user to put right, 3 a worker failed, 4 what was compared
differs (verify-resume, diagnose), 5 a rollout has other weights than the trainer, 6 their log-probs part (mismatch.stop_above_kl),
130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from quintet import install
from quintet.cli import (
    chat,
    check,
    convert,
    diagnose,
    eval,
    generate,
    plan,
    push,
    report,
    sft,
    train,
    verify_resume,
)
from quintet.cli.command import Command
from quintet.errors import QuintetError
from quintet.runs.stop import Terminated, interruptible

_MODULES = (train, sft, generate, chat, eval, check, plan, verify_resume, convert, diagnose, report, push)
COMMANDS: dict[str, Command] = {one.COMMAND.name: one.COMMAND for one in _MODULES}

# tensordict asks torch whether it is being traced, and torch 2.13 then warns, once a process, of something that
# concerns neither us nor the user. Nothing else of that logger is dropped.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not str(record.msg).startswith("is_fx_tracing will return true")
)

_HEAD = """\
usage: quintet COMMAND RECIPE.yaml [key=value ...] [options]

Reinforcement-learning post-training of language models, from a laptop to a cluster.

commands:
"""
_TAIL = """
A recipe is a YAML file; any of its keys can be set on the command line: train.steps=10
`quintet COMMAND --help` says more and gives examples; `quintet --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(
            _HEAD + "".join(f"  {name:<15}{one.summary}\n" for name, one in COMMANDS.items()) + _TAIL, end=""
        )
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"quintet {install.version() or '(from a source tree, not installed)'}")
        return 0
    if arguments[0] not in COMMANDS:
        return _complain(f"there is no command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}", 2)
    return _run(COMMANDS[arguments[0]], arguments[1:])


def _run(command: Command, arguments: list[str]) -> int:
    try:
        with interruptible():
            code = command.run(command.parse(arguments))
        sys.stdout.flush()
        return code
    except QuintetError as error:
        return _complain(str(error), error.exit_code)
    except Terminated:
        return _complain("ended by SIGTERM", 143)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away (`quintet check R.yaml | head`): nothing to say, and no one to say it to.
        return _unread(sys.stdout, 1)


def _complain(message: str, code: int) -> int:
    word = "quintet:" if code in (130, 143) else "error:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        word = f"\033[1;31m{word}\033[0m"
    try:
        print(f"{word} {message}", file=sys.stderr)
    except BrokenPipeError:  # of `2>&1 | tee`, which Ctrl-C has ended
        return _unread(sys.stderr, code)
    return code


def _unread(out: TextIO, code: int) -> int:
    """Drop what nobody reads: Python would end with another code for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return code
