"""Verbs that reach a rank while a call runs, which later calls wait for.

A rank runs its calls in its main thread, one after another. What is said beside one is posted to Ray's key-value store, where a
thread of the rank looks for it, for as long as the call lasts; the last word said holds.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from quintet.cluster.progress import KEY_VARIABLE

LANE, HEARD = "lane/", "/heard"
"""Where the controller posts, after the group's prefix, with the call's name; and where a rank says what it has done, after its key."""
LISTEN_EVERY_S = 0.1
_here: dict[str, Mapping[str, Callable[[], None]]] = {}
"""Calls under way that are not a worker group's: of a rank in the controller's own process."""


def say_here(call: str, verb: str) -> bool:
    """Run a verb beside a call of a rank in this process; False where none of this name is under way."""
    verbs = _here.get(call)
    if verbs is not None:
        verbs[verb]()
    return verbs is not None


@contextmanager
def listening(call: str, verbs: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Run what is said beside this call, in another thread. A verb "abort" is run again and again: what it is to end may only begin.

    Outside a worker group they are for `say_here`.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        _here[call] = verbs
        try:
            yield
        finally:
            del _here[call]
        return
    done = threading.Event()

    def listen() -> None:
        from quintet.cluster.ray_compat import post, posted

        last = ""
        while not done.wait(LISTEN_EVERY_S):
            (word,) = posted([f"{key.rpartition('/')[0]}/{LANE}{call}"])
            verb = word.partition(" ")[2]
            if word and (word != last or verb == "abort"):
                try:
                    verbs[verb]()
                except Exception:  # the call itself fails of it, or goes on
                    traceback.print_exc()
            if word != last:
                post(f"{key}{HEARD}", word)
            last = word

    thread = threading.Thread(target=listen, name="control-lane", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
