"""Copies into and out of memory that is elsewhere each time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.engine.copies import Copies, Place, copy_all, strides_of
from quintet.models.mcore import Box, whole_box

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def place(shape: tuple[int, ...], offset: int = 0, memory: int = 0) -> Place:
    return Place(memory, torch.float32, shape, strides_of(shape), offset)


def box(starts: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def memory(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def seen(one: Place, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(one.shape, one.strides, one.offset)


@given(SIZES)
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert strides_of(shape) == torch.empty(shape).stride()


@given(SIZES, st.data())
def test_a_part_and_its_views_are_those_of_a_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Of a part dims may be split; where it is contiguous it may have any shape."""
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True))
    flat = memory(5 + math.prod(shape))
    there = seen(place(shape, 5), flat)[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
    part = place(shape, 5).part(whole_box(shape), box(starts, sizes))
    assert torch.equal(seen(part, flat), there)
    assert part.is_contiguous() == there.is_contiguous()
    halved = tuple(n for size in sizes for n in ((size // 2, 2) if size % 2 == 0 else (size,)))
    assert torch.equal(seen(part.view(halved), flat), there.view(halved))


@pytest.mark.parametrize("cut", [False, True])
def test_each_run_is_between_the_memory_it_is_given(cut: bool) -> None:
    """Interleaved tensors have more dims than the part of them that travels."""
    held = memory(24).view(2, 3, 4)
    kept = held[:, :2] if cut else held
    target = (
        place((6, 8)).part(whole_box((6, 8)), box((0, 2), (2, kept[0].numel()))) if cut else place((2, 12), 3)
    )
    copies = Copies([(target, kept), (place((4,), 0, -1), held[1, 2])])
    for _ in range(2):
        held.add_(1)
        first, last = torch.zeros(48), torch.zeros(4)
        copies.run(first.view(torch.uint8), last.view(torch.uint8))
        assert torch.equal(seen(target, first), kept.reshape(target.shape))
        assert first.count_nonzero() == kept.numel()
        assert torch.equal(last, held[1, 2])


def test_from_one_memory_to_another_and_into_another_type() -> None:
    source, target = place((2, 3), 1, 0), place((2, 6), 0, 1).part(whole_box((2, 6)), box((0, 3), (2, 3)))
    narrow = torch.empty(6, dtype=torch.bfloat16)
    found = torch.zeros(12)
    Copies([(target, source), (narrow, place((6,), 1, 0))]).run(
        memory(8).view(torch.uint8), found.view(torch.uint8)
    )
    assert found.view(2, 6)[:, 3:].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert narrow.tolist() == [1, 2, 3, 4, 5, 6]


def test_what_would_have_to_be_copied_to_have_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        copy_all([(torch.empty(2, 3), torch.empty(2, 3).T)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel runs on GPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_on_a_gpu_every_time_is_as_on_a_cpu(dtype: torch.dtype) -> None:
    """From the second time on by a table; the fourth is after what is copied has been away."""
    draw, ends, drawn = random.Random(0), [0, 0], []
    for _ in range(200):
        shape = tuple(draw.choice((1, 2, 3, 8, 40)) for _ in range(draw.randint(1, 4)))
        held = tuple(size + draw.randint(0, 2) for size in shape)
        which, full = draw.randrange(2), tuple(size + draw.randint(0, 2) for size in shape)
        drawn.append((shape, held, Place(which, dtype, full, strides_of(full), ends[which])))
        ends[which] += math.prod(full)

    def ends_of(one: torch.Tensor) -> list[tuple[Place, torch.Tensor]]:
        flat, found = one, []
        for shape, held, there in drawn:
            source = flat[: math.prod(held)].view(held)[tuple(slice(size) for size in shape)]
            found.append((there.part(whole_box(there.shape), whole_box(shape)), source))
            flat = flat[math.prod(held) :]
        return found

    kept = torch.arange(sum(math.prod(held) for _, held, _ in drawn)).to(dtype)
    there = kept.cuda()
    sides = [(Copies(ends_of(one)), one.device) for one in (kept, there)]
    for time in range(4):
        if time == 3:
            nbytes = there.untyped_storage().nbytes()
            there.untyped_storage().resize_(0)
            away = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            there.untyped_storage().resize_(nbytes)
            there.copy_(kept)
            del away
        made = []
        for copies, device in sides:
            memory = [torch.zeros(end, dtype=dtype, device=device) for end in ends]
            copies.run(*(one.view(torch.uint8) for one in memory))
            made.append([one.cpu() for one in memory])
        assert all(map(torch.equal, *made)), time
