"""Weights that are brought to a native rollout arrive, and the proof tells when they did not."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import fingerprints
from quintet.errors import SyncMismatch
from quintet.models.mcore import whole_box
from quintet.rollout.base import Piece, Request, Sampling
from quintet.sync.proof import mismatch
from tests.oracle.models import save
from tests.patience import held_bytes
from tests.rollout.native_ranks import (
    LAYOUTS,
    FileSource,
    change_live,
    flip,
    own_rollout,
    swap,
    swap_live,
    tensors,
)
from tests.rollout.prompts import PROMPTS
from tests.rollout.test_native import greedy_by_transformers

GREEDY = Sampling(temperature=0, max_response_tokens=6)


def told(path: Path) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """What an engine that holds the file's weights would tell."""
    held = tensors(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    return fingerprints((n, s, whole_box(s), held[n]) for n, s in shapes.items()), shapes


def brought(path: Path, layout: dict[str, Any]) -> Any:
    """On one rank: tokens once weights are there, and their fingerprints."""
    rollout = own_rollout(path, layout)
    (wanted,) = rollout.receivers()
    with pytest.raises(RuntimeError, match="no weights"):
        rollout.generate([Request([1])], GREEDY)
    rollout.update_weights(FileSource(tensors(path), wanted))
    samples = rollout.generate([Request(p) for p in PROMPTS], GREEDY)
    return [row[0].response_ids for row in samples], rollout.fingerprints()


CASES = [
    ("qwen3", "tp2"),
    ("qwen3-tied", "pp2"),
    ("qwen2", "tp2-sp"),
    ("qwen3_moe", "tp2-sp"),
    pytest.param("deepseek_v3", "pp2", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "tp2-sp", marks=pytest.mark.slow),
    pytest.param("mixtral", "one", marks=pytest.mark.slow),
    pytest.param("qwen3", "tp2-pp2", marks=pytest.mark.slow),
    pytest.param("glm4_moe", "pp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_brought_weights_generate_and_are_proved(pool, tmp_path, family, layout):
    path = save(family, tmp_path)
    world, sizes = LAYOUTS[layout]
    engine, shapes = told(path)
    ranks = pool.run(brought, world, path, sizes)
    assert [ids for ids, _ in ranks] == [[greedy_by_transformers(p, 6, family) for p in PROMPTS]] * world
    assert compare([engine], [prints for _, (prints, _) in ranks], shapes) == []
    assert all(unreadable == [] for _, (_, unreadable) in ranks)


PREFIX = "model.layers.2.mlp.experts."
NAME, OTHER = PREFIX + "5.up_proj.weight", PREFIX + "6.up_proj.weight"
MISTAKES = {
    "flip before": [NAME],
    "swap before": [NAME, OTHER],
    "drop before": None,
    "flip after": ["model.layers.1.self_attn.k_proj.weight"],
    "swap after": [NAME, OTHER],
    "drop after": ["model.norm.weight"],
}


def mistaken(path: Path, layout: dict[str, Any], mistake: str) -> Any:
    """On one rank: weights arrive with a mistake, or have one made after they are loaded."""
    rollout = own_rollout(path, layout)
    (wanted,) = rollout.receivers()
    held = tensors(path)
    if mistake == "flip before":
        flip(held, NAME)
    elif mistake == "swap before":
        swap(held, NAME, OTHER)
    elif mistake == "drop before":
        here = any(one.name == NAME for one in wanted)
        some = FileSource(held, [one for one in wanted if one.name != NAME])
        if not here:
            rollout.update_weights(some)
            return None
        with pytest.raises(SyncMismatch) as caught:
            rollout.update_weights(some)
        with pytest.raises(RuntimeError, match="did not arrive whole"):
            rollout.score([[1, 2]])
        return str(caught.value)
    rollout.update_weights(FileSource(held, wanted))
    if mistake == "flip after" and rollout.mesh.rank == 0:
        change_live(
            rollout, MISTAKES[mistake][0], lambda x: x.view(torch.int32).view(-1)[7:8].bitwise_xor_(1)
        )
    elif mistake == "swap after" and any(one.name == NAME for one in wanted):
        swap_live(rollout, NAME, OTHER)
    elif mistake == "drop after":
        change_live(rollout, MISTAKES[mistake][0], lambda x: x.zero_())
    return rollout.fingerprints()[0]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_proof_names_what_is_wrong(pool, moe, mistake, layout):
    world, sizes = LAYOUTS[layout]
    if layout == "tp2-pp2":
        sizes = {**sizes, "sp": True}
    engine, shapes = told(moe)
    ranks = pool.run(mistaken, world, moe, sizes, mistake)
    if mistake == "drop before":
        said = [one for one in ranks if one]
        assert said
        assert all(NAME in one for one in said)
        return
    found = compare([engine], ranks, shapes)
    assert [one.name for one in found] == MISTAKES[mistake]
    assert all(name in str(mismatch(found, "rollout-0")) for name in MISTAKES[mistake])


def wrong_sources(path: Path) -> list[str]:
    """On one rank: what is said of each wrong source."""
    rollout = own_rollout(path, {})
    (wanted,) = rollout.receivers()
    good = list(FileSource(tensors(path), wanted).pieces(0))
    good = [
        Piece(p.name, p.shape, p.box, tensors(path)[p.name][tuple(slice(*r) for r in p.box)]) for p in good
    ]
    first, norm = good[0], next(p for p in good if p.box == tuple((0, n) for n in p.shape))
    others = [p for p in good if p is not norm]
    wrongs: list[list[Any]] = [
        [*good, first],
        [Piece("model.other.weight", (2,), ((0, 2),), torch.zeros(2)), *good],
        [Piece(first.name, first.shape, first.box, first.tensor.bfloat16()), *good[1:]],
        [Piece(first.name, (1, 2), first.box, first.tensor), *good[1:]],
        [Piece(first.name, first.shape, first.box, first.tensor[:-1]), *good[1:]],
        [Piece(norm.name, norm.shape, norm.box, norm.tensor.bfloat16()), *others],
        [norm, *good],
    ]
    said, collected = [], []

    class Source:
        def __init__(self, pieces: list[Any]) -> None:
            self._pieces = pieces

        def batches(self, receiver: int) -> Any:
            collected.append(gc.isenabled())
            yield self._pieces

    for wrong in wrongs:
        with pytest.raises(SyncMismatch) as caught:
            rollout.update_weights(Source(wrong))
        said.append(str(caught.value))
        collected.append(gc.isenabled())
    assert collected == len(wrongs) * [False, True]  # only while they are taken
    with pytest.raises(RuntimeError, match="from a source"):
        rollout.update_weights()
    rollout.update_weights(Source(good))
    rollout.score([[1, 2]])
    return said


def test_a_wrong_source_is_refused_in_words(pool, moe):
    twice, unknown, kind, shape, size, kind_of_whole, whole_twice = pool.run(wrong_sources, 1, moe)[0]
    assert "came twice" in twice
    assert "came twice" in whole_twice
    assert "model.other.weight" in unknown
    assert "bfloat16" in kind
    assert "[1, 2] in float32" in shape
    assert "elements came for its part" in size
    assert "bfloat16" in kind_of_whole


def asleep(path: Path, layout: dict[str, Any]) -> None:
    """On one rank: every part of sleeping and waking."""
    rollout = own_rollout(path, layout)
    (wanted,) = rollout.receivers()
    source = FileSource(tensors(path), wanted)
    rollout.update_weights(source)
    requests = [Request(p) for p in PROMPTS]
    before = rollout.generate(requests, GREEDY)
    prints = rollout.fingerprints()
    rollout.wake("weights")  # harmless
    weights = sum(p.untyped_storage().nbytes() for p in rollout.model.parameters())
    assert weights > 0

    cache = rollout._cache
    assert cache is not None
    keys = next(iter(cache.keys.values()))
    assert rollout.sleep(0) == 2 * len(cache.keys) * keys.numel() * keys.element_size() > 0
    assert rollout.sleep(0) == 0  # harmless
    assert rollout._cache is None
    assert sum(p.untyped_storage().nbytes() for p in rollout.model.parameters()) > 0
    scores = rollout.score([[1, 2, 3]])
    with pytest.raises(RuntimeError, match="kv_cache sleep"):
        rollout.generate(requests, GREEDY)
    rollout.update_weights(source)
    assert rollout.fingerprints() == prints
    rollout.wake("kv_cache")
    assert rollout.generate(requests, GREEDY) == before
    rollout.sleep(0)

    assert rollout.sleep(1) == weights
    assert rollout.sleep(2) == 0  # harmless: what is kept stays kept
    rollout.sleep(0)
    assert sum(p.untyped_storage().nbytes() for p in rollout.model.parameters()) == 0
    assert rollout._cache is None
    for call in (
        lambda: rollout.generate(requests, GREEDY),
        lambda: rollout.score([[1, 2]]),
        rollout.fingerprints,
    ):
        with pytest.raises(RuntimeError, match="weights"):
            call()
    with pytest.raises(RuntimeError, match="wake"):
        rollout.update_weights(source)
    assert rollout.receivers() == [wanted]
    assert rollout.wake("weights") == weights
    assert rollout.fingerprints() == prints
    assert rollout.score([[1, 2, 3]]) == scores
    with pytest.raises(RuntimeError, match="kv_cache"):
        rollout.generate(requests, GREEDY)
    rollout.wake("kv_cache")
    assert rollout.generate(requests, GREEDY) == before

    rollout.sleep(2)
    rollout.wake("weights")
    rollout.wake("kv_cache")
    with pytest.raises(RuntimeError, match="forgotten"):
        rollout.generate(requests, GREEDY)
    rollout.update_weights(source)
    assert rollout.fingerprints() == prints
    assert rollout.score([[1, 2, 3]]) == scores
    assert rollout.generate(requests, GREEDY) == before


@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2"])
def test_sleep_and_wake(pool, moe, layout):
    world, sizes = LAYOUTS[layout]
    pool.run(asleep, world, moe, sizes)


def cycles(path: Path, layout: dict[str, Any], count: int) -> list[int]:
    """On one rank: bytes held after each cycle of sleep, wake and update."""
    rollout = own_rollout(path, layout)
    (wanted,) = rollout.receivers()
    source, held = tensors(path), []
    for cycle in range(count):
        rollout.sleep(1 + cycle % 2)
        rollout.wake("weights")
        rollout.update_weights(FileSource(source, wanted))
        rollout.fingerprints()
        rollout.wake("kv_cache")
        rollout.generate([Request(p) for p in PROMPTS], Sampling(max_response_tokens=4))
        gc.collect()
        held.append(held_bytes())
    return held


@pytest.mark.nightly
def test_twenty_cycles_leave_memory_as_it_was(pool, moe):
    world, sizes = LAYOUTS["tp2-sp"]
    for held in pool.run(cycles, world, moe, sizes, 20, timeout_s=600):
        # What leaks grows all the time.
        lowest = [min(held[at : at + 5]) for at in (5, 10, 15)]
        assert min(later - earlier for earlier, later in pairwise(lowest)) < 1 << 20, held


def adapters_separate(path: Path, layout: dict[str, Any]) -> Any:
    """On one rank: a rollout whose frozen part is its own from the start gets adapters from an engine's shards."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.engine import DTYPES
    from quintet.engine.lora import split_adapters
    from quintet.engine.weights import hf
    from quintet.engine.weights.shards import shard_map
    from quintet.models import read_shape
    from quintet.models.lora import LoraShape
    from quintet.recipe import schema
    from quintet.rollout.native.rollout import NativeRollout

    shape, lora, wanted_layout = read_shape(path), LoraShape(rank=2, alpha=4.0), schema.Layout(**layout)
    mesh = build.mesh_of(wanted_layout, dist.get_world_size())
    (model,) = build.build_chunks(shape, wanted_layout, mesh, DTYPES["fp32"], schema.Engine(), lora)
    base, _ = split_adapters(shard_map([model], shape, mesh))
    hf.fill_hf(base, hf.check_hf(shape, path))
    rollout = NativeRollout(model, mesh, slots=8, decode=str)
    (wanted,) = rollout.receivers()
    shapes = {s.name: s.shape for s in rollout._weights.shards()}
    held = {
        name: torch.randn(full, generator=torch.Generator().manual_seed(i)) * 0.1
        for i, (name, full) in enumerate(sorted(shapes.items()))
    }
    with pytest.raises(RuntimeError, match="no weights"):
        rollout.score([[1, 2]])
    rollout.update_weights(FileSource(held, wanted))
    before = rollout.score([[1, 2, 3, 4]])
    for level in (1, 2):  # what is not brought again is not forgotten
        rollout.sleep(level)
        rollout.wake("weights")
        assert rollout.score([[1, 2, 3, 4]]) == before
    rollout.update_weights(FileSource({name: torch.zeros_like(one) for name, one in held.items()}, wanted))
    without, right = rollout.score([[1, 2, 3, 4]]), rollout.fingerprints()[0]
    change_live(rollout, FROZEN, lambda x: x.view(torch.int32).view(-1)[7:8].bitwise_xor_(1))
    return before, without, shapes, right, rollout.fingerprints()[0]


FROZEN = "model.layers.1.self_attn.k_proj.weight"


def test_adapters_arrive_alone_and_the_rest_is_never_forgotten(pool, moe):
    engine, shapes = told(moe)
    ranks = pool.run(adapters_separate, 2, moe, {"tp": 2, "sp": True})
    for before, without, names, *_ in ranks:
        assert names
        assert all(".lora_" in name for name in names)
        assert max(abs(a - b) for a, b in zip(before[0], without[0], strict=True)) > 1e-3
    adapters = ranks[0][2]
    for name, shape in adapters.items():
        box = whole_box(shape)
        engine |= fingerprints([(name, shape, box, torch.zeros(shape))])
    right, wrong = ([rank[at] for rank in ranks] for at in (3, 4))
    assert compare([engine], right, shapes | adapters) == []
    # What never travels is proved as well.
    assert [one.name for one in compare([engine], wrong, shapes | adapters)] == [FROZEN]
