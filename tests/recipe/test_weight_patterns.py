"""Patterns of Hugging Face names: the first match counts, and a pattern that counts for nothing is an error."""

from __future__ import annotations

import pytest

from quintet.errors import UserError
from quintet.recipe.weight_patterns import check_lr_multipliers, lr_factor

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
GATE, HEAD = "model.layers.0.mlp.gate.weight", "lm_head.weight"
TENSORS = [(Q, K), (GATE,), (HEAD,)]


def test_the_first_match_counts():
    assert lr_factor([GATE], {"*.gate.weight": 0.1, "*": 2.0}) == 0.1
    assert lr_factor([HEAD], {"*.gate.weight": 0.1, "*": 2.0}) == 2.0
    assert lr_factor([HEAD], {"*.gate.weight": 0.1}) == 1.0


def test_one_tensor_has_one_factor():
    assert lr_factor([Q, K], {"*_proj.weight": 0.5}) == 0.5
    with pytest.raises(UserError, match=r"q_proj.weight has factor 0.5, .*k_proj.weight has factor 1,"):
        lr_factor([Q, K], {"*.q_proj.weight": 0.5})


@pytest.mark.parametrize(
    "patterns",
    [{"*.router.weight": 0.1}, {"*.Gate.weight": 0.1}, {"gate": 0.1}, {"*": 1.0, "lm_head.*": 0.1}],
)
def test_a_pattern_that_counts_for_nothing_is_an_error(patterns):
    with pytest.raises(UserError, match="no weight is left for '" + list(patterns)[-1].replace("*", r"\*")):
        check_lr_multipliers(TENSORS, patterns)


def test_patterns_that_count_are_none():
    check_lr_multipliers(TENSORS, {"lm_head.*": 0.1, "*": 1.0})
