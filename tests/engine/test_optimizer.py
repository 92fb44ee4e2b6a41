"""What the recipe says of the optimizer reaches the update: three steps equal torch's own optimizers.

Gradients are written by hand, the same to both sides, so that nothing but the update is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import moe_models
from tests.engine.moe_models import hub_names
from tests.gpus import a_gpu_each
from tests.oracle.reference import model, save

STEPS = 3
BASE: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad_norm": None, "beta2": 0.9}
MULTIPLIERS = {"lr_multipliers": {"*_proj.weight": 0.25, "model.embed_tokens.*": 4.0}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one": (1, {}, False),
    "one-distopt": (1, {}, True),
    "dp2": (2, {}, False),
    "dp2-distopt": (2, {}, True),
    "tp2": (2, {"tp": 2}, True),
    "pp2": (2, {"pp": 2}, True),
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_disk(family: str, path: Path) -> Path:
    return (moe_models.save if "moe" in family else save)(family, path)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The gradient of a Hugging Face tensor at a step, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(step * 10_007 + sum(name.encode()) * 31 + len(name))
    return torch.randn(shape, generator=generator) * 0.05


def train(
    path: Path,
    layout: dict[str, Any],
    distributed: bool,
    recipes: list[dict[str, Any]],
    dtype: str = "fp32",
    section: str = "Optimizer",
) -> list[dict[str, Any]]:
    """On one rank: for each optimizer recipe, STEPS steps from the same weights. Shards after them, and their rates."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(distributed_optimizer=distributed),
        optimizer=getattr(schema, section)(**recipes[0]),
        dtype=dtype,
    )
    found = []
    for recipe in recipes:
        engine.load_hf(path)
        engine.start_optimizer(getattr(schema, section)(**recipe), STEPS)
        info = []
        for step in range(STEPS):
            for shard in engine.shard_map("main_grad"):
                box = tuple(slice(a, b) for a, b in shard.box)
                shard.write(gradient(shard.name, shard.shape, step)[box].to(shard.view.device))
            info.append(engine.optimizer_step())
        found.append(
            {
                "shards": [(s.name, s.box, s.read().float().cpu().clone()) for s in engine.shard_map()],
                "lr": [i["lr"] for i in info],
                "norm": [i["grad_norm"] for i in info],
            }
        )
    return found


def expected(name: str, recipe: dict[str, Any], rates: list[float], dtype: Any = torch.float32) -> Any:
    """The same steps by torch's optimizer on the whole fp32 tensors. Returns them, and the gradient norms."""
    from fnmatch import fnmatch

    whole = (moe_models.model if "moe" in name else model)(name)
    named = hub_names((n, p.detach()) for n, p in whole.named_parameters())
    made = {n: p.to(dtype).float().clone().requires_grad_() for n, p in named.items()}
    factors = {
        n: next((f for pattern, f in recipe.get("lr_multipliers", {}).items() if fnmatch(n, pattern)), 1.0)
        for n in made
    }
    decay = recipe["weight_decay"]
    groups = [{"params": [p], "weight_decay": decay if p.dim() > 1 else 0.0} for p in made.values()]
    kind = recipe.get("name", "adamw")
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=1.0, momentum=recipe.get("momentum", 0.9))
    else:
        made_by = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        betas = (recipe.get("beta1", 0.9), recipe.get("beta2", 0.98))
        optimizer = made_by(groups, lr=1.0, betas=betas, eps=recipe.get("eps", 1e-8))
    norms = []
    for step, rate in enumerate(rates):
        for n, p in made.items():
            p.grad = gradient(n, tuple(p.shape), step)
        limit = recipe["clip_grad_norm"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(made.values(), limit)))
        for group, factor in zip(optimizer.param_groups, factors.values(), strict=True):
            group["lr"] = rate * factor
        optimizer.step()
    return {n: p.detach() for n, p in made.items()}, norms


def assert_equal(name: str, recipe: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Tensor]:
    wanted, norms = expected(name, recipe, results[0]["lr"])
    for result in results:
        assert result["norm"] == pytest.approx(norms, rel=1e-5)
        for tensor, box, shard in result["shards"]:
            want = wanted[tensor][tuple(slice(a, b) for a, b in box)]
            torch.testing.assert_close(shard, want, rtol=1e-5, atol=2e-7, msg=lambda m, t=tensor: f"{t}: {m}")
    return wanted


def test_experts_have_factors_of_their_own(pool, tmp_path):
    a_gpu_each(2)
    path = on_disk("qwen3_moe", tmp_path / "model")
    recipe = BASE | {"lr_multipliers": {"*.mlp.gate.weight": 0.25, "*.experts.*": 0.5}}
    results = pool.run(train, 2, path, {"ep": 2}, True, [recipe])
    assert_equal("qwen3_moe", recipe, [rank[0] for rank in results])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_torch(pool, tmp_path, layout):
    world, sizes, distributed = LAYOUTS[layout]
    a_gpu_each(world)
    path = save("qwen2", tmp_path / "model")
    recipes = [{"name": "adamw"}, {"name": "adam"}, {"name": "adamw", "clip_grad_norm": 0.5, **MULTIPLIERS}]
    if not distributed:
        recipes += [{"name": "sgd"}, {"name": "sgd", **MULTIPLIERS}]
    recipes = [BASE | one for one in recipes]
    results = pool.run(train, world, path, sizes, distributed, recipes)
    for i, recipe in enumerate(recipes):
        assert_equal("qwen2", recipe, [rank[i] for rank in results])


def test_each_number_changes_the_result_as_torch_says(pool, tmp_path):
    path = save("qwen2", tmp_path / "model")
    changes: list[dict[str, Any]] = [
        {},
        {"lr": 2e-2},
        {"weight_decay": 0.3},
        {"beta1": 0.5},
        {"beta2": 0.99},
        {"eps": 1e-2},
        {"clip_grad_norm": 0.1},
        {"lr_multipliers": {"*norm.weight": 3.0}},
        {"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1},
        {"name": "adam"},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.5},
        {"name": "sgd", "weight_decay": 0.3},
    ]
    (results,) = pool.run(train, 1, path, {}, False, [BASE | one for one in changes])
    outcomes = []
    for change, result in zip(changes, results, strict=True):
        outcomes.append(assert_equal("qwen2", BASE | change, [result]))
    flat = [torch.cat([t.flatten() for t in outcome.values()]) for outcome in outcomes]
    for i, one in enumerate(flat):
        for other, change in zip(flat[:i], changes, strict=False):
            assert (one - other).abs().max() > 1e-4, f"{changes[i]} and {change} come to the same"


def test_norms_and_biases_have_no_weight_decay(pool, tmp_path):
    path = save("qwen2", tmp_path / "model")
    recipes = [BASE | {"weight_decay": decay} for decay in (0.0, 0.5)]
    (results,) = pool.run(train, 1, path, {}, True, recipes)
    for (name, _, without), (_, _, decayed) in zip(*(r["shards"] for r in results), strict=True):
        exempt = name.endswith(("norm.weight", ".bias"))
        assert torch.equal(without, decayed) == exempt, name


def test_bf16_parameters_have_fp32_masters(pool, tmp_path):
    """Steps of a thousandth of a weight's rounding add up: bf16 weights alone would not move at all."""
    path = save("qwen2", tmp_path / "model")
    recipe = BASE | {"lr": 2e-4}
    for distributed in (False, True):
        (results,) = pool.run(train, 1, path, {}, distributed, [recipe], "bf16")
        wanted, _ = expected("qwen2", recipe, results[0]["lr"], torch.bfloat16)
        same = [(shard == wanted[n].bfloat16().float()).flatten() for n, _, shard in results[0]["shards"]]
        assert torch.cat(same).float().mean() > 0.999


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"lr_multipliers": {"*.router.weight": 0.1}},
        "critic.optimizer.lr_multipliers: no weight is left for '*.router.weight'",
    ),
    ({"lr_multipliers": {"*.q_proj.weight": 0.1}}, "holds them as one tensor"),
]
if not torch.cuda.is_available():
    REFUSED += [({"cpu_fraction": 0.5}, "critic.optimizer.cpu_fraction=0.5 moves state")]


def refusals(path: Path, recipes: list[dict[str, Any]]) -> list[str]:
    from quintet.errors import UserError

    messages = []
    for recipe in recipes:
        try:
            train(path, {}, True, [recipe], section="CriticOptimizer")  # whose keys are named
        except UserError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages


def test_what_cannot_work_is_refused(pool, tmp_path):
    path = save("qwen2", tmp_path / "model")
    (messages,) = pool.run(refusals, 1, path, [BASE | recipe for recipe, _ in REFUSED])
    for message, (_, part) in zip(messages, REFUSED, strict=True):
        assert part in message


def state_bytes(path: Path, fraction: float) -> dict[str, int]:
    """Bytes of masters and moments by kind of device, after a step."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    optimizer = schema.Optimizer(**BASE, cpu_fraction=fraction)
    engine = Engine(
        read_shape(path), schema.Layout(), engine=schema.Engine(), optimizer=optimizer, dtype="bf16"
    )
    engine.load_hf(path)
    engine.optimizer_step()
    found: dict[str, int] = {}
    for one in engine._optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            for tensor in state.values():
                if torch.is_tensor(tensor) and tensor.dim():
                    found[tensor.device.type] = found.get(tensor.device.type, 0) + tensor.nbytes
    return found


@on_gpu
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_adam_on_the_cpu_equals_adam_on_the_gpu(pool, tmp_path, fraction):
    path = save("qwen2", tmp_path / "model")
    recipe = BASE | MULTIPLIERS
    recipes = [recipe, recipe | {"cpu_fraction": fraction}]
    (results,) = pool.run(train, 1, path, {}, True, recipes, "bf16")
    assert results[0]["norm"] == pytest.approx(results[1]["norm"], rel=1e-5)
    same = []
    for (name, _, plain), (_, _, hybrid) in zip(*(r["shards"] for r in results), strict=True):
        # One rounding of bf16 at most: the two devices' fp32 updates differ in their last bits.
        torch.testing.assert_close(hybrid, plain, rtol=2**-7, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        same.append((hybrid == plain).flatten())
    assert torch.cat(same).float().mean() > 0.99
    (held,) = pool.run(state_bytes, 1, path, fraction)
    on_cpu = held["cpu"] / sum(held.values())
    assert fraction - 1e-6 <= on_cpu <= fraction + 0.3  # whole parameters, the last one beyond the fraction
