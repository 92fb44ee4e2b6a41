"""What follows from a recipe and is not written in it, in sentences: its model, layouts, memory, checkpoints."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from quintet.models import ModelShape, held_shape, table_of
from quintet.models.lora import adapted, adapter_parameters, linears
from quintet.models.shape import route_bytes
from quintet.packing.align import alignment_of
from quintet.packing.measured import costs_of, fitting
from quintet.packing.plan import cell_sizes
from quintet.plan.fp8 import in_8_bits
from quintet.plan.fullest import fullest_rank, layers_of, setup_of
from quintet.plan.kernels import experts_of, read_kernels, with_kernels
from quintet.plan.memory import packed_bytes
from quintet.plan.offload import Offload, with_shares
from quintet.plan.saves import checkpoint_bytes
from quintet.plan.setup import Setup
from quintet.recipe.derived import data_parallel, layout_of, moe_layers_of, roles_of
from quintet.recipe.lora import lora_shape
from quintet.recipe.megatron import EXPERT_KERNELS
from quintet.recipe.recompute import recompute_modules
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules import Command, shape_of
from quintet.recipe.schema import Layout, Recipe

Look = Callable[[], str | None]
"""Says what there is to say, if anything; may take a while with a large model."""

_GIB = 1 << 30


def looks(recipe: Recipe, command: Command, gpu_gib: float | None = None) -> dict[str, Look]:
    """Return what each look at a sound recipe is at, and the look; command: that which it is for; gpu_gib: memory of a GPU, if it is
    known."""
    shape = shape_of(recipe)
    assert shape is not None  # a sound recipe names a model
    sized = cache(partial(with_shares, recipe, shape, command, int((gpu_gib or 0) * _GIB)))
    found: dict[str, Look] = {
        "the model": lambda: _model(recipe, shape),
        "the adapters": lambda: _lora(recipe, shape),
        "the devices": lambda: _devices(recipe, command),
        "the layout": lambda: _layout(recipe),
        "the planner": lambda: _planner(recipe, shape),
        "the experts": lambda: _experts(recipe, shape),
    }
    for role in roles_of(recipe) if command == "train" else ():
        found[f"the {role}'s layout"] = partial(own_layout, recipe, shape, role)
    if command != "sft":
        found["the rollout"] = lambda: _rollout(recipe)
        found["what generates"] = lambda: _installed(recipe, command)
    found["the engine"] = lambda: _engine(recipe, shape)
    found["the kernels"] = lambda: _kernels(recipe, shape)
    if command == "train" and recipe.engine.replay_routes is not None:
        found["routes"] = lambda: _routes(recipe, shape)
    if command in ("train", "sft"):
        found["micro-batches"] = lambda: _rows(recipe)
        if recipe.model.path is not None or gpu_gib is not None:
            found["memory"] = lambda: _memory(
                recipe if gpu_gib is None else sized()[0], shape, command, gpu_gib
            )
    if recipe.model.path is not None or gpu_gib is not None:
        found["offload"] = lambda: _offload(recipe, shape, command) if gpu_gib is None else sized()[1]
    return found


def _model(recipe: Recipe, shape: ModelShape) -> str:
    path = recipe.model.directory
    if path is None:  # 1 stands for the vocabulary in the shape of a built model
        size = f"{in_units(shape.parameter_count)} parameters and the embeddings"
        return f"Model: {shape.family}, {size}, built from nothing.{_ahead(recipe, 0)}"
    active = f", {in_units(shape.active_parameter_count)} of them for each token" if shape.moe else ""
    return f"Model: {shape.family}, {in_units(shape.parameter_count)} parameters{active}.{_ahead(recipe, held_shape(path).mtp_layers)}"


def _routes(recipe: Recipe, shape: ModelShape) -> str:
    """What replayed routes come to, where all samples are as long as they may be."""
    assert shape.moe is not None
    layout, replay = recipe.layout, recipe.engine.replay_routes
    of_layer = shape.moe.top_k * route_bytes(shape.moe.experts)
    samples = recipe.train.prompts_per_step * recipe.rollout.samples_per_prompt
    tokens = samples * (recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens)
    stages = [moe_layers_of(layout, shape, stage) for stage in range(layout.pp)]
    # A rollout's are cut for cp and sp where a row is packed, a record was made of cut rows.
    parts = data_parallel(recipe) * (layout.cp * (layout.tp if layout.sp else 1) if replay == "old" else 1)
    whole, rank = (
        tokens * layers * of_layer / _GIB for layers in (len(shape.moe_layers), max(map(len, stages)))
    )
    where = "recorded and kept on the ranks" if replay == "old" else "from the rollout to the ranks"
    return (
        f"Routes: {where}, {len(shape.moe_layers) * of_layer} bytes a token in {len(shape.moe_layers)} layers; of the longest samples "
        f"{_little(whole)} GiB a step, {_little(rank / parts)} GiB on a rank."
    )


def _little(gib: float) -> str:
    return f"{gib:.3g}" if gib >= 0.001 else "less than 0.001"


def _ahead(recipe: Recipe, layers: int) -> str:
    """What becomes of so many layers for multi-token prediction, or of those that the model is given."""
    mtp = recipe.mtp
    new = mtp.init_layers if mtp is not None else None
    if not (layers or new):
        return ""
    if mtp is None:
        how = "not trained, saved as found"
    else:
        how = f"{'new ones, ' if new else ''}{'trained' if mtp.train else 'kept as they are'}"
    what = "Its layer" if (new or layers) == 1 else f"Its {new or layers} layers"
    return f" {what} for multi-token prediction: {how}."


def _lora(recipe: Recipe, shape: ModelShape) -> str | None:
    lora = lora_shape(recipe, shape)
    if lora is None:
        return None
    weights = table_of(shape)
    number, layers = adapter_parameters(weights, lora), list(linears(weights))
    beside = sum(len(adapted(one, lora)) for one in layers)
    rslora = " (rslora)" if lora.rslora else ""
    return (
        f"LoRA: rank {lora.rank}, scale {lora.scale:g}{rslora}, beside {beside} of {sum(len(one.parts) for one in layers)} "
        f"linear layers: {number:,} parameters are trained, {100 * number / shape.parameter_count:.2g}% of the model's."
    )


def in_units(parameters: int) -> str:
    """Return a count as people say it: 7.6B, 1.2M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{name}"
    return str(parameters)


def _devices(recipe: Recipe, command: str) -> str | None:
    if not _lacks_gpu(recipe, "cuda"):
        return None
    return f"Devices: no NVIDIA GPU is seen here, which quintet {command} needs with cluster.device=cuda."


def _lacks_gpu(recipe: Recipe, device: str) -> bool:
    """Whether its cluster.device is this one, and it runs on this machine, which has no NVIDIA GPU."""
    return not (recipe.cluster.device != device or recipe.cluster.address or Path("/dev/nvidiactl").exists())


def _layout(recipe: Recipe) -> str:
    ranks, layout = recipe.cluster.ranks, recipe.layout
    sp, vpp = " with sp" if layout.sp else "", f" with vpp {layout.vpp}" if layout.vpp > 1 else ""
    sizes = ", ".join(map(str, cell_sizes(layout.cp)))
    dynamic = f" (dynamic: {sizes} for each micro-batch)" if layout.dynamic_cp else ""
    cp = f" × cp {layout.cp}{dynamic}" if layout.cp > 1 else ""
    stages = "" if layout.stage_layers is None else f" of {_in_runs(layout.stage_layers)} layers"
    return f"Layout: {ranks} rank{'s' * (ranks != 1)} = dp {data_parallel(recipe)}{cp} × tp {layout.tp}{sp} × pp {layout.pp}{vpp}{stages}."


def own_layout(recipe: Recipe, shape: ModelShape, role: str, device: str | None = None) -> str | None:
    """Return what the layout of a role comes to, None where it is the policy's. device: the ranks', by its name, where there are some."""
    own = recipe.model_copy(update={"layout": layout_of(recipe, role)})
    said = _layout(own).replace(":", f" of the {role}:", 1), _rows(own), _planner(own, shape, device)
    return None if own.layout == recipe.layout else " ".join(filter(None, said))


def _in_runs(counts: Sequence[int]) -> str:
    """6 + 10 × 5 + 4, of stages."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return " + ".join(f"{number} × {count}" if number > 1 else str(count) for count, number in runs)


def _planner(recipe: Recipe, shape: ModelShape, device: str | None = None) -> str | None:
    """Which constants dynamic context parallelism plans by."""
    tp, rows = recipe.layout.tp, fitting(shape, recipe.layout.tp)
    if not recipe.layout.dynamic_cp:
        return None
    if where := device or ("cpu" if recipe.cluster.device == "cpu" else "" if rows else "a GPU"):
        return f"Dynamic cp: {costs_of(shape, tp, where)[1]}."
    known = "; ".join(f"on {one.device} by those of {one.command}, {one.date}" for one in rows)
    return f"Dynamic cp: {known}; elsewhere planned by default constants."


def _experts(recipe: Recipe, shape: ModelShape) -> str | None:
    if shape.moe is None:
        return None
    experts = shape.moe.experts
    layout, etp = recipe.layout, recipe.layout.expert_tp
    edp = recipe.cluster.ranks // (layout.pp * layout.ep * etp)
    held = experts // layout.ep
    return f"Experts: dp {edp} × ep {layout.ep} × etp {etp}, {held} of {experts} on a rank."


def _rollout(recipe: Recipe) -> str:
    rollout, placement = recipe.rollout, placement_of(recipe)
    layout, count = placement.layout, placement.copies
    if placement.own_processes:
        devices = "device of its own" if rollout.ranks == 1 else "devices of their own"
        where = f"on {rollout.ranks} {devices}" if placement.separate else "on the devices that train"
        return (
            f"Rollout: {rollout.backend}, {count} {'copy' if count == 1 else 'copies'} of tp {layout.tp} × pp {layout.pp} in "
            f"processes of their own, {where}."
        )
    if placement.shares_weights:
        return "Rollout: shares the layout and the weights."
    what = "resharded" if recipe.lora is None else "adapters resharded"
    return f"Rollout: dp {count} × tp {layout.tp} × pp {layout.pp}, {what} each step."


def _installed(recipe: Recipe, command: str) -> str | None:
    backend, here = recipe.rollout.backend, recipe.cluster.address is None
    if not here or backend == "native" or importlib.util.find_spec(backend) is not None:
        return None
    but = f"; the options in rollout.{backend} were not read" if getattr(recipe.rollout, backend) else ""
    return f"Rollout: {backend} is not installed here, which quintet {command} needs (docs/rollout.md){but}."


def _engine(recipe: Recipe, shape: ModelShape) -> str:
    modules = recompute_modules(recipe.engine, shape)
    recompute = recipe.engine.recompute + (f" ({', '.join(modules)})" if modules else "")
    text = f"Engine: {layers_of(recipe)}, recompute {recompute}."
    return text if recipe.engine.fp8 is None else f"{text} {in_8_bits(recipe, shape)}"


def _kernels(recipe: Recipe, shape: ModelShape) -> str | None:
    """Which of TransformerEngine's kernels runs take on devices on which some were measured."""
    if shape.moe is None or not layers_of(recipe).startswith("transformer_engine"):
        return None
    rows = read_kernels()
    devices = sorted({row.device for row in rows if row.experts == experts_of(shape, recipe)})
    told = [with_kernels(recipe, shape, device, EXPERT_KERNELS, rows)[1] for device in devices]
    return "".join(f"{one[0].upper()}{one[1:]}." for one in told if one) or None


def _rows(recipe: Recipe) -> str:
    layout, budget = recipe.layout, recipe.engine.tokens_per_microbatch_per_rank
    aligned = alignment_of(layout, layout.cp, recipe.engine)
    ranks = f" on {layout.cp} ranks" if layout.cp > 1 else ""
    text = f"Micro-batches: up to {aligned.room(budget * layout.cp)} tokens{ranks}"
    padded = []
    if aligned.sequence > 1:
        padded.append(f"each sample padded to a multiple of {aligned.sequence}")
    if aligned.total > aligned.sequence:
        padded.append(f"the row to a multiple of {aligned.total}")
    if aligned.buckets:
        padded.append(f"the row to one of {len(aligned.buckets)} sizes from {aligned.buckets[0]}")
    fewer = "; less of both on fewer ranks" if layout.dynamic_cp else ""
    return f"{text}{', ' if padded else ''}{' and '.join(padded)}{fewer}."


def _memory(recipe: Recipe, shape: ModelShape, command: Command, gpu_gib: float | None) -> str:
    """Of the fullest rank."""
    parts = fullest_rank(recipe, shape, command)
    total = sum(parts.values()) / _GIB
    more = ""
    if gpu_gib is not None and total > gpu_gib:
        more = f" A GPU of {gpu_gib:g} GiB has no room for it: quintet plan --gpu-gib {gpu_gib:g} names what needs less."
    said = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
    of_gpu = (
        " A GPU's: none is here; cluster.device=cpu tells of the CPU." if _lacks_gpu(recipe, "auto") else ""
    )
    besides = "" if command == "sft" else f", the rollout{_packed(setup_of(recipe, shape), recipe)}"
    return (
        f"Memory: about {total:.1f} GiB on the fullest rank while it trains ({said}); what a process "
        f"needs{besides} and fragmentation come on top.{of_gpu}{more}"
    )


def _offload(recipe: Recipe, shape: ModelShape, command: Command) -> str | None:
    """What engine.offload_*=auto comes to, where there may be GPUs of a size that is not known."""
    if _lacks_gpu(recipe, "auto"):
        return None
    offload = Offload(recipe, shape, command)
    return offload.sizes() if offload.kinds else None


def _packed(setup: Setup, recipe: Recipe) -> str:
    """What of a native rollout on a CPU is more than its weights and KV cache."""
    if recipe.rollout.backend != "native":
        return ""
    layout = placement_of(recipe).layout
    own = replace(setup, layout=Layout(tp=layout.tp, pp=layout.pp))
    size = max(packed_bytes(own, stage) for stage in range(layout.pp))
    return f" (with {size / _GIB:.1f} GiB of weights packed for its products)" if size else ""


def checkpoints(recipe: Recipe) -> str:
    """Return where checkpoints go, how large one will be, there and in host memory, and whether there is room."""
    settings = recipe.checkpoint
    if not settings.every_steps:
        return "Checkpoints: none to resume from (checkpoint.every_steps=0); the trained model is saved at the end."
    where = f"{recipe.run.dir}/{recipe.run.name}-<time>/checkpoints"
    text = f"Checkpoints: every {settings.every_steps} steps to {where}, the newest {settings.keep_last} kept"
    shape = shape_of(recipe)
    if shape is None or recipe.model.path is None:  # the vocabulary of a built model is not known yet
        return f"{text}."
    size = checkpoint_bytes(recipe, shape, recipe.model.dtype_on(recipe.cluster.device))
    # One more is written before the oldest goes.
    most, free = size * (settings.keep_last + 1), _free(recipe.run.dir)
    copy = ", and from the first on as much of the hosts' memory (checkpoint.async_save)"
    copy *= settings.async_save
    text += f"; one takes about {size / _GIB:.1f} GiB{copy}, all up to {most / _GIB:.1f} GiB"
    if free < most:
        return f"{text}: warning, {free / _GIB:.1f} GiB are free there."
    return f"{text} of the {free / _GIB:.0f} GiB that are free there."


def _free(path: Path) -> int:
    """Of the file system that `path` is, or will be, on."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free
