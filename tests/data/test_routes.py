"""What is refused of a rollout's routes, and that a sample's are its own wherever they arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quintet.data.batch import concat, make_batch, select, tokens
from quintet.data.routes import RouteSizes, check_seals, checked_routes, of_layers, seals
from quintet.errors import QuintetError

SIZES = RouteSizes(layers=3, experts=8, top_k=2)


def drawn(tokens: int, seed: int = 0, sizes: RouteSizes = SIZES) -> np.ndarray:
    generator = np.random.default_rng(seed)
    order = generator.random((tokens - 1, sizes.layers, sizes.experts)).argsort(-1)
    return order[..., : sizes.top_k].astype(np.int16)


def test_good_routes_become_small():
    routes = drawn(6)
    small = checked_routes(routes, 6, SIZES, "sample 4")
    assert small.dtype == np.uint8
    assert (small == routes).all()
    assert checked_routes(drawn(1), 1, SIZES, "of one token").shape == (0, 3, 2)
    assert [SIZES._replace(experts=n).dtype for n in (256, 257)] == [np.uint8, np.int16]
    large = SIZES._replace(experts=300)
    assert checked_routes(drawn(6, sizes=large), 6, large, "sample 4").dtype == np.int16


def changed(at: tuple[int, int, int], value: int) -> np.ndarray:
    routes = drawn(6)
    routes[at] = value
    return routes


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (None, "told no routes of it"),
        (drawn(5), r"\[4, 3, 2\], and those of 6 tokens are \[5, 3, 2\]"),
        (drawn(6)[:, :2], r"\[5, 2, 2\]"),
        (drawn(6)[..., :1], r"\[5, 3, 1\]"),
        (changed((2, 1, 0), 8), "to the experts 0 to 8, and there are 8"),
        (changed((2, 1, 0), -1), "to the experts -1 to 7"),
        (changed((2, 1, 0), int(drawn(6)[2, 1, 1])), r"token 2 goes to expert \d twice, in the 2. layer"),
    ],
)
def test_bad_routes_are_refused_by_their_sample(routes, says):
    with pytest.raises(QuintetError, match=f"sample 4: .*{says}"):
        checked_routes(routes, 6, SIZES, "sample 4")


def batch(lengths: list[int], start: int = 0):
    ids = [[start + 7 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    routes = [drawn(n, seed=start + i).astype(np.uint8) for i, n in enumerate(lengths)]
    made = make_batch(ids, [1] * len(lengths), routes=routes)
    made["route_seals"] = seals(made)
    return made


def test_seals_travel_with_samples_and_layers():
    one, other = batch([5, 9, 1, 5]), batch([5, 2], start=100)
    joined = concat([select(one, [3, 2, 0]), select(other, [1, 0])])
    check_seals(joined, joined["route_seals"], [3, 2, 0, 5, 4])
    mine = of_layers(joined, [1, 2])
    assert torch.equal(tokens(mine, "routes"), tokens(joined, "routes")[:, 1:])
    check_seals(mine, mine["route_seals"], [3, 2, 0, 5, 4])
    assert of_layers(joined, []).get("route_seals").shape == (5, 0)
    plain = of_layers(joined, None)
    assert "routes" not in plain
    assert "route_seals" not in plain
    assert of_layers(plain, [0]) is plain


@pytest.mark.parametrize(
    "what",
    [
        "another sample's",
        "one token late",
        "one token late among the same words",
        "in one layer alone",
        "another layer's",
        "in another order",
        "other ids",
    ],
)
def test_other_routes_break_the_seal(what):
    made = batch([5, 9, 5])
    flat = tokens(made, "routes")
    if "same words" in what:
        tokens(made, "input_ids")[14:] = 3
    sealed = seals(made)
    if what == "another sample's":  # of the same length
        flat[:4], flat[12:] = flat[12:].clone(), flat[:4].clone()
    elif what.startswith("one token late"):
        flat[12:] = flat[12:].roll(1, 0)
    elif what == "in one layer alone":
        flat[12:, 1] = flat[12:, 1].roll(1, 0)
    elif what == "in another order":
        flat[12:] = flat[12:].flip(-1)
    elif what == "another layer's":
        flat[12:] = flat[12:].roll(1, 1)
    else:
        tokens(made, "input_ids")[15] += 1
    named = 4 if what == "another sample's" else 6
    with pytest.raises(QuintetError, match=f"sample {named}: its routes are not those that the rollout told"):
        check_seals(made, sealed, [4, 5, 6])
