"""Memory by phase: made of the formulas that tests hold to the engine, and of what a rollout allocates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintet.errors import UserError
from quintet.models import read_shape
from quintet.plan.cards import CARDS
from quintet.plan.fullest import memories, setup_of
from quintet.plan.memory import rank_memory
from quintet.plan.phases import PHASES, READ_AT_ONCE, WRITTEN_AT_ONCE, advice, plan_stages
from quintet.plan.rollout import rollout_bytes, token_bytes, without_room
from quintet.plan.saves import checkpoint_bytes
from quintet.plan.seconds import plan_seconds, samples_of
from quintet.plan.setup import Place
from quintet.recipe.hub import SHAPES, shapes_alone
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of
from quintet.recipe.schema import Rollout
from quintet.rollout.native.cache import SlotCache
from tests.oracle.models import CONFIGS, MOE_CONFIGS

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("deepseek_v3_96_h20", "qwen3_235b_a22b_32_h20", "qwen2_7b_8_h20")


def loaded(name, *overrides):
    with shapes_alone():
        recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
        return recipe, shape_of(recipe)


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("DeepSeek-V3", 671.0, 37.6),
        ("Qwen3-235B-A22B", 235.1, 22.2),
        ("Qwen2-7B", 7.6, 7.6),
    ],
)
def test_shapes_are_those_that_are_published(name, weights, active):
    shape = read_shape(SHAPES / name).without_mtp()
    found = (shape.parameter_count, shape.active_parameter_count)
    assert [round(one / 1e9, 1) for one in found] == [weights, active]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_of_giants_fit(name):
    """On GPUs of 96 GB and hosts of 1.5 TB, while checkpoints are saved and loaded, too."""
    recipe, shape = loaded(name)
    stages = plan_stages(recipe, shape, 89 << 30)
    assert len(stages) == recipe.layout.pp
    assert sum(one.layers for one in stages) == shape.layers
    assert all(set(one.device) == set(PHASES) for one in stages)
    assert max(max(one.device.values()) for one in stages) < 80 << 30
    assert max(max(one.host.values()) for one in stages) < 1397 << 30
    copies = recipe.cluster.ranks // (recipe.layout.tp * recipe.layout.pp)
    held = sum(one.parameters * recipe.layout.tp * copies for one in stages) / (1 if shape.moe else copies)
    assert held == pytest.approx(shape.parameter_count, rel=0.12)  # experts' ranks hold the rest alike


def test_phases_are_made_of_the_formula():
    recipe, shape = loaded("qwen3_235b_a22b_32_h20")
    setup = replace(setup_of(recipe, shape), optimizer=recipe.optimizer)
    for one in plan_stages(recipe, shape):
        memory = rank_memory(setup, Place(pp=one.stage))
        assert one.device["train"] == memory.peak
        assert one.device["load"] == one.device["save"] == memory.static
        assert memory.static < one.device["logprob"] < memory.static + (16 << 30)
        steps = memory.parameters + memory.optimizer + memory.host_optimizer
        # Parameters have left for vLLM to start, and what is read is beside their pinned memory.
        loading = memory.parameters + memory.host_optimizer + memory.read + READ_AT_ONCE
        each = {"load": loading, "steps": steps, "save": steps + WRITTEN_AT_ONCE}
        assert one.host == {moment: 8 * size for moment, size in each.items()}


def test_saves_keep_a_copy_of_what_the_ranks_write():
    """14 bytes of each weight, where they write beside the next steps; nothing where nothing is saved."""
    recipe, shape = loaded("qwen2_7b_8_h20")
    (one,) = plan_stages(recipe, shape)
    assert one.host["save"] - one.host["steps"] == pytest.approx(14 * shape.parameter_count, rel=1e-3)
    memory = rank_memory(replace(setup_of(recipe, shape), optimizer=recipe.optimizer))
    assert (
        memory.saved < memory.read
    )  # each of four reads all the weights that they share, and saves a fourth
    waits, _ = loaded("qwen2_7b_8_h20", "checkpoint.async_save=false")
    assert plan_stages(waits, shape)[0].host == {**one.host, "save": one.host["steps"] + 8 * WRITTEN_AT_ONCE}
    none, _ = loaded("qwen2_7b_8_h20", "checkpoint.every_steps=0")
    assert plan_stages(none, shape)[0].host == {
        "load": 0,
        "steps": one.host["steps"],
        "save": one.host["steps"],
    }
    resumed = none.model_copy(update={"resume": "auto"})
    assert plan_stages(resumed, shape)[0].host == {**one.host, "save": one.host["steps"]}
    on_host, _ = loaded("qwen2_7b_8_h20", "optimizer.cpu_fraction=1")
    less = rank_memory(replace(setup_of(on_host, shape), optimizer=on_host.optimizer))
    # The gradients' copies come with the first step, and moments take the place of what was read.
    assert memory.read - less.read == less.host_optimizer * 3 / 4


def test_what_is_kept_while_generating_counts():
    away, shape = loaded("qwen2_7b_8_h20")
    kept, _ = loaded("qwen2_7b_8_h20", "engine.offload_grads=0.5", "engine.offload_optimizer=0")
    memory = rank_memory(replace(setup_of(away, shape), optimizer=away.optimizer))
    (first,), (second,) = (plan_stages(one, shape, 80 << 30) for one in (away, kept))
    assert first.device["generate"] == int(0.7 * (80 << 30))
    more = second.device["generate"] - first.device["generate"]
    assert more == pytest.approx(memory.gradients / 2 + memory.optimizer)


def test_auto_keeps_what_fits_and_lets_the_rest_leave():
    auto = [f"engine.offload_{kind}=auto" for kind in ("params", "grads", "optimizer")]
    made, shape = loaded("qwen2_7b_8_h20", *auto)
    away, _ = loaded("qwen2_7b_8_h20")
    assert plan_stages(made, shape) == plan_stages(away, shape)
    ((small,), (large,)) = (plan_stages(made, shape, size << 30) for size in (80, 400))
    assert small.device["generate"] < 80 << 30
    memory = rank_memory(replace(setup_of(made, shape), optimizer=made.optimizer))
    assert large.device["generate"] == memory.static + int(0.7 * (400 << 30))
    assert "offload" not in advice(made, shape, "generate")
    kept, _ = loaded("qwen2_7b_8_h20", "engine.offload_grads=0.5")
    assert advice(kept, shape, "generate") == "engine.offload_grads=auto"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        (
            "qwen3_235b_a22b_32_h20",
            ["engine.fp8=blockwise"],
            "experts are 192 wide on a rank of vLLM.* use a smaller rollout.layout.tp, or rollout.layout.ep=8, or",
        ),
        ("qwen3_235b_a22b_32_h20", ["rollout.layout.tp=4", "rollout.layout.ep=4"], None),
        ("deepseek_v3_96_h20", [], "feed-forward parts are 576 wide on a rank"),
        ("deepseek_v3_96_h20", ["rollout.layout.tp=16", "rollout.layout.ep=16"], None),
    ],
)
def test_vllm_in_8_bits_holds_whole_blocks(name, words, said):
    """By the sizes that vLLM's own check (`validate_fp8_block_shape`) refuses."""
    words = [*words, "rollout.quantization=fp8", "rollout.memory_fraction=0.9"]
    if said is None:
        loaded(name, *words)
        return
    with pytest.raises(UserError, match=said):
        loaded(name, *words)


def test_nothing_is_advised_that_is_there_already_or_cannot_help():
    """DeepSeek-V3's recipe recomputes all and has its optimizer on the CPU; Qwen2-7B's has one stage and no experts."""
    recipe, shape = loaded("deepseek_v3_96_h20")
    few = "a smaller engine.tokens_per_microbatch_per_rank"
    assert advice(recipe, shape, "train") == f"fewer layers on that stage (layout.stage_layers), or {few}"
    more = "more ranks, or a larger layout.tp, pp or ep"
    assert {advice(recipe, shape, one, rests=True) for one in ("load", "logprob", "train", "save")} == {more}
    recipe, shape = loaded("qwen2_7b_8_h20", "engine.recompute=none")
    assert advice(recipe, shape, "train") == f"engine.recompute=full, {few}, or optimizer.cpu_fraction=1"
    assert (
        advice(recipe, shape, "save") == "more ranks, a larger layout.tp or pp, or optimizer.cpu_fraction=1"
    )


def test_what_is_advised_is_of_the_rollouts_that_there_are():
    recipe, shape = loaded("qwen3_8b_dapo_8gpu", "rollout.placement=separate", "rollout.ranks=8")
    assert {advice(recipe, shape, one)[:10] for one in ("generate", "sync")} == {"more ranks"}
    native = recipe.model_copy(update={"rollout": Rollout(own_processes=True)})
    assert "fewer rollout.sequences_per_rank" in advice(native, shape, "generate")
    awake, _ = loaded("qwen3_8b_dapo_8gpu", "rollout.sleep_level=0")
    sleeps = [one for one in PHASES if advice(awake, shape, one).startswith("rollout.sleep_level=auto, ")]
    assert sleeps == ["logprob", "train", "sync", "save"]


def test_a_larger_share_is_advised_where_a_device_has_it():
    recipe, shape = loaded("deepseek_v3_96_h20", "rollout.layout.tp=8")
    of = [without_room(recipe, setup_of(recipe, shape), size << 30) or "" for size in (89, 200, 400)]
    assert [one.partition("take ")[2] for one in of] == [
        "a larger rollout.layout.tp",
        "a larger rollout.layout.tp or rollout.memory_fraction",
        "",
    ]


def test_small_models_have_small_buckets_and_logits(tmp_path):
    """A model of 0.4 MB, and 99 words for each of 64 tokens: neither fills a bucket or a chunk."""
    write_config(tmp_path, "qwen3")
    words = ["cluster.device=cuda", "rollout.own_processes=true", "engine.tokens_per_microbatch_per_rank=64"]
    words += ["rollout.max_response_tokens=16", "data.max_prompt_tokens=16"]
    with shapes_alone():
        recipe = load_recipe(str(tmp_path), words)
        shape = shape_of(recipe)
    (one,) = plan_stages(recipe, shape)
    memory = rank_memory(replace(setup_of(recipe, shape), optimizer=recipe.optimizer))
    weights, _ = rollout_bytes(recipe, setup_of(recipe, shape), None)
    assert one.device["sync"] == memory.parameters + weights + 2 * 2 * shape.parameter_count
    in_8_bits = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"quantization": "fp8"})}
    )
    layers = shape.layers * (3 * shape.hidden_size * shape.ffn_hidden_size + 64 * 16 * (8 + 4 + 4 + 8))
    assert weights - rollout_bytes(in_8_bits, setup_of(recipe, shape), None)[0] == layers
    assert one.device["logprob"] < one.device["train"]


@pytest.mark.parametrize("more", ["algorithm.kl_coef=0.001", "algorithm.name=ppo"])
def test_other_roles_count(more):
    """A reference policy has parameters, a critic all that is trained; half of the parameters and all states leave."""
    words = ["engine.offload_params=0.5", "engine.offload_grads=0", "engine.offload_optimizer=1"]
    alone, shape = loaded("qwen2_7b_8_h20", *words)
    beside, _ = loaded("qwen2_7b_8_h20", *words, more)
    (one,), (other,) = (plan_stages(recipe, shape, 89 << 30) for recipe in (alone, beside))
    setup = setup_of(beside, shape)
    critic = replace(setup, shape=shape.as_value_model(), optimizer=beside.optimizer)
    held = rank_memory(critic if "ppo" in more else replace(setup, optimizer=None))
    assert {other.device[phase] - one.device[phase] for phase in PHASES} == {
        held.parameters // 2 + held.gradients
    }
    assert other.host["steps"] - one.host["steps"] == 8 * (held.parameters // 2 + held.optimizer)
    kept = [plan.host["save"] - plan.host["steps"] for plan in (one, other)]
    assert kept[1] - kept[0] == 8 * held.saved  # nothing of a reference policy
    assert bool(held.saved) is ("ppo" in more)
    # One after another: what is read is of one role, and the others have left meanwhile, the policy with its moments.
    policy = rank_memory(replace(setup, optimizer=beside.optimizer))
    loading = [plan.host["load"] // 8 - READ_AT_ONCE for plan in (one, other)]
    first = policy.parameters // 2 + policy.optimizer // 3 + policy.read
    assert loading == pytest.approx([first, first + held.parameters // 2 + held.optimizer], rel=1e-6)


NATIVE = ("rollout.backend=native", "rollout.memory_fraction=0.5")


@pytest.mark.parametrize(
    ("more", "away"),
    [
        (["rollout.sleep_level=1"], ["parameters", "masters", "parameters"]),
        ([*NATIVE, "rollout.own_processes=true"], ["parameters", "masters"]),
        ([*NATIVE, "engine.offload_params=0"], []),
    ],
)
def test_what_leaves_before_a_load_stays_in_host_memory(more, away):
    """Rollouts in processes of their own start, and sleep, before: one that sleeps at level 1 has a copy of its weights."""
    recipe, shape = loaded("qwen2_7b_8_h20", *more)
    (one,) = plan_stages(recipe, shape)
    memory = rank_memory(replace(setup_of(recipe, shape), optimizer=recipe.optimizer))
    assert memory.masters == memory.optimizer / 3
    before = sum(getattr(memory, name) for name in away)
    assert one.host["load"] // 8 == pytest.approx(before + memory.read + READ_AT_ONCE, rel=0.01)


def write_config(path: Path, family: str) -> None:
    """Write the config.json of a tiny model, as it would be published."""
    (CONFIGS | MOE_CONFIGS)[family].save_pretrained(path)
    text = (path / "config.json").read_text()
    names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    (path / "config.json").write_text(text.replace("{", f'{{"architectures": ["{names[family]}"],', 1))


def test_a_critic_of_its_own_directory_is_as_large_as_that(tmp_path):
    """In memory and in checkpoints."""
    write_config(tmp_path, "qwen3")
    words = ["algorithm.name=ppo", "engine.offload_params=0"]
    alone, shape = loaded("qwen2_7b_8_h20", words[1])
    same, _ = loaded("qwen2_7b_8_h20", *words)
    small = same.model_copy(update={"critic": same.critic.model_copy(update={"path": tmp_path})})
    count = read_shape(tmp_path).as_value_model().parameter_count
    assert (
        count < memories(small, shape, "train")["critic"][0].parameters < 2 * count
    )  # half of most on a rank
    less, more = (plan_stages(one, shape, 89 << 30)[0].device["generate"] for one in (alone, small))
    assert 0 < more - less < 10 * count
    trained = [
        plan_seconds(one, shape, CARDS["H20"], samples_of(one, None))["train"].flops
        for one in (alone, same, small)
    ]
    assert trained[0] < trained[2] < 1.001 * trained[0] < 1.9 * trained[0] < trained[1]
    policy, both, other = (checkpoint_bytes(recipe, shape, "bf16") for recipe in (alone, same, small))
    assert other - policy == (2 + 4 + 8) * count
    assert both - policy == (2 + 4 + 8) * shape.as_value_model().parameter_count


@pytest.mark.parametrize(("family", "tp"), [("qwen3", 2), ("qwen2", 1), ("deepseek_v3", 2)])
def test_a_token_takes_what_the_cache_allocates(tmp_path, family, tp):
    write_config(tmp_path, family)
    shape = read_shape(tmp_path)
    width = torch.bfloat16.itemsize
    cache = SlotCache(
        [0, 1, 2], 4, 32, shape.kv_heads // tp, shape.head_dim, torch.bfloat16, torch.device("cpu")
    )
    assert cache.nbytes == 3 * 4 * 32 * token_bytes(shape, tp, width, latent=False)


def test_latents_are_kept_once():
    """512 + 64 numbers of 2 bytes a token and layer, published of DeepSeek-V3."""
    recipe, shape = loaded("deepseek_v3_96_h20")
    setup = setup_of(recipe, shape)
    weights, cache = rollout_bytes(recipe, setup, None)
    assert cache == 256 * (2048 + 8192) * 61 * (512 + 64) * 2
    assert weights == pytest.approx(
        2 * shape.parameter_count / 32, rel=0.06
    )  # down-projections are whole on each
