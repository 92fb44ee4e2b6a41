"""Experts and latent attention equal transformers, on one rank and where experts are spread over several.

Variants of the two architectures that the layout suite does not go through: norms of weights, groups, YaRN, attention
without a query latent. Weights are drawn so that no token is near a tie between experts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.packing.plan import RankCell
from tests.engine.moe_models import FAMILIES, VOCAB, hub_names, model, save

PROMPT = 2
LENGTHS = [9, 6, 17, 4, 12, 8]
TOKENS = sum(n - PROMPT for n in LENGTHS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")

    return lambda name: save(name, root / name)


def token_ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@cache
def reference(name: str) -> tuple[float, dict[str, Tensor], Tensor]:
    """Mean negative log-likelihood, its gradients by the names on disk, log-probs flat."""
    made, flat = model(name), []
    for ids in token_ids():
        x = torch.tensor(ids)
        log_p = made(input_ids=x[None]).logits[0].log_softmax(-1)
        of_next = log_p[:-1].gather(1, x[1:, None])[:, 0]
        flat.append(torch.cat([torch.zeros(PROMPT), of_next[PROMPT - 1 :]]))
    logprobs = torch.cat(flat)
    loss = -logprobs.sum() / TOKENS
    loss.backward()
    gradients = hub_names(((n, p.grad) for n, p in made.named_parameters()), name)
    return loss.item(), gradients, logprobs.detach()


class MeanNll:
    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -(outputs.logprobs * fields["loss_mask"]).sum() / TOKENS, {}


def run_rank(path: Path, layout: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    """On one rank: forward, forward_backward, one step."""
    from quintet.data.batch import make_batch, select
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.packing.align import alignment_of
    from quintet.packing.plan import plan_microbatches, rank_cells
    from quintet.recipe import schema

    settings = {"tokens_per_microbatch_per_rank": 32, "distributed_optimizer": False} | recipe
    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(**settings),
        optimizer=schema.Optimizer(lr=1e-3, clip_grad_norm=None),
        dtype="fp32",
    )
    engine.load_hf(path)
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    mesh, budget = engine.mesh, engine.recipe.tokens_per_microbatch_per_rank
    dp, cp = mesh.at("dp"), mesh.sizes.cp
    align = alignment_of(engine.layout, cp, engine.recipe)
    plan = plan_microbatches(LENGTHS, dp=mesh.sizes.dp, budget=budget, alignment=align, cp=cp)
    cells = rank_cells(plan.local(dp), mesh.at("cp"))
    mine = select(batch, plan.samples_of(dp))
    forward = engine.forward(mine, cells)
    result = engine.forward_backward(mine, cells, MeanNll())
    gradients = [(s.name, s.box, s.read().clone()) for s in engine.shard_map("main_grad")]
    return {
        "gradients": gradients,
        "loss": result.loss if result and engine.mesh.owns_output else 0.0,
        "norm": engine.optimizer_step()["grad_norm"],
        "samples": plan.samples_of(dp),
        "forward": forward,
    }


def check(name: str, results: list[dict[str, Any]]) -> None:
    """Loss, every gradient, their norm and the log-probs of all ranks against transformers."""
    loss, gradients, logprobs = reference(name)
    assert sum(r["loss"] for r in results) == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    starts, seen = torch.tensor([0, *LENGTHS]).cumsum(0).tolist(), set()
    for result in results:
        for key, box, found in result["gradients"]:
            want = gradients[key][tuple(slice(a, b) for a, b in box)]
            error = (found - want).norm() / (want.norm() + 1e-6)
            assert error < 1e-4, f"{key} {box}: relative gradient error {error:.1e}"
            seen.add(key)
        assert result["norm"] == pytest.approx(norm, rel=1e-4)
        if result["forward"] is not None:
            at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in result["samples"]])
            torch.testing.assert_close(result["forward"].logprobs, logprobs[at], rtol=1e-5, atol=1e-5)
    assert seen == set(gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_equals_transformers(pool, directory, name):
    check(name, pool.run(run_rank, 1, directory(name), {}))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "tp2-sp-ep2-etp2": (4, {"tp": 2, "sp": True, "ep": 2}),
    "tp2-sp-ep2-etp1": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    "tp2-sp-etp1": (2, {"tp": 2, "sp": True, "etp": 1}),
    "etp2": (2, {"etp": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
}


@pytest.mark.slow  # tests/oracle runs the like in `make test`
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_transformers(pool, directory, name, layout):
    world, sizes = LAYOUTS[layout]
    check(name, pool.run(run_rank, world, directory(name), sizes))


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"tp": 2}, marks=pytest.mark.slow), {"tp": 2, "sp": True}, {"cp": 2}],
    ids=str,
)
def test_latent_attention_without_experts(pool, directory, layout):
    """Without experts, tp needs no sp: the rotary key's gradient is then summed another way."""
    name = "deepseek_v3-dense"
    check(name, pool.run(run_rank, 2, directory(name), layout, cp_comm="all_to_all"))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {}),
        (2, {"ep": 2}),
        pytest.param(4, {"ep": 2, "etp": 2}, marks=pytest.mark.slow),
        (4, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
        (4, {"ep": 4}),
    ],
    ids=str,
)
def test_experts_and_ranks_without_a_token(pool, directory, world, layout):
    name = "deepseek_v3-idle"
    check(name, pool.run(run_rank, world, directory(name), layout))


ALL = ["core_attn", "mlp", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("qwen3_moe", {"recompute": "full"}),
        ("deepseek_v3", {"recompute": "full"}),
        ("deepseek_v3-yarn", {"recompute": "selective", "recompute_modules": ALL}),
        ("deepseek_v3", {"recompute": "selective", "recompute_modules": ["moe", "mla_up_proj"]}),
        ("qwen3_moe", {"recompute": "selective", "recompute_modules": ["core_attn", "moe_act", "layernorm"]}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join([x["recompute"], *x.get("recompute_modules", [])]),
)
def test_recompute_changes_nothing(pool, directory, name, recipe):
    layout = {"tp": 2, "sp": True, "ep": 2, "etp": 1}
    check(name, pool.run(run_rank, 2, directory(name), layout, **recipe))


def calls(path: Path, **recipe: Any) -> dict[str, int]:
    """How often each part of the model ran in one forward and backward, a call of it in the forward being 1."""
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path),
        schema.Layout(),
        engine=schema.Engine(distributed_optimizer=False, **recipe),
        optimizer=schema.Optimizer(),
        dtype="fp32",
    )
    engine.load_hf(path)
    parts = {
        "core_attn": "core_attention",
        "moe": "router",
        "shared_experts": "shared_experts",
        "layernorm": "input_layernorm",
        "mla_up_proj": "linear_kv_up_proj",
    }
    counts = dict.fromkeys([*parts, "mlp", "mlp_act", "moe_act"], 0)

    def count(part: str) -> None:
        counts[part] += 1

    dense, sparse = engine.model.decoder.layers[0], engine.model.decoder.layers[3]
    dense.mlp.register_forward_pre_hook(lambda *_: count("mlp"))
    for name, module in sparse.named_modules():
        for part, end in parts.items():
            if name.endswith(end):
                module.register_forward_pre_hook(lambda *_, part=part: count(part))
    for part, module in (("mlp_act", dense.mlp), ("moe_act", sparse.mlp.experts)):
        module._activate = lambda *args, part=part, real=module._activate: (count(part), real(*args))[1]
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    engine.forward_backward(batch, [RankCell(list(range(len(LENGTHS))))], MeanNll())
    return counts


@pytest.mark.parametrize(
    "module", ["core_attn", "mlp", "mlp_act", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
)
def test_what_is_recomputed_runs_twice_and_nothing_else_does(pool, directory, module):
    found = pool.run(calls, 1, directory("deepseek_v3"), recompute="selective", recompute_modules=[module])[0]
    parts = {"mlp": {"mlp_act"}, "moe": {"moe_act", "shared_experts"}}
    twice = {module} | parts.get(module, set())
    assert found == {part: 2 if part in twice else 1 for part in found}


def told(path: Path, layout: dict[str, Any], **recipe: Any) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The rows that each router and dense MLP of this rank is handed, as numbers of their micro-batches: in forward passes, in
    order; and in recomputation, beside the row that its input belongs to."""
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.engine.layers.mlp import GatedMLP
    from quintet.engine.layers.router import Router
    from quintet.models import read_shape
    from quintet.recipe import schema

    settings = schema.Engine(tokens_per_microbatch_per_rank=32, distributed_optimizer=False, **recipe)
    optimizer = schema.Optimizer()
    engine = Engine(
        read_shape(path), schema.Layout(**layout), engine=settings, optimizer=optimizer, dtype="fp32"
    )
    engine.load_hf(path)
    rows = engine._pipeline.rows

    def numbered(*args: Any) -> Any:
        for number, (micro, row) in enumerate(rows(*args)):
            row.number = number
            yield micro, row

    engine._pipeline.rows = numbered
    heard: list[tuple[list[Tensor], list[int], list[tuple[int, int]]]] = []

    def listen(module: Any) -> None:
        inputs, forward, again = [], [], []
        heard.append((inputs, forward, again))

        def hear(_: Any, args: tuple[Tensor], told: dict[str, Any]) -> None:
            number = told["row"].number
            before = [k for k, x in zip(forward, inputs, strict=True) if torch.equal(x, args[0])]
            if before:
                again.append((number, *before))
            else:
                inputs.append(args[0].detach().clone())
                forward.append(number)

        module.register_forward_pre_hook(hear, with_kwargs=True)

    for chunk in engine.chunks:
        for module in chunk.modules():
            if isinstance(module, Router) or type(module) is GatedMLP:
                listen(module)
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    engine.forward_backward(batch, [RankCell([i]) for i in range(4)], MeanNll())
    return [(forward, again) for _, forward, again in heard]


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective", "recompute_modules": ["mlp", "moe"]},
    ],
    ids=lambda recipe: recipe.get("recompute", "none"),
)
def test_what_follows_attention_is_told_its_own_row(pool, directory, recipe, vpp):
    """When 1F1B recomputes a micro-batch, later ones have passed: each time the row is that of the input."""
    found = [
        layer
        for rank in pool.run(told, 2, directory("deepseek_v3"), {"pp": 2, "vpp": vpp}, **recipe)
        for layer in rank
    ]
    assert len(found) == 4
    for forward, again in found:
        assert forward == [0, 1, 2, 3]
        assert sorted(again) == ([(k, k) for k in range(4)] if recipe else [])


def two_engines(path: Path, first: dict[str, Any], second: dict[str, Any]) -> list[Tensor]:
    """Log-probs of the whole batch from two layouts that take turns in one process."""
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    shape = read_shape(path)
    engines = [
        Engine(shape, schema.Layout(**layout), engine=schema.Engine(), optimizer=optimizer, dtype="fp32")
        for layout, optimizer in ((first, schema.Optimizer()), (second, None))
    ]
    for engine in engines:
        engine.load_hf(path)
    batch, whole = make_batch(token_ids(), [PROMPT] * len(LENGTHS)), [RankCell(list(range(len(LENGTHS))))]
    out = [engine.forward(batch, whole).logprobs for engine in engines]
    engines[0].forward_backward(batch, whole, MeanNll())
    return out + [engine.forward(batch, whole).logprobs for engine in reversed(engines)]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_two_layouts_live_side_by_side(pool, directory, name):
    layouts = {"ep": 2}, {"tp": 2, "sp": True, "etp": 1}
    for result in pool.run(two_engines, 2, directory(name), *layouts):
        for logprobs in result:
            torch.testing.assert_close(logprobs, reference(name)[2], rtol=1e-5, atol=1e-5)


def three_steps(path: Path, layout: dict[str, Any]) -> list[Any]:
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(distributed_optimizer=True),
        optimizer=schema.Optimizer(lr=1e-3, eps=1e-5, clip_grad_norm=2.0),
        dtype="fp32",
    )
    engine.load_hf(path)
    mine = [RankCell(list(range(engine.mesh.at("dp"), len(LENGTHS), engine.mesh.sizes.dp)))]
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    for _ in range(3):
        engine.forward_backward(batch, mine, MeanNll())
        engine.optimizer_step()
    return [(s.name, s.box, s.read().clone()) for s in engine.shard_map()]


@cache
def trained(name: str) -> dict[str, Tensor]:
    """Weights after the same three steps by transformers and torch."""
    made = model(name)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-5, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        for ids in token_ids():
            x = torch.tensor(ids)
            log_p = made(input_ids=x[None]).logits[0].log_softmax(-1)
            (-log_p[PROMPT - 1 : -1].gather(1, x[PROMPT:, None]).sum() / TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 2.0)
        optimizer.step()
    biases = [(n, b) for n, b in made.named_buffers() if n.endswith("e_score_correction_bias")]
    return hub_names([*((n, p.detach()) for n, p in made.named_parameters()), *biases])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "layout",
    [
        "tp2-sp-ep2-etp1",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("tp2-sp-ep2-etp2", "pp2-ep2")),
    ],
)
def test_sharded_adam_trains_experts_as_torch_does(pool, directory, name, layout):
    world, sizes = LAYOUTS[layout]
    for result in pool.run(three_steps, world, directory(name), sizes):
        for key, box, found in result:
            want = trained(name)[key][tuple(slice(a, b) for a, b in box)]
            assert (found - want).norm() / want.norm() < 1e-5, key
