"""Prompts of the tiny models, and a stand-in for their tokenizer."""

from __future__ import annotations

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7], [40, 41], [60, 0, 60, 0, 60]]


def text(ids: list[int]) -> str:
    """One letter a token."""
    return "".join(chr(ord("A") + i) for i in ids)
