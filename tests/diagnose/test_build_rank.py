"""Models of any rank of any layout, built for their shapes alone, are what is planned and what the shard map says."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from quintet.cli import main
from tests.oracle.pool import FORKED

RECIPES = Path(__file__).parents[2] / "recipes"


def make(mistake: str) -> None:
    """Make a mistake in this process, by name."""
    import quintet.engine.megatron_compat as compat
    import quintet.plan.parameters as parameters

    compat.install()
    if mistake == "stages planned as equal":
        import quintet.diagnose.build_rank as build_rank
        from quintet.recipe.schema import Layout

        original, planned = Layout.layers_of, parameters.chunks

        def of_equal_stages(self, layers, stage):
            return original(self.model_copy(update={"stage_layers": None}), layers, stage)

        def chunks(setup, stage):
            Layout.layers_of = of_equal_stages
            try:
                return planned(setup, stage)
            finally:
                Layout.layers_of = original

        build_rank.planned_chunks = chunks
    elif mistake == "heads counted whole":
        numel = parameters._numel
        parameters._numel = lambda setup, weight: numel(setup, weight) * (2 if weight.split == "qkv" else 1)
    elif mistake == "experts of another rank":
        from quintet.engine.mesh import Mesh

        at = Mesh.at
        Mesh.at = lambda self, axis: 0 if axis == "ep" else at(self, axis)
    elif mistake == "a matrix transposed":
        import quintet.engine.build as build

        made = build.build_chunks

        def build_chunks(*args):
            chunks = made(*args)
            layer = chunks[0].decoder.layers[0].self_attention.linear_proj
            layer.weight = torch.nn.Parameter(layer.weight.data.T.contiguous())
            return chunks

        build.build_chunks = build_chunks


def run(output: Path, mistake: str, words: list[str]) -> None:
    """A process's life: the command, with a mistake, writing all it says to a file."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    make(mistake)
    sys.exit(main(words))


@pytest.fixture
def plan(tmp_path):
    """Calls the command in a process of its own, as it sees no GPU from its start on: code and output. Forked, where that can be,
    from a server that has imported the engine."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(FORKED)

    def called(*words: str, mistake: str = "") -> tuple[int, str]:
        output = tmp_path / "output"
        process = context.Process(target=run, args=(output, mistake, ["plan", *words]))
        process.start()
        process.join()
        return process.exitcode, output.read_text()

    return called


def test_every_rank_of_a_recipe(plan):
    code, said = plan(str(RECIPES / "qwen2_7b_8_h20.yaml"), "--build", "all")
    assert code == 0, said
    assert said.count(": 3,807,910,400 parameters in 339 shards") == 8
    assert "Together they hold each of 339 tensors once." in said


def test_a_recipe_in_8_bits(plan):
    """Nothing is multiplied on the meta device: weights are those of bf16."""
    code, said = plan(str(RECIPES / "qwen2_7b_8_h20.yaml"), "engine.fp8=blockwise", "--build", "0")
    assert code == 0, said
    assert "As planned, and as the shard map says." in said


@pytest.mark.parametrize("rank", ["0", "1"])
def test_embeddings_that_both_ends_of_a_pipeline_hold(plan, rank):
    code, said = plan("Qwen2.5-0.5B-Instruct", "cluster.ranks=2", "layout.pp=2", "--build", rank)
    assert code == 0, said
    assert "As planned, and as the shard map says." in said


SMALL = [
    "cluster.ranks=16",
    "layout.tp=2",
    "layout.pp=4",
    "layout.ep=4",
    "rollout.layout.tp=8",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["layout.stage_layers=[25,25,24,20]"],
        ["layout.vpp=2", "layout.stage_layers=[0,14,14,14,14,14,13,11]", "layout.etp=2", "layout.ep=2"],
    ],
    ids=["uneven", "interleaved"],
)
def test_one_rank_of_other_layouts(plan, layout):
    code, said = plan(str(RECIPES / "qwen3_235b_a22b_32_h20.yaml"), *SMALL, *layout, "--build", "13")
    assert code == 0, said
    assert "As planned, and as the shard map says." in said


@pytest.mark.parametrize(
    ("mistake", "words", "shown"),
    [
        ("stages planned as equal", ["layout.pp=2", "layout.stage_layers=[13,15]", "--build", "0"], "decoder.layers.13."),
        ("heads counted whole", ["--build", "0"], "decoder.layers.0.self_attention.linear_qkv.weight has"),
        ("a matrix transposed", ["--build", "0"], "model.layers.0.self_attn.o_proj.weight has a view of (1792, 3584)"),
    ],
)  # fmt: skip
def test_a_plan_that_is_wrong_is_found(plan, mistake, words, shown):
    one = str(RECIPES / "qwen2_7b_8_h20.yaml")
    code, said = plan(one, *words, mistake=mistake)
    assert code == 4, said
    assert shown in said


@pytest.mark.slow
def test_experts_that_are_nowhere_are_found(plan, tmp_path):
    """Each rank by itself looks sound; together they leave out half of the experts."""
    config = """{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
"norm_topk_prob": true, "vocab_size": 99, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": false}"""
    (tmp_path / "config.json").write_text(config)
    words = [str(tmp_path), "cluster.ranks=2", "layout.ep=2", "rollout.layout.tp=1", "--build", "all"]
    assert plan(*words)[0] == 0
    code, said = plan(*words, mistake="experts of another rank")
    assert code == 4
    assert "model.layers.1.mlp.experts.3.up_proj.weight of shape (32, 64): the ranks hold 0 of" in said


def test_ranks_that_there_are_not(plan):
    code, said = plan(str(RECIPES / "qwen2_7b_8_h20.yaml"), "--build", "8")
    assert code == 2
    assert "--build 8: the recipe has the ranks 0 to 7" in said


@pytest.mark.slow
def test_layers_for_multi_token_prediction_have_experts_of_their_own(plan):
    words = [str(RECIPES / "deepseek_v3_96_h20.yaml"), "mtp.train=true"]
    code, said = plan(*words, "--build", "95")
    assert code == 0, said
    frozen = plan(*words, 'optimizer.frozen=["model.layers.61.mlp.experts.*"]')[1]
    assert frozen != plan(*words)[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "ranks"), [("deepseek_v3_96_h20", 96), ("qwen3_235b_a22b_32_h20", 32), ("mimo_7b_mtp_8gpu", 8)]
)
def test_all_ranks_of_the_giants(plan, name, ranks):
    code, said = plan(str(RECIPES / f"{name}.yaml"), "--build", "all")
    assert code == 0, said
    assert said.count(" parameters in ") == ranks
    assert "Together they hold each of" in said
