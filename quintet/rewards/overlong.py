"""What a long response loses, before it is cut off."""

from __future__ import annotations


def overlong_penalty(tokens: int, longest: int, buffer: int) -> float:
    """Return the share of the penalty for a response of so many tokens: 0 up to `longest` - `buffer`, then rising to 1 at
    `longest` (soft overlong punishment; Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13)."""
    return min(max(tokens - (longest - buffer), 0) / buffer, 1.0)
