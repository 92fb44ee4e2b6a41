"""The text of a response while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

INCOMPLETE = "\ufffd"
"""What bytes become that are no whole character: of one that several tokens make, until its last byte is there."""


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return what a text has before any of the stop strings, which end a response and are no part of it."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


class TextPieces:
    """Tells a text in pieces that stay as they are, whatever tokens come: one token late, and never half a character or the
    beginning of a stop string.

    decode: token ids → text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        self._decode, self._stop, self._tell = decode, stop, tell
        self._before = self._told = ""

    def add(self, ids: list[int]) -> None:
        """Tell what is sure by now. ids: all tokens so far, with one more each time."""
        text = self._decode(ids)
        # A tokenizer may write the end of a text another way once it goes on.
        sure = commonprefix((self._before, text)).rstrip(INCOMPLETE)  # noqa: RUF071  (no paths)
        self._before = text
        sure = before_stop(sure, self._stop)
        self._tell_up_to(sure[: len(sure) - max((_begun(stop, sure) for stop in self._stop), default=0)])

    def end(self, text: str) -> None:
        """Tell the rest of the whole text."""
        self._tell_up_to(text)

    def _tell_up_to(self, text: str) -> None:
        if len(text) > len(self._told):
            self._tell(text[len(self._told) :])
            self._told = text


def _begun(stop: str, text: str) -> int:
    """How many of the last characters of a text may be the first of a stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
