"""The process behind `math_process`: answers lines of JSON [gold, answer] by "1" or "0". Run as a script.

It bounds itself too, for the case that no one is left to end it: a processor-time limit a question, a memory limit, and it
ends with its input.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from contextlib import suppress

MEMORY_BYTES = 4 << 30
PROCESSOR_S = 10


def main() -> None:
    """Load math-verify, say so by an empty line, then answer until the input ends."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(4300)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]

    def equal(gold: str, answer: str) -> bool:
        # Its own time limits are signals of the main thread; the process that asks keeps the time here.
        sides = [
            parse(f"${text}$", extraction_config=configs, parsing_timeout=None, raise_on_error=False)
            for text in (gold, answer)
        ]
        return bool(all(sides) and verify(sides[0], sides[1], timeout_seconds=None, raise_on_error=False))

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(flush=True)
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(usage.ru_utime + usage.ru_stime)
        with suppress(ValueError, OSError):
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (spent + PROCESSOR_S, hard))
        try:
            result = equal(*json.loads(line))
        except Exception:
            result = False
        print(int(result), flush=True)


if __name__ == "__main__":
    main()
