"""Constants of the model of time that were measured, by device and shape of a layer, in `measured_costs.json`.

`python -m benchmarks.dynamic_cp --gpus N --shape … --write` measures them on a machine and writes its row.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quintet.models import ModelShape
from quintet.packing.time_model import CellCosts

TABLE = Path(__file__).with_name("measured_costs.json")
MEASURE = "python -m benchmarks.dynamic_cp --gpus N --shape"
OFFERED = {"qwen3-8b": (4096, 32, 8, 128, 0, 0), "qwen3-30b-a3b": (2048, 32, 4, 128, 128, 0)}
"""Shapes that the benchmark has for GPUs, by what `layer_of` says of them."""


@dataclass(frozen=True)
class MeasuredCosts:
    """One row: constants (`CellCosts`, in tokens), and where they come from. shape: see `layer_of`. exchange: empty where one GPU was all
    there was. layers: of the model on which they were measured, each rank with whole layers (tp 1)."""

    device: str
    shape: dict[str, int]
    fixed: float
    quadratic: float
    exchange: tuple[float, ...]
    layers: int
    command: str
    commit: str
    date: str

    @property
    def costs(self) -> CellCosts:
        return CellCosts(self.fixed, self.quadratic, self.exchange or CellCosts.exchange)


def layer_of(shape: ModelShape) -> dict[str, int]:
    """Return what of a model the constants depend on: not its depth, in which a micro-batch's time grows alike but for embedding and head."""
    sizes = {name: getattr(shape, name) for name in ("hidden_size", "heads", "kv_heads", "head_dim")}
    return sizes | {"experts": shape.moe.experts if shape.moe else 0, "latent": int(shape.mla is not None)}


def read_measured(table: Path = TABLE) -> list[MeasuredCosts]:
    """Return the rows of a table."""
    rows = json.loads(table.read_text(encoding="utf-8"))
    return [MeasuredCosts(**(row | {"exchange": tuple(row["exchange"])})) for row in rows]


def write_measured(row: MeasuredCosts, table: Path = TABLE) -> None:
    """Write a row, in place of that of the same device and shape, unless only that one knows what ranks exchange."""
    known = read_measured(table)
    older = [one for one in known if (one.device, one.shape) == (row.device, row.shape)]
    if not row.exchange and any(one.exchange for one in older):
        return
    rows = [*(one for one in known if one not in older), row]
    rows.sort(key=lambda one: (one.device, sorted(one.shape.items())))
    table.write_text(json.dumps([asdict(one) for one in rows], indent=2) + "\n", encoding="utf-8")


def fitting(shape: ModelShape, tp: int) -> list[MeasuredCosts]:
    """Return the rows of layers of this shape, one a device; none where tp cuts layers, of which nothing was measured."""
    return [one for one in read_measured() if tp == 1 and one.shape == layer_of(shape)]


def costs_of(shape: ModelShape, tp: int, device: str) -> tuple[CellCosts, str]:
    """Return the constants to plan with on a device, and a sentence of where they come from: measured for it, or the defaults."""
    for one in fitting(shape, tp):
        if one.device == device:
            but = "" if one.exchange else ", but for what ranks exchange, which is the default"
            return (
                one.costs,
                f"planned by constants measured on {device} in bf16 with all_gather ({one.command}, {one.date}){but}",
            )
    why = "with layout.tp above 1" if tp > 1 else f"on {device} for this shape"
    known = [name for name, sizes in OFFERED.items() if sizes == tuple(layer_of(shape).values())]
    # Nothing else can be measured, and a hint at what measures something else would lead nowhere.
    how = f" ({MEASURE} {known[0]} --write)" if known and tp == 1 and device != "cpu" else ""
    return CellCosts(
        quadratic=shape.quadratic
    ), f"planned by default constants: none were measured {why}{how}"
