"""Loads that are watched: where each element of a tensor went."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quintet.engine.weights.fingerprint import fingerprint
from quintet.rollout.vllm.load_trace import Region, Trace, part_of
from quintet.rollout.vllm.worker_models import WorkerModels


def watched(parameter: Tensor, load: Callable[[Tensor, Tensor], None], source: Tensor) -> Trace:
    model = nn.Module()
    model.p = nn.Parameter(parameter, requires_grad=False)
    trace = Trace(WorkerModels(model).named_tensors)
    with trace:
        trace.follow("hf", source)
        load(model.p.data, source)
    return trace


LOADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], object]]] = {
    "whole": ((4, 6), (4, 6), lambda p, s: p.copy_(s)),
    "rows of a fused matrix": ((12, 6), (4, 6), lambda p, s: p.narrow(0, 4, 4).copy_(s)),
    "a rank's columns": ((4, 3), (4, 6), lambda p, s: p.copy_(s.narrow(1, 3, 3))),
    "an expert": ((2, 8, 6), (4, 6), lambda p, s: p[1].narrow(0, 4, 4).copy_(s)),
    "experts in one tensor, transposed": ((2, 6, 4), (2, 4, 6), lambda p, s: p.copy_(s.transpose(1, 2))),
    "every other row": ((2, 6), (4, 6), lambda p, s: p.copy_(s.unflatten(0, (2, 2))[:, 0])),
    "one expert of several": ((6, 4), (3, 4, 6), lambda p, s: p.copy_(s[1].T)),
    "a copy in between": ((3, 2), (4, 6), lambda p, s: p.copy_(s[:2, 3:].T.contiguous())),
    "a part of a copy in between": ((2, 2), (4, 6), lambda p, s: p.copy_(s[1:].clone()[1:, 4:])),
    "a number": ((5,), (), lambda p, s: p[2].copy_(s)),
    "one row": ((1, 6), (1, 6), lambda p, s: p.copy_(s)),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_copy_tells_where_a_box_went(name: str) -> None:
    held, shape, load = LOADS[name]
    source = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    parameter = torch.zeros(held)
    record = watched(parameter, load, source).record  # type: ignore[arg-type]
    if name == "every other row":  # no box of the tensor
        assert record.mixed == {"hf"}
        return
    (region,) = record.regions["hf"]
    assert not record.mixed
    box = tuple(slice(*side) for side in region.box)
    assert torch.equal(region.view(parameter), source[box])
    assert record.arrived[region] == fingerprint(source[box], shape, region.box)
    written = int((parameter != 0).sum())
    assert record.unwritten("p") == (parameter.numel() - written, parameter.numel())


def test_what_is_computed_is_known_to_be_and_counts_as_written() -> None:
    def load(p: Tensor, s: Tensor) -> None:
        p.copy_(torch.cat([s * 2, s]))

    record = watched(torch.zeros(4), load, torch.ones(2)).record
    assert record.mixed == {"hf"}
    assert not record.regions
    assert record.unwritten("p") == (0, 4)


def test_what_is_set_to_a_number_on_its_way_is_no_copy() -> None:
    def load(p: Tensor, s: Tensor) -> None:
        s.zero_()
        p.copy_(s)

    record = watched(torch.ones(2), load, torch.ones(2)).record
    assert record.mixed == {"hf"}
    assert not record.regions
    assert record.unwritten("p") == (0, 2)


def test_a_tensor_that_is_freed_is_not_taken_for_the_next_in_its_memory() -> None:
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    trace = Trace(WorkerModels(model).named_tensors)
    with trace:
        for _ in range(20):
            trace.follow("hf", torch.ones(4, 4))
            model.weight.copy_(torch.zeros(4, 4))
    assert not trace.record.regions


def test_padding_and_other_types_are_noted() -> None:
    def load(p: Tensor, s: Tensor) -> None:
        p[:2].copy_(s)
        p[2:].fill_(0)

    record = watched(torch.ones(3, 2, dtype=torch.bfloat16), load, torch.ones(2, 2)).record
    (region,) = record.regions["hf"]
    assert not region.exact
    assert list(record.filled["p"]) == [(((2, 3), (0, 2)), 0.0)]
    assert record.unwritten("p") == (0, 6)


def test_parameters_that_are_made_anew_while_loading_are_found() -> None:
    model = nn.Linear(2, 2, bias=False).requires_grad_(False)
    trace = Trace(WorkerModels(model).named_tensors)
    with trace:
        for n in range(3):
            source = torch.full((2, 2), float(n))
            trace.follow(f"hf.{n}", source)
            model.weight = nn.Parameter(torch.empty(2, 2), requires_grad=False)
            model.weight.copy_(source)
    assert [next(iter(regions)).parameter for regions in trace.record.regions.values()] == ["weight"] * 3


def test_a_view_beyond_the_tensor_is_no_part_of_it() -> None:
    memory = torch.arange(24.0)
    assert part_of(memory[2:4].view(1, 2), (3, 4), (4, 1), 0) is not None
    assert part_of(memory[2:6].view(1, 4), (3, 4), (4, 1), 0) is None
    assert part_of(memory[:1], (4,), (1,), 3) is None


def test_a_region_is_a_view_with_the_tensors_dims() -> None:
    parameter = torch.arange(24.0).view(2, 3, 4)
    region = Region(
        "hf", (4, 3), ((1, 3), (0, 3)), "p", ((1, 2), (0, 3), (1, 3)), (2, 1), torch.float32, torch.float32
    )
    assert torch.equal(region.view(parameter), parameter[1, :, 1:3].T)
