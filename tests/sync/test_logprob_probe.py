"""The probe: rounding passes, two swapped experts or a layer that is lost do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.errors import SyncMismatch
from quintet.sync.logprob_probe import Limits, Movement, check, limits, sequences
from tests.oracle.data import VOCAB
from tests.oracle.models import save
from tests.rollout.native_ranks import LAYOUTS, FileSource, change_live, own_rollout, swap_live, tensors


def test_sequences_are_fixed_and_fit():
    made = sequences(151936, 1000, experts=False)
    assert made == sequences(151936, 64, experts=False)
    assert [len(one) for one in made] == [64] * 8
    assert [len(one) for one in sequences(50, 20, experts=False)] == [20] * 8
    assert [len(one) for one in sequences(50, 20, experts=True)] == [16] * 64
    assert all(0 <= token < 50 for one in sequences(50, 20, experts=True) for token in one)


def test_the_message_says_where():
    ids = [[5, 6, 7], [8, 9, 4]]
    engine = [[-1.0, -2.0], [-3.0, -4.0]]
    assert check(engine, [[-1.0, -2.001], [-3.0, -4.0]], ids, Limits(0.002), "rollout-0") == pytest.approx(
        0.001
    )
    with pytest.raises(
        SyncMismatch,
        match=r"rollout-1 .* of 4 fixed tokens .* of 2 differ .* sequence 1 at position 2 \(token 4\)",
    ):
        check(engine, [[-1.5, -2.0], [-3.0, -9.0]], ids, Limits(0.002), "rollout-1")
    with pytest.raises(SyncMismatch, match=r"sequence 0 at position 1 \(token 6\).*nan of the rollout"):
        check(engine, [[float("nan"), -2.0], [-3.0, -4.0]], ids, Limits(0.25), "rollout-0")


def told(path: Path, trained: dict[str, Any], layout: dict[str, Any], dtype: str) -> list[Any]:
    """On one rank: the engine's scores, and the rollout's: as they are, with two experts swapped, with a layer lost."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema
    from quintet.sync.logprob_probe import engine_scores

    settings: dict[str, Any] = {
        "engine": schema.Engine(tokens_per_microbatch_per_rank=300),
        "optimizer": None,
    }
    engine = Engine(read_shape(path), schema.Layout(**trained), dtype=dtype, **settings)
    engine.load_hf(path)
    rollout = own_rollout(path, layout, dtype=dtype)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    held = {name: one.to(kind) if not name.endswith("bias") else one for name, one in tensors(path).items()}
    (wanted,) = rollout.receivers()
    rollout.update_weights(FileSource(held, wanted))
    ids = sequences(VOCAB, 64, experts=engine.shape.moe is not None)
    found = [engine_scores(engine, ids), rollout.score(ids)]
    names = {one.name for one in wanted}
    first, other = (f"model.layers.2.mlp.experts.{i}.down_proj.weight" for i in (1, 6))
    if any(".experts." in name for name in tensors(path)):
        if first in names:
            swap_live(rollout, first, other)
        found.append(rollout.score(ids))
        if first in names:
            swap_live(rollout, first, other)
    for name in names:  # without these a layer adds nothing
        if name.startswith("model.layers.2.") and ("o_proj" in name or "down_proj" in name):
            change_live(rollout, name, lambda x: x.zero_())
    return [*found, rollout.score(ids)]


CASES = {
    "dense": ("qwen3", {"tp": 2}, "pp2", "fp32"),
    "dense-bf16": ("qwen3", {}, "one", "bf16"),
    "experts": ("qwen3_moe", {"ep": 2}, "tp2-sp", "fp32"),
    "experts-bf16": ("qwen3_moe", {"ep": 2}, "tp2-sp", "bf16"),
    "experts-cp2": ("qwen3_moe", {"cp": 2}, "pp2", "fp32"),
    "latent": ("deepseek_v3", {"pp": 2}, "pp2", "fp32"),
}


def test_a_rollout_that_never_loads_is_found():
    movement, tolerance = Movement(), 0.25
    old, still = [[-1.0, -2.0], [-3.0]], [[-1.1, -2.0], [-3.0]]
    movement.check(old, still, tolerance, "rollout-0")
    movement.check([[-1.005, -2.0], [-3.0]], still, tolerance, "rollout-0")  # too little to be sure
    movement.check([[-1.5, -2.0], [-3.0]], [[-1.6, -2.0], [-3.0]], tolerance, "rollout-1")
    with pytest.raises(SyncMismatch, match=r"rollout-0 did not load .* up to 0\.02"):
        movement.check([[-1.0, -2.0], [-3.02]], still, tolerance, "rollout-0")
    movement.check([[-1.0, -2.0], [-3.02]], [[-1.1, -2.0], [-3.03]], tolerance, "rollout-0")


def test_many_small_differences_are_no_rounding():
    ids = sequences(VOCAB, 64, experts=False)
    engine = [[-1.0] * (len(one) - 1) for one in ids]
    few = [[-1.0] * (len(one) - 2) + [-1.2] for one in ids]
    assert check(engine, few, ids, Limits(0.25), "rollout-0") == pytest.approx(0.2)
    with pytest.raises(SyncMismatch, match=r"all by 0\.1 in the mean .* where 0\.05 is the most"):
        check(engine, [[-1.1] * len(one) for one in engine], ids, Limits(0.25), "rollout-0")


def test_a_router_may_send_few_tokens_elsewhere():
    """In bf16 with experts alone, and as far as it will; not many tokens, nor to what is no number."""
    ids = sequences(VOCAB, 64, experts=False)
    engine = [[-1.0] * (len(one) - 1) for one in ids]

    def sent(every: int, to: float) -> list[list[float]]:
        return [[to if at % every == 0 else -1.01 for at in range(len(one))] for one in engine]

    parted = limits(None, "bf16", experts=True, quantized=False)
    assert check(engine, sent(16, -12.0), ids, parted, "rollout-0") == 11
    for others in (
        limits(None, "bf16", experts=False, quantized=False),
        limits(None, "fp32", experts=True, quantized=False),
    ):
        with pytest.raises(SyncMismatch, match=r"of 32 differ by more than .*, where 0 may"):
            check(
                engine,
                [[-1.0 if b > -2 else b for b in row] for row in sent(16, -12.0)],
                ids,
                others,
                "rollout-0",
            )
    with pytest.raises(SyncMismatch, match=r"of 64 differ by more than 0\.25 .*, where 50 may"):
        check(engine, sent(8, -1.3), ids, parted, "rollout-0")
    with pytest.raises(SyncMismatch, match="nan of the rollout"):
        check(engine, sent(32, float("nan")), ids, parted, "rollout-0")


def test_tokens_sent_elsewhere_may_spoil_what_comes_after_them():
    """One token of a sequence moves all that attend to it: so in four sequences from their second token on."""
    ids = sequences(VOCAB, 64, experts=True)
    engine = [[-1.0] * (len(one) - 1) for one in ids]
    spoilt = [[-3.0 if n < 4 else -1.01] * len(one) for n, one in enumerate(engine)]
    parted = limits(None, "bf16", experts=True, quantized=False)
    assert check(engine, spoilt, ids, parted, "rollout-0") == 2


@pytest.mark.parametrize("case", CASES)
def test_mistakes_show_and_rounding_does_not(pool, tmp_path, case):
    family, trained, layout, dtype = CASES[case]
    world, sizes = LAYOUTS[layout]
    ids = sequences(VOCAB, 64, experts=family != "qwen3")
    within = limits(None, dtype, experts=family != "qwen3", quantized=False)
    ranks = pool.run(told, world, save(family, tmp_path), trained, sizes, dtype)
    engines = [rank[0] for rank in ranks if rank[0] is not None]
    assert engines
    for engine in engines:
        for _, same, *mistakes in ranks:
            assert check(engine, same, ids, within, "rollout-0") < 1
            for wrong in mistakes:
                with pytest.raises(SyncMismatch, match="does not compute"):
                    check(engine, wrong, ids, within, "rollout-0")
