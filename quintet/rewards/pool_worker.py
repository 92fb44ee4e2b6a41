"""The process behind `pool`: scores samples, a line of JSON each. Run as a script with the numbers of the pipe it reads and of the
pipe it writes.

What a reward prints goes to the log that the pool has made of its output; answers have a pipe of their own. Imports no more than a
reward needs: neither torch nor the recipe's schema.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from typing import Any

STACKS = signal.SIGUSR1
"""Has a process write its stacks to its log."""
_MOST_CHARACTERS = 20_000


def main() -> None:
    """Load the reward, say so, and score until the input ends."""
    reading, writing = map(int, sys.argv[1:])
    del sys.argv[1:]
    for pipe in (reading, writing):
        os.set_inheritable(pipe, False)  # what a reward starts has nothing to say here
    faulthandler.register(STACKS, all_threads=True)
    with os.fdopen(reading, "rb") as asked, os.fdopen(writing, "wb") as answered:
        head = json.loads(asked.readline())
        sys.path[:] = head["path"]
        from quintet.errors import UserError
        from quintet.rewards.load import RewardFailure, load_reward
        from quintet.runs.fsync import lossy

        sys.stdout, sys.stderr = lossy(1), lossy(2)  # a full disk costs what a reward prints, and no sample

        def tell(**said: Any) -> None:
            if os.getpid() != me:  # a child that the reward forked and let return
                os._exit(0)
            answered.write(json.dumps(said, allow_nan=False).encode() + b"\n")
            answered.flush()

        me = os.getpid()
        try:
            reward = load_reward(head["function"])
        except UserError as error:
            tell(stop=_words(error))
            return
        tell()
        for line in asked:
            try:
                result = reward(*json.loads(line))
            except RewardFailure as failure:
                text = _words(failure)
                print(text, file=sys.stderr, flush=True)
                tell(result={"reward": 0.0, "failure": text})
            except UserError as error:  # such as a package that is missing: no sample's fault
                tell(stop=_words(error))
            else:
                metrics = {_words(name): value for name, value in result.metrics.items()}
                tell(result=vars(result) | {"metrics": metrics})


def _words(said: object) -> str:
    """Text for people: of bounded length, and without the halves of surrogate pairs that JSON would not take."""
    return str(said)[:_MOST_CHARACTERS].encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()
