"""From what ranks report to errors against the reference, and the bounds that errors must keep.

Every error is relative and one number: the worst over parameters, steps and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Tally
from tests.oracle.cases import Case
from tests.oracle.data import BATCHES
from tests.oracle.ranks import Piece, Report
from tests.oracle.reference import NORM_FLOOR, Reference, Step


class Error(NamedTuple):
    """How far off, and where that is."""

    size: float
    where: str


@dataclass(frozen=True)
class Bounds:
    """The largest errors allowed.

    outputs: log-probs and entropies, or values, of the first batch: largest difference over largest magnitude.
    loss: of the first step; losses: of later ones. gradients: of each parameter in the first step, and all: of all
    of them as one vector. norm: of the gradients in the first step; norms: in later ones. parameters: after the last
    step, of each one's *change*, which is stricter than of the parameter. copies: between ranks that hold the same. ahead, aheads:
    of layers for multi-token prediction, each depth's loss and accuracy and the norm of their gradients, in the first step and
    in later ones. balance, balances: of what is told of the load of experts, in the same.
    """

    outputs: float
    loss: float
    losses: float
    gradients: float
    all: float
    norm: float
    norms: float
    parameters: float
    copies: float
    ahead: float
    aheads: float
    balance: float
    balances: float


BOUNDS = {
    "fp32": Bounds(
        outputs=1e-5,
        loss=1e-5,
        losses=1e-4,
        gradients=1e-5,
        all=1e-5,
        norm=1e-5,
        norms=1e-4,
        parameters=1e-4,
        copies=0.0,
        ahead=1e-5,
        aheads=1e-4,
        balance=1e-5,
        balances=1e-4,
    ),
    # Rounding to 8 bits of mantissa in 4 layers of large weights. Measured on CPU, the worst of all layouts: outputs 0.02,
    # loss 0.005, gradients 0.20 (all of them 0.03), norm 0.008, parameters 0.26.
    "bf16": Bounds(
        outputs=0.05,
        loss=0.02,
        losses=0.02,
        gradients=0.25,  # of single experts, which few tokens meet: 0.20 with AVX2's kernels, 0.17 on GPUs
        all=0.05,
        norm=0.02,
        norms=0.02,
        parameters=0.4,
        copies=0.0,
        ahead=0.02,
        aheads=0.02,
        balance=0.02,
        balances=0.02,
    ),
}
"""By float type. Gradients and master weights are fp32 in both."""


def errors(case: Case, reports: Sequence[Report], expected: Reference) -> dict[str, Error]:
    """The worst error of each kind (see `Bounds`).

    Raises AssertionError where something is missing or has a wrong shape: no number says how wrong that is.
    """
    first = expected.steps[0]
    gradients, gradient_copies = assemble(r.gradients for r in reports)
    parameters, parameter_copies = assemble(r.parameters for r in reports)
    assert_same_names(gradients, first.gradients)
    assert all(g.dtype == torch.float32 for g in gradients.values()), "gradients are not summed in fp32"
    assert_same_names(parameters, expected.steps[-1].parameters | expected.buffers)
    losses = [abs(sum(r.losses[k] for r in reports) / step.loss - 1) for k, step in enumerate(expected.steps)]
    norms = [
        max(abs(r.norms[k] / step.grad_norm - 1) for r in reports) for k, step in enumerate(expected.steps)
    ]
    off = torch.stack([(gradients[n] - g).norm() for n, g in first.gradients.items()]).norm()
    total = torch.stack([g.norm() for g in first.gradients.values()]).norm()
    return {
        "outputs": output_error(case, reports, expected),
        "loss": Error(losses[0], "step 1"),
        "losses": _worst((e, f"step {k + 1}") for k, e in enumerate(losses)),
        "gradients": _worst((relative(gradients[n], g), n) for n, g in first.gradients.items()),
        "all": Error((off / total).item(), "all gradients"),
        "norm": Error(norms[0], "step 1"),
        "norms": _worst((e, f"step {k + 1}") for k, e in enumerate(norms)),
        "parameters": _parameter_error(case, parameters, expected),
        "copies": max(gradient_copies, parameter_copies),
        "ahead": _ahead_error(reports, expected.steps[:1]),
        "aheads": _ahead_error(reports, expected.steps),
        "balance": _balance_error(reports, expected.steps[:1]),
        "balances": _balance_error(reports, expected.steps),
    }


def _ahead_error(reports: Sequence[Report], steps: Sequence[Step]) -> Error:
    """Of what the heads of layers for multi-token prediction say, and of the norm of their gradients."""
    found = [(0.0, "")]
    for k, step in enumerate(steps):
        means = Tally().merge(r.tallies[k] for r in reports if r.tallies).means()
        found += [(abs(means[name] - want), f"{name}, step {k + 1}") for name, want in step.ahead.items()]
        if step.ahead:
            found += [(abs(r.ahead_norms[k] / step.ahead_norm - 1), f"norm, step {k + 1}") for r in reports]
    return _worst(found)


def _balance_error(reports: Sequence[Report], steps: Sequence[Step]) -> Error:
    """Of what every rank tells of the load of experts."""
    found = [(0.0, "")]
    for k, step in enumerate(steps):
        for report in reports:
            told = report.balance[k]
            assert {name for name in told if name[-1].isdigit() or "loss" in name} == set(step.balance)
            found += [
                (abs(told[name] - want) / max(abs(want), 1), f"{name}, step {k + 1}")
                for name, want in step.balance.items()
            ]
    return _worst(found)


def _parameter_error(case: Case, parameters: dict[str, Tensor], expected: Reference) -> Error:
    """Of the change since the start, less what rounding to bf16 may do, before and after. Of buffers none is allowed."""
    found = []
    for name, buffer in expected.buffers.items():
        equal = torch.equal(parameters[name], buffer.to(parameters[name].dtype))
        found.append((0.0 if equal else float("inf"), name))
    for name, after in expected.steps[-1].parameters.items():
        before, off = expected.parameters[name], (parameters[name].float() - after).abs()
        if case.dtype == "bf16":
            off = (off - (before.abs() + after.abs()) * 2**-8).clamp(min=0)
        change = (after - before).norm() + NORM_FLOOR
        found.append(((off.norm() / change).item(), name))
    return _worst(found)


def output_error(case: Case, reports: Sequence[Report], expected: Reference) -> Error:
    """Of the forward pass, over every sample; each must be reported, and by every rank that reports it alike."""
    lengths = BATCHES[case.batches[0]]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    found, seen = [Error(0.0, "")], set()
    for rank, report in enumerate(reports):
        if report.outputs is None:
            continue
        at = torch.cat(
            [torch.arange(starts[i], starts[i + 1]) for i in report.samples] or [torch.empty(0).long()]
        )
        seen.update(report.samples)
        for number, (out, want) in enumerate(zip(report.outputs, expected.outputs, strict=True)):
            assert out.shape == at.shape, f"rank {rank}: {tuple(out.shape)} outputs for {len(at)} tokens"
            if len(at):
                off = (out - want[at]).abs().max() / want.abs().max()
                found.append(Error(off.item(), f"output {number} of rank {rank}"))
    assert seen == set(range(len(lengths))), f"samples without outputs: {set(range(len(lengths))) - seen}"
    return max(found)


def assemble(ranks: Iterable[Iterable[Piece]]) -> tuple[dict[str, Tensor], Error]:
    """Full tensors from all ranks' pieces, and how far copies of the same piece are apart.

    Raises AssertionError when an element of a tensor is on no rank. Copies are compared where the pieces overlap.
    """
    by_name: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in ranks:
        for name, box, piece in pieces:
            by_name.setdefault(name, []).append((tuple(slice(a, b) for a, b in box), piece))
            ends = tuple(b for _, b in box)
            shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    full, apart = {}, [Error(0.0, "")]
    for name, held in by_name.items():
        whole = torch.zeros(shapes[name], dtype=held[0][1].dtype)
        covered = torch.zeros(shapes[name], dtype=torch.bool)
        for box, piece in held:
            seen = covered[box]
            if seen.any():
                apart.append(Error(relative(piece[seen], whole[box][seen]), f"copies of {name}"))
            whole[box] = torch.where(seen, whole[box], piece)
            covered[box] = True
        assert covered.all(), f"{name}: {int((~covered).sum())} elements are on no rank"
        full[name] = whole
    return full, max(apart)


def relative(found: Tensor, want: Tensor) -> float:
    """‖found − want‖ / (‖want‖ + NORM_FLOOR), and infinite for what is not a number.

    Raises AssertionError when the shapes differ.
    """
    assert found.shape == want.shape, f"shape {tuple(found.shape)}, expected {tuple(want.shape)}"
    off = ((found.float() - want.float()).norm() / (want.float().norm() + NORM_FLOOR)).item()
    return off if off == off else float("inf")


def assert_same_names(found: Iterable[str], want: Iterable[str]) -> None:
    """Nothing is missing, nothing is left over."""
    missing, extra = sorted(set(want) - set(found)), sorted(set(found) - set(want))
    assert not missing, f"on no rank: {', '.join(missing)}"
    assert not extra, f"unknown: {', '.join(extra)}"


def _worst(found: Iterable[tuple[float, str]]) -> Error:
    return max(Error(size if size == size else float("inf"), where) for size, where in found)


def bounds(case: Case) -> Bounds:
    return BOUNDS[case.dtype]


def broken(case: Case, found: dict[str, Error]) -> list[str]:
    """Every bound that the errors break, in words."""
    limits = bounds(case)
    return [
        f"{kind}: {error.size:.1e} at {error.where}, bound {getattr(limits, kind):.0e}"
        for kind, error in found.items()
        if not error.size <= getattr(limits, kind)
    ]
