"""Which kernels for experts a run on TransformerEngine's layers takes: those that were measured faster, in `measured_kernels.json`; and the fused
permutation where nobody measured it, whose sums are the same each time.

`python -m benchmarks.expert_kernels --write --ep N` measures those of a model, spread over N ranks, on a GPU and writes its rows. What the recipe
says of a kernel (`engine.megatron`, `engine.experts`) goes before it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from quintet.models import ModelShape, MoeShape
from quintet.recipe.megatron import EXPERT_KERNELS, PERMUTATION, TORCH_EXPERTS, asks_routers
from quintet.recipe.schema import Recipe

TABLE = Path(__file__).with_name("measured_kernels.json")
MEASURE = "python -m benchmarks.expert_kernels --write"
WORTH = 1.005
"""How many times as fast a step has to be for a kernel to be taken."""


@dataclass(frozen=True)
class MeasuredKernel:
    """One row. kernel: the field of `engine.megatron`, or `TORCH_EXPERTS`. experts: see `experts_of`. speedup: seconds of a training step without it over
    those with it, the median of turns; least: of one turn."""

    device: str
    kernel: str
    experts: dict[str, int]
    speedup: float
    least: float
    command: str
    commit: str
    date: str

    @property
    def taken(self) -> bool:
        """Whether runs take it: faster in every turn, and by enough; of the permutation, whose sums are the same each time, no slower."""
        return self.speedup >= 1 if self.kernel == PERMUTATION else self.speedup >= WORTH and self.least > 1


def experts_of(shape: ModelShape, recipe: Recipe | None = None) -> dict[str, int]:
    """Return what the kernels' time depends on, of the experts that a rank of a recipe holds, by default all of the model's."""
    moe, (ep, etp) = shape.moe, (recipe.layout.ep, recipe.layout.expert_tp) if recipe else (1, 1)
    assert moe is not None
    sizes = {"hidden_size": shape.hidden_size, "experts": moe.experts // ep, "top_k": moe.top_k}
    return sizes | {"ffn_hidden_size": moe.ffn_hidden_size // etp}


def read_kernels(table: Path = TABLE) -> list[MeasuredKernel]:
    """Return the rows of a table."""
    return [MeasuredKernel(**row) for row in json.loads(table.read_text(encoding="utf-8"))]


def write_kernel(row: MeasuredKernel, table: Path = TABLE) -> None:
    """Write a row, in place of that of the same device, kernel and experts."""

    def what(one: MeasuredKernel) -> tuple[object, ...]:
        return one.device, one.kernel, sorted(one.experts.items())

    rows = [*(one for one in read_kernels(table) if what(one) != what(row)), row]
    rows.sort(key=what)
    table.write_text(json.dumps([asdict(one) for one in rows], indent=2) + "\n", encoding="utf-8")


def _is_open(kernel: str, recipe: Recipe, moe: MoeShape) -> bool:
    """Whether the recipe and the model leave it open whether a run takes the kernel."""
    engine = recipe.engine
    if kernel != TORCH_EXPERTS:
        return kernel not in engine.megatron
    return engine.experts == "auto" and engine.fp8 is None and recipe.model.dtype != "fp32" and moe.plain


def with_kernels(
    recipe: Recipe,
    shape: ModelShape,
    device: str | None,
    installed: Collection[str],
    table: Iterable[MeasuredKernel] | None = None,
) -> tuple[Recipe, str]:
    """Return the recipe with the kernels that were measured faster, and a sentence of which and why; empty where there is no choice.

    device: of all ranks, by its name; None where they differ. installed: of `EXPERT_KERNELS`, those that can be had.
    """
    moe = shape.moe
    open_ = [one for one in EXPERT_KERNELS if moe and one in installed and _is_open(one, recipe, moe)]
    if not open_:
        return recipe, ""
    rows = [one for one in (read_kernels() if table is None else table) if one.device == device]
    known = {one.kernel: one for one in rows if one.experts == experts_of(shape, recipe)}
    routes = asks_routers(recipe)
    taken, said = [], []
    for kernel in open_:
        row = known.get(kernel)
        if kernel == "moe_router_fusion" and routes:
            said.append(f"no {kernel}, which does not go with {routes}")
        elif row is None and kernel == PERMUTATION:
            said.append(f"{kernel}, with which log-probs of the same weights repeat to the bit")
            taken.append(kernel)
        elif row is None:
            # It measures no parts of experts.
            how = f" ({MEASURE} --ep {recipe.layout.ep})" if recipe.layout.expert_tp == 1 else ""
            said.append(
                f"no {kernel}, which was not measured for these experts on {device or 'unlike devices'}{how}"
            )
        else:
            how = f"measured {row.speedup:.3f} times as fast on {row.device} ({row.command}, {row.date})"
            said.append(f"{kernel}, {how}" if row.taken else f"no {kernel}, {how}")
            taken += [kernel] if row.taken else []
    update: dict[str, object] = {"experts": "torch"} if TORCH_EXPERTS in taken else {}
    fields = dict.fromkeys((one for one in taken if one != TORCH_EXPERTS), True)
    engine = recipe.engine.model_copy(update=update | {"megatron": recipe.engine.megatron | fields})
    return recipe.model_copy(update={"engine": engine}), f"kernels of experts: {'; '.join(said)}"
