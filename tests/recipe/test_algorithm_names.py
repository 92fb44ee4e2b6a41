"""What an algorithm's name sets, and that it is said."""

import pytest

from quintet.recipe.loader import dump_resolved, load_recipe
from quintet.recipe.told import told


def test_dr_grpo_sets_what_the_recipe_does_not(load, tmp_path) -> None:
    made = load("algorithm.name=dr_grpo").algorithm
    assert (made.aggregation, made.normalize_by_std) == ("fixed_length", False)
    made = load("algorithm.name=dr_grpo", "algorithm.aggregation=token_mean").algorithm
    assert (made.aggregation, made.normalize_by_std) == ("token_mean", False)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_resolved(load("algorithm.name=dr_grpo")))
    assert load_recipe(file) == load("algorithm.name=dr_grpo")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [],
            "Algorithm: grpo, clip_low=0.2, clip_high=0.28, aggregation=token_mean, normalize_by_std=true, kl_coef=0.0.",
        ),
        (
            ["algorithm.name=dr_grpo"],
            "Algorithm: dr_grpo, clip_low=0.2, clip_high=0.28, aggregation=fixed_length, normalize_by_std=false, kl_coef=0.0.",
        ),
        (["algorithm.name=dapo"], "kl_coef=0.0, max_refills=3."),
        (["algorithm.name=ppo"], "aggregation=token_mean, gamma=1.0, gae_lambda=0.95, kl_coef=0.0."),
        (
            ["algorithm.name=dr_grpo", "algorithm.normalize_by_std=true"],
            "The name alone would have set normalize_by_std=false.",
        ),
    ],
)
def test_what_a_name_sets_is_told(load, overrides: list[str], said: str) -> None:
    (line,) = told(load(*overrides), "train")
    assert line.startswith("Algorithm: ")
    assert said in line
    assert not any("Algorithm" in line for line in told(load(*overrides), "eval"))


def test_a_model_that_nothing_has_trained_is_told(load) -> None:
    built = load()
    assert built.model.build is not None
    for command in ("generate", "eval"):
        (line,) = told(built, command)
        assert f"quintet {command} sees random weights" in line
    assert all("random" not in line for line in told(built, "train"))
