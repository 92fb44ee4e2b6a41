"""What engine.offload_*=auto comes to: no more than has to leave, and always enough where enough can leave."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.models import family_of
from quintet.plan.describe import looks
from quintet.plan.fullest import memories, setup_of
from quintet.plan.offload import GIB, Offload, leaves, spare, with_shares
from quintet.plan.phases import plan_stages
from quintet.plan.rollout import rollout_bytes
from quintet.recipe.offload import KINDS, on_auto
from quintet.recipe.refused import REFUSED_PAIRS
from quintet.recipe.schema import Recipe
from tests.examples import examples
from tests.plan.test_memory import CONFIGS
from tests.recipe.feature_sets import features_on

SHAPES = {
    name: family_of(CONFIGS[name] | sizes).shape_of(CONFIGS[name] | sizes)
    for name, sizes in {
        "qwen3": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "vocab_size": 65_536,
        },
        "qwen3_moe": {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 64,
            "num_hidden_layers": 16,
        },
    }.items()
}
"""Billions of parameters, of which only sizes are asked for."""


def recipe(**sections: Any) -> Recipe:
    given = {"cluster": {"device": "cuda", "ranks": 8}, "rollout": {"backend": "vllm"}}
    return Recipe.model_validate(given | sections)


LAYOUTS = [
    {"tp": 1},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "pp": 4},
    {"pp": 2, "vpp": 4},
    {"cp": 4},
    {"tp": 2, "sp": True, "pp": 2, "cp": 2},
]
ROLLOUTS = [
    {"backend": "vllm", "memory_fraction": 0.5},
    {"backend": "vllm", "memory_fraction": 0.85, "layout": {"tp": 2}},
    {"backend": "sglang", "memory_fraction": 0.3},
    {"backend": "native", "own_processes": True},
    {"backend": "native", "layout": {"tp": 4}},
    {"backend": "native"},
    {"backend": "vllm", "placement": "separate", "ranks": 8},
]
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "grpo", "kl_coef": 0.1},
    {"name": "ppo"},
    {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward"},
]
OPTIMIZERS: list[dict[str, Any]] = [{}, {"cpu_fraction": 0.5}, {"name": "sgd"}]
ASKED: list[dict[str, Any]] = [{}, {"offload_grads": 0.0}, {"offload_optimizer": 0.3}]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    return recipe(
        layout=draw(st.sampled_from(LAYOUTS)),
        rollout=draw(st.sampled_from(ROLLOUTS)),
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        engine={
            "distributed_optimizer": draw(st.booleans()),
            "recompute": draw(st.sampled_from(["none", "full"])),
            "backend": "portable",
            **draw(st.sampled_from(ASKED)),
        },
        model={"dtype": draw(st.sampled_from(["bf16", "fp32"]))},
        lora=draw(st.sampled_from([None, {"rank": 16}])),
    )


COMMANDS = st.sampled_from(["train", "sft", "generate", "eval"])
SIZES = st.lists(st.integers(8 * GIB, 300 * GIB), min_size=2, max_size=6)


@settings(deadline=None, max_examples=examples(150))
@given(recipes(), st.sampled_from(list(SHAPES)), COMMANDS, SIZES)
def test_enough_leaves_where_it_can_and_never_more_of_a_larger_device(
    made: Recipe, family: str, command: Any, sizes: list[int]
) -> None:
    offload = Offload(made, SHAPES[family], command)
    most = before = offload.most

    def fits(total: int, away: dict[str, float]) -> bool:
        return all(
            sum(size - int(away[kind] * size) for kind, size in one.movable.items())
            + one.fixed
            + one.share * total
            + spare(total)
            <= total + 1
            for one in offload.moments
        )

    for total in sorted(sizes):
        shares = offload.shares(total)
        assert fits(total, shares) or not fits(total, most)
        assert all(shares[kind] <= before[kind] for kind in KINDS), (before, shares)
        before = shares


@settings(deadline=None, max_examples=examples(40))
@given(recipes(), st.sampled_from(list(SHAPES)), SIZES)
def test_no_share_could_be_smaller(made: Recipe, family: str, sizes: list[int]) -> None:
    """With one kind on auto, and two percent less of it away, it would not fit; but for what is cut and needs room to come back."""
    for kind in KINDS:
        rest = {f"offload_{one}": 0.0 for one in KINDS if one != kind}
        alone = made.model_copy(
            update={"engine": made.engine.model_copy(update={**rest, f"offload_{kind}": "auto"})}
        )
        offload = Offload(alone, SHAPES[family], "train")
        for total in sizes:
            shares = offload.shares(total)
            if 0 < shares[kind] < 1:
                assert offload.lacking(total, shares | {kind: max(0.0, shares[kind] - 0.02)})


@settings(deadline=None, max_examples=examples(100))
@given(recipes(), st.sampled_from(list(SHAPES)), COMMANDS, st.integers(8 * GIB, 300 * GIB))
def test_what_auto_comes_to_goes_with_the_rest(made: Recipe, family: str, command: Any, total: int) -> None:
    """A pair that is refused where it is written down is not entered by auto either; and numbers are left as they are."""
    shape = SHAPES[family]
    refused = [(pair.first, pair.second) for pair in REFUSED_PAIRS if command in pair.commands]
    resolved, _ = with_shares(made, shape, command, total)
    before, after = features_on(made, shape), features_on(resolved, shape)
    assert not [pair for pair in refused if set(pair) <= after and not set(pair) <= before]
    for kind in KINDS:
        asked, now = (getattr(one.engine, f"offload_{kind}") for one in (made, resolved))
        assert isinstance(now, float)
        assert asked in ("auto", now)


def test_gradients_leave_first_and_parameters_last() -> None:
    offload = Offload(recipe(), SHAPES["qwen3"], "train")
    held = offload.moments[0].movable
    found = [offload.shares(total * GIB) for total in range(8, 300)]
    assert not any(found[-1].values())
    assert found[0] == {"grads": 1.0, "optimizer": 1.0, "params": 1.0}
    for shares in found:
        assert shares["grads"] == 1 or not shares["optimizer"] or not held["optimizer"]
        assert shares["optimizer"] == 1 or not shares["params"]
    assert any(0 < one["grads"] < 1 for one in found)


def test_roles_that_rest_make_room_for_the_one_that_computes() -> None:
    """A critic beside the policy: on a device where generating needs nothing, one of them still has to leave."""
    little = {"backend": "vllm", "memory_fraction": 0.01}
    small, row = SHAPES["qwen3"], {"tokens_per_microbatch_per_rank": 32768, "backend": "portable"}
    one = recipe(rollout=little, engine=row, algorithm={"name": "grpo"})
    both = recipe(rollout=little, engine=row, algorithm={"name": "ppo"})
    alone, beside = Offload(one, small, "train"), Offload(both, small, "train")
    assert [one.name for one in beside.moments] == [
        "generating",
        "bringing weights",
        "training the policy",
        "training the critic",
    ]
    most = max(one.needs(0) for one in beside.moments[2:])
    total = next(n * GIB for n in range(8, 400) if most + spare(n * GIB) <= n * GIB)
    assert not any(beside.shares(total).values())
    assert not any(alone.shares(total - 10 * GIB).values())
    tight = beside.shares(total - 10 * GIB)
    assert any(tight.values())
    assert not beside.lacking(total - 10 * GIB, tight)


def test_a_rollout_that_never_sleeps_is_beside_whoever_computes() -> None:
    rollout = {"backend": "vllm", "memory_fraction": 0.3}
    made = recipe(rollout=rollout, algorithm={"name": "ppo"})
    sleeps, awake = (
        Offload(
            made.model_copy(update={"rollout": made.rollout.model_copy(update={"sleep_level": level})}),
            SHAPES["qwen3"],
            "train",
        )
        for level in (2, 0)
    )
    total = 200 * GIB
    weights = rollout_bytes(made, setup_of(made, SHAPES["qwen3"]), None)[0]
    own = {"generating": 0, "bringing weights": math.ceil(0.3 * total) - weights}
    for one, other in zip(sleeps.moments, awake.moments, strict=True):
        assert other.needs(total) - one.needs(total) == own.get(one.name, math.ceil(0.3 * total))
    alone = Offload(recipe(rollout=rollout | {"sleep_level": 0}), SHAPES["qwen3"], "train")
    assert [one.name for one in alone.moments] == ["generating", "bringing weights", "training the policy"]


def test_the_memory_that_is_told_of_a_gpu_is_with_what_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", GIB // 1024)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    made = recipe(model={"path": str(tmp_path)}, algorithm={"name": "ppo", "kl_coef": 0.1})

    def said(gib: float | None) -> list[float]:
        found = re.findall(
            r"(?:reference policy|critic) ([\d.]+)", looks(made, "train", gib)["memory"]() or ""
        )
        return [float(one) for one in found]

    assert said(None) == [0.0, 0.0]  # all of it may leave
    assert all(said(2000.0 * 1024))

    made_once = mock.Mock(wraps=Offload)
    monkeypatch.setattr("quintet.plan.offload.Offload", made_once)
    monkeypatch.setattr("quintet.plan.describe.Offload", made_once)
    found = looks(made, "train", 96.0)
    assert found["memory"]()
    assert "Of 0.1 GiB" in (found["offload"]() or "")
    assert made_once.call_count == 1  # it takes most of the time of a check


def test_memory_of_a_gpu_is_told_as_such_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    for device, there, told in (("auto", False, True), ("auto", True, False), ("cpu", False, False)):
        monkeypatch.setattr(Path, "exists", lambda path, there=there: there)
        made = recipe(model={"path": str(tmp_path)}, cluster={"device": device}, rollout={})
        said = looks(made, "train")["memory"]() or ""
        assert said.endswith("cluster.device=cpu tells of the CPU.") == told


def test_by_hand() -> None:
    """One rank in bf16 with AdamW: 2 bytes a parameter, 4 of gradients, 12 of state; half of 96 GiB is vLLM's, 8.8 are spare."""
    shape = SHAPES["qwen3"]
    made = recipe(cluster={"device": "cuda", "ranks": 1}, engine={"backend": "portable"})
    held = shape.parameter_count
    room = 96 * GIB - 48 * GIB - spare(96 * GIB)
    assert spare(96 * GIB) == pytest.approx(8.8 * GIB)
    assert 14 * held > room > 2 * held  # gradients do not suffice, with the optimizer's state it does
    shares = Offload(made, shape, "train").shares(96 * GIB)
    assert shares["grads"] == 1.0
    assert shares["params"] == 0.0
    assert shares["optimizer"] == pytest.approx((14 * held - room) / (12 * held), abs=0.011)


def test_room_for_weights_on_their_way() -> None:
    """One rank with adapters, on a device that holds all while it generates: as the parameters travel they are there twice, and half a
    GiB of buckets, so what may leave does; where it does not suffice, that is said."""
    shape = SHAPES["qwen3"]
    made = recipe(
        cluster={"device": "cuda", "ranks": 1},
        engine={"backend": "portable"},
        lora={"rank": 8},
        rollout={"backend": "vllm", "memory_fraction": 0.2},
    )
    offload = Offload(made, shape, "train")
    bringing = offload.moments[1]
    twice = 2 * 2 * shape.parameter_count + GIB // 2
    assert bringing.needs(0) == pytest.approx(twice, rel=0.02)
    total = next(
        n * GIB for n in range(8, 100) if offload.moments[0].needs(n * GIB) + spare(n * GIB) <= n * GIB
    )
    assert bringing.needs(total) + spare(total) > total
    assert offload.lacking(total, offload.shares(total)) > 0
    assert "bringing weights" in offload.reason(total)


@pytest.mark.parametrize(
    ("sections", "command", "free"),
    [
        ({}, "train", KINDS),
        ({}, "generate", KINDS),
        ({}, "sft", ()),
        ({"cluster": {"device": "cpu"}}, "train", ()),
        ({"rollout": {"placement": "separate", "ranks": 1}}, "train", ()),
        ({"rollout": {"backend": "native"}}, "train", ("grads", "optimizer")),
        ({"engine": {"offload_grads": 0.5}}, "train", ("optimizer", "params")),
    ],
)
def test_what_may_leave(sections: dict[str, Any], command: str, free: tuple[str, ...]) -> None:
    assert on_auto(recipe(**sections), command) == free


def test_on_a_cpu_nothing_leaves_that_is_not_asked_for() -> None:
    made = recipe(cluster={"device": "auto"}, engine={"offload_grads": 0.5})
    resolved, why = with_shares(made, SHAPES["qwen3"], "train", None)
    assert (resolved.engine.offload_grads, resolved.engine.offload_optimizer) == (0.5, 0.0)
    assert why is None


def test_the_reason_has_the_figures() -> None:
    made = recipe(rollout={"backend": "vllm", "memory_fraction": 0.5})
    offload = Offload(made, SHAPES["qwen3"], "train")
    total = 80 * GIB
    text = offload.reason(total)
    assert f"{offload.moments[0].needs(total) / GIB:.1f}" in text
    assert "8.0 are a margin" in text
    assert "gradients" in text or "nothing" in text
    assert "nothing leaves devices of" in offload.sizes()
    tight = Offload(recipe(rollout={"backend": "vllm", "memory_fraction": 0.99}), SHAPES["qwen3"], "train")
    assert (
        "are missing even so: a smaller rollout.memory_fraction, or what quintet plan --gpu-gib "
        in tight.reason(total)
    )
    assert "all of it leaves" in tight.sizes()


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        (
            {"backend": "vllm", "memory_fraction": 0.5, "sleep_level": 0},
            "rollout.sleep_level=auto, a smaller rollout.memory_fraction",
        ),
        ({"backend": "native", "layout": {"tp": 1}}, "a smaller rollout.sequences_per_rank"),
    ],
)
def test_where_memory_is_missing_settings_that_the_rollout_reads_are_named(
    rollout: dict[str, Any], named: str
) -> None:
    made = recipe(rollout=rollout, layout={"tp": 2, "sp": True})
    assert f"are missing even so: {named}, or what" in Offload(made, SHAPES["qwen3"], "train").reason(4 * GIB)


def test_a_rollout_stays_awake_where_all_of_training_fits_beside_it() -> None:
    """By hand: training at its fullest, vLLM's share and the margin; of roles one computes while the others rest."""
    shape = SHAPES["qwen3"]
    made = recipe(
        cluster={"device": "cuda", "ranks": 1}, rollout={"backend": "vllm", "memory_fraction": 0.25}
    )
    peak = max(one.peak for one in memories(made, shape, "train")["policy"])
    sizes = [n * GIB for n in range(8, 400)]
    fits = [total for total in sizes if peak + 0.25 * total + spare(total) <= total]
    assert sizes[0] < fits[0] < sizes[-1]
    for total, level in ((fits[0] - GIB, 2), (fits[0], 0)):
        resolved, why = with_shares(made, shape, "train", total)
        assert resolved.rollout.sleep_level == leaves(made, shape, total)[1] == level
        assert why is not None
        assert ("The rollout stays awake: training beside it needs" in why) == (level == 0)
    asked = [
        made.model_copy(update={"rollout": made.rollout.model_copy(update={"sleep_level": level})})
        for level in (0, 2)
    ]
    awake, asleep = (plan_stages(one, shape, fits[0])[0].device for one in asked)
    share = int(0.25 * fits[0])
    more = {"load": 0, "generate": 0, "logprob": share, "train": share, "save": share}
    assert {phase: awake[phase] - asleep[phase] for phase in more} == more
    assert plan_stages(made, shape, fits[0])[0].device == awake
    critic = recipe(
        cluster={"device": "cuda", "ranks": 1},
        rollout={"backend": "vllm", "memory_fraction": 0.25},
        algorithm={"name": "ppo"},
    )
    assert leaves(critic, shape, fits[0])[1] == 2
    assert leaves(critic, shape, 2 * fits[0])[1] == 0


def test_weights_on_their_way_count_beside_a_rollout_that_stays_awake() -> None:
    shape = SHAPES["qwen3"]
    made = recipe(
        cluster={"device": "cuda", "ranks": 1},
        engine={"backend": "portable", "tokens_per_microbatch_per_rank": 16, "recompute": "full"},
        lora={"rank": 8},
        rollout={"backend": "vllm", "memory_fraction": 0.2},
    )
    (held,) = memories(made, shape, "train")["policy"]
    training = Offload(made, shape, "train").training
    assert training is not None
    assert training.needs(0) == held.static + GIB // 2 > held.peak


def test_whether_a_rollout_sleeps_is_said_where_nothing_may_leave() -> None:
    none = {f"offload_{kind}": 0 for kind in KINDS}
    made = recipe(engine=none, rollout={"backend": "vllm", "memory_fraction": 0.25})
    said = {total: with_shares(made, SHAPES["qwen3"], "train", total * GIB)[1] or "" for total in (24, 1000)}
    assert "The rollout sleeps while others compute" in said[24]
    assert "The rollout stays awake" in said[1000]
    assert not any("Offload" in one for one in said.values())
    fixed = made.rollout.model_copy(update={"sleep_level": 2})
    assert with_shares(made.model_copy(update={"rollout": fixed}), SHAPES["qwen3"], "train", GIB)[1] is None


@pytest.mark.parametrize(
    ("sections", "command", "level"),
    [
        ({"rollout": {"backend": "native"}}, "train", 2),
        ({"rollout": {"backend": "sglang"}}, "train", 2),
        ({"rollout": {"backend": "vllm", "sleep_level": 1}}, "train", 1),
        ({"rollout": {"backend": "vllm"}}, "generate", 2),
        ({"rollout": {"backend": "vllm"}, "engine": {"offload_grads": 0.5}}, "train", 2),
        ({"rollout": {"backend": "vllm", "placement": "separate", "ranks": 1}}, "train", 2),
        ({"rollout": {"backend": "vllm", "adapter_sync": "separate"}, "lora": {"rank": 8}}, "train", 0),
    ],
)
def test_which_rollouts_may_stay_awake(sections: dict[str, Any], command: Any, level: int) -> None:
    resolved, _ = with_shares(recipe(**sections), SHAPES["qwen3"], command, 1000 * GIB)
    assert resolved.rollout.sleep_level == level
    assert with_shares(recipe(**sections), SHAPES["qwen3"], command, None)[0].rollout.sleep_level != 0
