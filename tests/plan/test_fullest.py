"""What the fullest rank needs, what would need less, and the message of a rank that had not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from quintet.data.tokenizer import build_char_tokenizer
from quintet.plan.fullest import cheaper, cheaper_rollout, fullest_rank, setup_of
from quintet.plan.offload import with_shares
from quintet.plan.out_of_memory import GIB, Held, Needs, out_of_memory
from quintet.plan.rollout import rollout_bytes, without_room
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of
from tests.oracle.models import of_config
from tests.plan.test_memory import CONFIGS


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    model = tmp_path / "model"
    of_config(AutoConfig.for_model("qwen3", **CONFIGS["qwen3"]), 0).save_pretrained(model)
    build_char_tokenizer("0123456789", model)
    return lambda *overrides: load_recipe(
        None,
        [
            f"model.path={model}",
            "data.task=addition",
            "cluster.ranks=4",
            "cluster.device=cuda",
            "engine.recompute=none",
            "engine.tokens_per_microbatch_per_rank=4096",
            *overrides,
        ],
    )


def test_settings_that_need_less_are_sound_and_need_it(recipe: Any) -> None:
    made = recipe()
    shape = shape_of(made)
    assert shape is not None
    now = sum(fullest_rank(made, shape, "train").values())
    found = cheaper(made, shape, "train")
    assert {
        "engine.recompute=full",
        "engine.tokens_per_microbatch_per_rank=2048",
        "engine.recompute=selective engine.recompute_modules=[mlp_act,layernorm]",
    } <= {key for key, _ in found}
    assert not any(key.startswith("layout.ep") for key, _ in found)  # it has no experts
    for setting, needs in found:
        other = recipe(*setting.split())  # raises where it is not sound
        assert sum(fullest_rank(other, shape, "train").values()) == needs < 0.95 * now


def test_what_is_wrong_already_is_no_reason_to_name_nothing(recipe: Any) -> None:
    """Data files are not on every node."""
    made = recipe()
    shape = shape_of(made)
    assert shape is not None
    elsewhere = made.model_copy(
        update={"data": made.data.model_copy(update={"task": "jsonl", "train_path": "/nowhere.jsonl"})}
    )
    assert cheaper(elsewhere, shape, "train")


def test_the_message_names_what_held_how_much() -> None:
    held = Held(total=80 * GIB, tensors=50 * GIB, kept=4 * GIB, elsewhere=25 * GIB)
    settings = [(f"engine.recompute={n}", n * GIB) for n in range(6)]
    text = out_of_memory(
        "train", "2.50 GiB more were asked for", held, Needs({"parameters": 3 * GIB}, settings)
    )
    assert text == (
        "out of GPU memory in train (2.50 GiB more were asked for). Of the device's 80.0 GiB this process's tensors held 50.0, its "
        "allocator kept 4.0 for more, and 25.0 were other processes' (a rollout beside it) and CUDA's own.\n"
        "While it trains the fullest rank needs about 3.0 GiB by the memory formula (parameters 3.0), and a rollout on top.\n"
        "What needs less, by the same formula: engine.recompute=0 (0.0 GiB); engine.recompute=1 (1.0 GiB); engine.recompute=2 (2.0 GiB); "
        "engine.recompute=3 (3.0 GiB).\n"
        "A rollout in a process of its own takes less with a smaller rollout.memory_fraction, a native one with a smaller "
        "rollout.sequences_per_rank, and with rollout.sleep_level=2 little while others compute."
    )
    assert out_of_memory("generate", "no room", None, Needs()) == "out of memory in generate (no room)."


@pytest.mark.parametrize(
    ("planned", "sizes", "said"),
    [
        (60, [70, 50, 40], " and fits 52.2 GiB, by the same formula: s1 (50.0 GiB); s2 (40.0 GiB)."),
        (90, [70, 60], ", by the same formula: s1 (60.0 GiB); s0 (70.0 GiB)."),
        (50, [48, 30, 40], ", by the same formula: s1 (30.0 GiB); s2 (40.0 GiB); s0 (48.0 GiB)."),
    ],
    ids=["fits", "nothing fits", "was to fit"],
)
def test_what_fits_is_named_first_as_it_costs(planned: int, sizes: list[int], said: str) -> None:
    """Where nothing would fit, or what ran out of memory was to fit by the same formula, what needs least comes first."""
    held = Held(total=80 * GIB, tensors=50 * GIB, kept=4 * GIB, elsewhere=25 * GIB)
    settings = [(f"s{n}", size * GIB) for n, size in enumerate(sizes)]
    assert f"What needs less{said}" in out_of_memory(
        "train", "x", held, Needs({"all": planned * GIB}, settings)
    )


def test_what_costs_little_is_named_before_what_costs_more(recipe: Any) -> None:
    made = recipe()
    shape = shape_of(made)
    assert shape is not None
    keys = [key for key, _ in cheaper(made, shape, "train")]
    without, selective, full = (
        "engine.recompute=selective engine.recompute_modules=[mlp_act,layernorm]",
        "engine.recompute=selective",
        "engine.recompute=full",
    )
    assert keys.index(without) < keys.index(selective) < keys.index(full)
    made = recipe(*without.split())
    keys = [key for key, _ in cheaper(made, shape, "train")]
    assert "engine.recompute=selective engine.recompute_modules=null" in keys


def test_advice_goes_by_what_is_decided_and_is_sound_as_it_was_written(recipe: Any) -> None:
    asked = recipe("algorithm.name=ppo", "algorithm.kl_coef=0.1")
    shape = shape_of(asked)
    assert shape is not None
    decided, _ = with_shares(asked, shape, "train", 2000 * GIB)  # nothing leaves: every role stays
    advice = dict(cheaper(decided, shape, "train", asked))
    for setting in ("engine.recompute=full", "engine.tokens_per_microbatch_per_rank=2048"):
        other = recipe("algorithm.name=ppo", "algorithm.kl_coef=0.1", setting)
        left = sum(fullest_rank(other, shape, "train").values())  # with all others away
        stays = sum(fullest_rank(decided, shape, "train").values()) - sum(
            fullest_rank(asked, shape, "train").values()
        )
        assert stays > 0
        assert advice[setting] == left + stays


def test_what_is_decided_breaks_no_rule_that_advice_is_judged_by(recipe: Any) -> None:
    """Parameters that a rollout of the trainer's own reads never leave: rollout.layout has to say otherwise first."""
    asked = recipe("rollout.layout.tp=2")
    shape = shape_of(asked)
    assert shape is not None
    decided, _ = with_shares(asked, shape, "train", 4 * GIB)
    assert decided.engine.offload_params == 1.0
    assert dict(cheaper(decided, shape, "train", asked)).keys() >= dict(cheaper(asked, shape, "train")).keys()


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (["rollout.own_processes=true"], {"rollout.sequences_per_rank=128", "rollout.layout.tp=2"}),
        (
            ["rollout.own_processes=true", "rollout.layout.tp=4"],
            {"rollout.sequences_per_rank=128"},  # of 4 ranks none can be a copy of 8
        ),
        (
            ["rollout.backend=vllm"],
            {
                "rollout.memory_fraction=0.37",
                "rollout.memory_fraction=0.25",
                "rollout.layout.tp=2 rollout.memory_fraction=0.37",
                "rollout.layout.tp=2 rollout.memory_fraction=0.25",
            },
        ),
    ],
    ids=["native", "native on all ranks", "vllm"],
)
def test_settings_with_which_a_rollout_needs_less(recipe: Any, backend: list[str], named: set[str]) -> None:
    made = recipe(*backend)
    shape = shape_of(made)
    assert shape is not None
    found = dict(cheaper_rollout(made, shape, GIB))
    assert found.keys() == named
    now = sum(rollout_bytes(made, setup_of(made, shape), GIB))
    for setting, needs in found.items():
        other = recipe(*backend, *setting.split())
        assert sum(rollout_bytes(other, setup_of(other, shape), GIB)) == needs < 0.95 * now


def test_a_share_that_weights_do_not_fit_is_not_named(recipe: Any) -> None:
    made = recipe("rollout.backend=vllm", "rollout.sequences_per_rank=1", "rollout.memory_fraction=0.5")
    shape = shape_of(made)
    assert shape is not None
    setup = setup_of(made, shape)
    weights, sample = rollout_bytes(made, setup, None)
    device = int(1.9 * (weights + sample))  # half of which is too little
    assert without_room(made, setup, device)
    found = [key for key, _ in cheaper_rollout(made, shape, device)]
    assert found[0] == "rollout.layout.tp=2"
    assert not any(key.startswith("rollout.memory_fraction") for key in found)


def test_the_message_of_a_rollout_is_about_rollouts() -> None:
    held = Held(total=80 * GIB, tensors=30 * GIB, kept=4 * GIB, elsewhere=40 * GIB)
    needs = Needs(
        {"weights": 3 * GIB, "KV cache": 37 * GIB},
        [("rollout.memory_fraction=0.3", 24 * GIB)],
        doing="generates",
        on_top="what it computes",
        others="training state",
        less_of_others="Less stays with engine.offload_params.",
    )
    assert out_of_memory("generate", "x", held, needs) == (
        "out of GPU memory in generate (x). Of the device's 80.0 GiB this process's tensors held 30.0, its allocator kept 4.0 for more, and "
        "40.0 were other processes' (training state) and CUDA's own.\n"
        "While it generates the fullest rank needs about 40.0 GiB by the memory formula (weights 3.0, KV cache 37.0), and what it computes on "
        "top.\n"
        "What needs less and fits 38.0 GiB, by the same formula: rollout.memory_fraction=0.3 (24.0 GiB).\n"
        "Less stays with engine.offload_params."
    )
