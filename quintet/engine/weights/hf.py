"""Hugging Face directories in and out: every rank reads the slices it holds, rank 0 writes whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.weights.hf_aux_files import saved_config, write_companions
from quintet.engine.weights.hf_read import HfReader, same_bytes
from quintet.engine.weights.hf_write import HfWriter, Planned, hf_writer, in_order
from quintet.engine.weights.passthrough_tensors import Carried, carried_from, refuse_other_copies
from quintet.engine.weights.reshard import Holdings, Resharder, gather_holdings
from quintet.engine.weights.shards import Box, Shard
from quintet.errors import UserError
from quintet.models import ModelShape, check_weights, table_of
from quintet.models.hf_config import read_json
from quintet.models.mcore import whole_box
from quintet.models.weights_on_disk import WeightsOnDisk, head_and_embedding

GATHERED_BYTES = 256 << 20


def check_hf(shape: ModelShape, path: Path) -> WeightsOnDisk:
    """Check all that headers and config.json can tell of a directory, before anything is written. Collective.

    Raises UserError on every rank when one finds fault with a file.
    """
    return run_on_all_or_raise(lambda: _checked(shape, path))


def fill_hf(shards: list[Shard], weights: WeightsOnDisk) -> None:
    """Copy a directory's tensors into the ranks' shards. Collective.

    Raises UserError on every rank for a fault that only the data shows; the shards are no model then.
    """

    def read() -> None:
        with HfReader(weights) as reader:
            reader.fill(shards)

    run_on_all_or_raise(read)


def _checked(shape: ModelShape, path: Path) -> WeightsOnDisk:
    """A directory whose headers fit the shape. Rank 0 also reads a head that tied embeddings make superfluous."""
    weights = check_weights(path, shape)
    head, embedding = (weights.tensors.get(name) for name in head_and_embedding(shape))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and shape.tied_embeddings and head and embedding and not same_bytes(head, embedding):
        raise UserError(
            f"{head.file}: {' differs from '.join(head_and_embedding(shape))}, but config.json has "
            "tie_word_embeddings true: set it to false, or remove the tensor"
        )
    if first:
        refuse_other_copies(weights, shape)
    return weights


def full_tensors(
    shards: list[Shard], planned: Sequence[Planned], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the planned tensors in full, in their order; what is no parameter in fp32. Collective; rank 0 gets them on the
    CPU, others get nothing.

    Some GATHERED_BYTES are gathered at a time, and never less than a tensor: that and its shards are rank 0's memory.
    """
    mine: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        mine[shard.name].append(shard)
    held = gather_holdings(shards, [])
    everyone = [_by_name(one) for one in held]
    for batch in in_order(planned, GATHERED_BYTES):
        names = [one.name for one in batch]
        holdings = [
            Holdings(
                [piece for name in names for piece in here.get(name, ())],
                {one.name for one in batch if one.dtype != dtype},
                held[rank].units,
            )
            for rank, here in enumerate(everyone)
        ]
        targets = [
            Shard(
                one.name,
                one.shape,
                whole_box(one.shape),
                torch.empty(one.shape, dtype=one.dtype, device=device),
            )
            for one in (batch if dist.get_rank() == 0 else [])
        ]
        sources = [shard for name in names for shard in mine[name]]
        Resharder(sources, targets, dtype=dtype, device=device, held=holdings).run()
        for target in targets:
            yield target.name, target.view.cpu()


def _by_name(held: Holdings) -> dict[str, list[tuple[str, Box]]]:
    found = defaultdict(list)
    for name, box in held.sources:
        found[name].append((name, box))
    return found


def planned_tensors(shape: ModelShape, dtype: torch.dtype) -> list[Planned]:
    """Return every tensor of a model's directory in the family's order: parameters as `dtype`, buffers in fp32."""
    found = {  # by name: several weights may be parts of one tensor
        name: Planned(name, full, dtype if weight.trained else torch.float32)
        for weight in table_of(shape)
        for name, full in weight.tensors
    }
    return list(found.values())


def save_hf(
    shards: list[Shard],
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    path: Path,
    companions: Path,
    chat_template: str | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads. Collective; rank 0 writes, under a temporary name.

    companions: the directory the model came from. Its tokenizer files are copied, its layers for multi-token prediction
    where the model has none, and its config.json with the type of the weights as they are written. chat_template: instead of the
    one that came with them.

    Raises UserError on every rank when `path` is there already or the disk does not take it; nothing is left of it then.
    """
    planned = planned_tensors(shape, dtype)

    def begin() -> tuple[ExitStack, HfWriter, Carried] | None:
        if dist.get_rank() != 0:
            return None
        carried = carried_from(companions, shape)
        config = saved_config(read_json(companions / "config.json"), shape, dtype, carried.mtp_layers)
        with ExitStack() as stack:
            writer = stack.enter_context(hf_writer(path, [*planned, *carried.planned(planned)]))
            write_companions(writer.directory, companions, config, chat_template)
            return stack.pop_all(), writer, carried

    begun = run_on_all_or_raise(begin)
    failure: Exception | None = None
    for name, tensor in full_tensors(shards, planned, dtype, device):
        assert begun is not None  # tensors come to rank 0 alone
        _, writer, carried = begun
        try:
            if failure is None:
                for one in (name, *carried.copies.get(name, ())):
                    writer.add(one, tensor)
        except Exception as error:  # the other ranks wait for this one until the last tensor
            failure = error
    run_on_all_or_raise(lambda: _end(begun, failure))


def _end(begun: tuple[ExitStack, HfWriter, Carried] | None, failure: Exception | None) -> None:
    if begun is None:
        return
    stack, writer, carried = begun
    with stack:
        if failure is not None:
            raise failure
        for name, tensor in carried.read():
            writer.add(name, tensor)
