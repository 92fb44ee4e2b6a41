"""The process behind `chat_template`: renders conversations, a line of JSON each. Run as a script.

A chat template is a program that came with a model's files: jinja2's sandbox keeps it from touching anything, and this
process from taking all time or memory. Input: {"template", "variables", "processor_s"} on the first line, then a list of
messages a line. Output: for each a text, or {"line", "error"} and the end. A line may take `processor_s` of processor time,
then the kernel ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
MOST_CHARACTERS = 1 << 20


class _Generation(Extension):
    """{% generation %}…{% endgeneration %}, which mark what an assistant said: rendered as what is between them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers compiles chat templates in."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


def main() -> None:
    """Render until the input ends or a template fails."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process that ignores it hands that on
    given = json.loads(sys.stdin.readline())
    try:
        signal.setitimer(signal.ITIMER_PROF, given["processor_s"])
        template = environment().from_string(given["template"])
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, given["processor_s"])
            text = _render(template, json.loads(line), given["variables"])
            signal.setitimer(signal.ITIMER_PROF, 0)  # the time of a full pipe is not the template's
            print(json.dumps(text), flush=True)
    except Exception as error:
        print(json.dumps({"line": _line(error), "error": _said(error)}), flush=True)


def _render(template: jinja2.Template, messages: list[Any], variables: dict[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(
        messages=messages, tools=None, documents=None, **{**variables, "add_generation_prompt": True}
    ):
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise ValueError(f"it makes more than {MOST_CHARACTERS:,} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # half of a surrogate pair is no character
    return text


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    text = f"{error}"[:500]
    return (
        text
        if isinstance(error, jinja2.TemplateError | ValueError) and text
        else f"{type(error).__name__}: {text}"
    )


def _line(error: Exception) -> int | None:
    """Of the template, where it can be told."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    main()
