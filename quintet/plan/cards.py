"""GPUs by what bounds a step on them: NVIDIA's data sheets; of the H20, which has none in public, what its sellers say."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """flops: dense, in bf16, a second (half of "with sparsity"). bandwidth: of its memory, bytes a second. eight: how many times as many in
    8 bits, 0 where there are none. blocks: whether TransformerEngine scales these by blocks there: from Hopper on. hopper: of the generation that 8 bits
    were tried on."""

    flops: float
    bandwidth: float
    eight: float = 2.0
    blocks: bool = True
    hopper: bool = True


CARDS = {
    "H200": Card(989e12, 4.8e12),
    "H100 PCIe": Card(756e12, 2.0e12),
    "H100 NVL": Card(835e12, 3.9e12),
    "H100": Card(989e12, 3.35e12),
    "H800 PCIe": Card(756e12, 2.0e12),
    "H800": Card(989e12, 3.35e12),
    "H20": Card(148e12, 4.0e12),
    "GH200": Card(989e12, 4.0e12),
    "B200": Card(2250e12, 8.0e12, hopper=False),
    "B100": Card(1750e12, 8.0e12, hopper=False),
    "A100": Card(312e12, 2.04e12, 0.0, hopper=False),
    "A800": Card(312e12, 2.04e12, 0.0, hopper=False),
    "L40S": Card(362e12, 0.864e12, blocks=False, hopper=False),
}
"""By a part of the device's name; of those with several sizes of memory the fastest, but for GH200."""


def card_of(device: str) -> Card | None:
    """Return the card by its device's name, None where it is not known; the longest part that fits counts."""
    fitting = [part for part in CARDS if part in device]
    return CARDS[max(fitting, key=len)] if fitting else None
