"""What is longer than the run it is in is shortened and told, so that a run of any length starts."""

import pytest

from quintet.recipe.length import critic_warmup, fitted, shortened
from quintet.recipe.loader import load_recipe
from quintet.recipe.schema import Optimizer, Recipe, SftOptimizer


@pytest.mark.parametrize(
    ("given", "steps", "made"),
    [
        ({"warmup_steps": 10}, 10, (10, None)),
        ({"warmup_steps": 10}, 5, (5, None)),
        ({"warmup_steps": 10, "schedule": "cosine"}, 5, (5, None)),
        ({"warmup_steps": 60, "decay_steps": 40, "schedule": "wsd"}, 10, (6, 4)),
        ({"warmup_steps": 60, "decay_steps": 40, "schedule": "cosine"}, 1, (0, 1)),
        ({"warmup_steps": 9, "decay_steps": 1, "schedule": "wsd"}, 5, (4, 1)),
        ({"decay_steps": 40, "schedule": "wsd"}, 3, (0, 3)),
        ({"warmup_steps": 2, "decay_steps": 3, "schedule": "wsd"}, 5, (2, 3)),
    ],
)
def test_a_schedule_fits_its_run(given: dict, steps: int, made: tuple[int, int | None]) -> None:
    for kind in (Optimizer, SftOptimizer):
        one = fitted(kind(**given), steps)
        assert (one.warmup_steps, one.decay_steps) == made
        assert type(one) is kind
        assert one.warmup_steps + (one.decay_steps or 0) <= steps


def recipe(**sections: dict) -> Recipe:
    return Recipe.model_validate({"data": {"task": "addition"}} | sections)


def test_what_is_shortened_is_told() -> None:
    short = {"train": {"steps": 5}, "optimizer": {"warmup_steps": 10, "schedule": "cosine"}}
    said = ["optimizer.warmup_steps=10 is more than the 5 optimizer steps there are; shortened to 5."]
    assert list(shortened(recipe(**short), "train")) == said
    assert not list(shortened(recipe(**short), "sft"))
    assert not list(shortened(recipe(**short), "generate"))
    assert not list(
        shortened(recipe(**{**short, "train": {"steps": 5, "mini_batches_per_step": 2}}), "train")
    )
    warm_up = {"sft": {"steps": 4, "optimizer": {"warmup_steps": 3, "decay_steps": 3, "schedule": "wsd"}}}
    said = [
        "sft.optimizer.warmup_steps=3 and decay_steps=3 are more than the 4 optimizer steps there are; shortened to 2 and 2."
    ]
    for command in ("train", "sft"):
        assert list(shortened(recipe(**warm_up), command)) == said


@pytest.mark.parametrize(("steps", "alone"), [(1, 0), (3, 2), (4, 2)])
def test_the_policy_learns_in_the_last_step(steps: int, alone: int) -> None:
    made = recipe(algorithm={"name": "ppo"}, critic={"warmup_steps": 2}, train={"steps": steps})
    assert critic_warmup(made) == alone
    assert bool(list(shortened(made, "train"))) == (alone < 2)


@pytest.mark.parametrize("name", ["laptop_demo", "laptop_dapo", "laptop_ppo"])
def test_our_recipes_can_be_cut_short(name: str) -> None:
    cut = load_recipe(f"recipes/{name}.yaml", ["train.steps=1", "sft.steps=1"])
    assert all("shortened to" in one for one in shortened(cut, "train"))
