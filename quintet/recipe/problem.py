"""What is wrong with a recipe, as rules say it."""

from __future__ import annotations

import re

from quintet.recipe.keys import all_keys

_KEY = re.compile(r"(?<![\w./-])(?:[a-z_]+(?:\.\w+)+|[a-z_]+(?==))|^[a-z_]+(?=[ :])")
_BELOW = ("engine.megatron.", "rollout.vllm.", "rollout.sglang.")
"""Options of another project have keys of their own below these."""


class Problem:
    """What is wrong, in the user's words: the keys that take part in it, by name, then "; " and what to do instead.

    more: keys that take part and are not named.
    """

    def __init__(self, message: str, *more: str) -> None:
        self.message, self.more = message, more

    @property
    def keys(self) -> tuple[str, ...]:
        """The dotted keys that take part in the problem, for where they were written."""
        named = _KEY.findall(self.message.partition("; ")[0])
        return (*(key for key in named if key in all_keys() or key.startswith(_BELOW)), *self.more)
