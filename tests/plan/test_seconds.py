"""Seconds by phase: by hand for a tiny model, in order where something grows, and by constants that the records say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine_work import MODELS
from benchmarks.records import RESULTS, read_records
from benchmarks.rollout_work import cases_of
from quintet.errors import UserError
from quintet.models import read_shape
from quintet.models.stages import slowest_over_mean
from quintet.plan import seconds
from quintet.plan.cards import CARDS, Card, card_of
from quintet.plan.fullest import setup_of
from quintet.plan.rollout import rollout_bytes
from quintet.plan.seconds import Samples, mfu, plan_seconds, samples_of
from quintet.recipe.hub import SHAPES, shapes_alone
from quintet.recipe.loader import load_recipe
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules import shape_of

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CARD = Card(flops=1e9, bandwidth=1e6)


def loaded(path, *overrides):
    with shapes_alone():
        recipe = load_recipe(path, overrides)
        return recipe, shape_of(recipe)


@pytest.fixture
def tiny(tmp_path):
    """A recipe of a tiny model on 4 ranks: two stages, two copies of the model, and a vLLM on each."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = """cluster.ranks=4 cluster.device=cuda model.dtype=bf16 layout.pp=2 rollout.backend=vllm rollout.samples_per_prompt=4
    rollout.max_response_tokens=40 data.max_prompt_tokens=20 train.prompts_per_step=8 train.mini_batches_per_step=2
    engine.tokens_per_microbatch_per_rank=64 engine.offload_params=1.0 engine.backend=portable optimizer.cpu_fraction=1.0"""

    def made(*overrides):
        return loaded(str(tmp_path), *words.split(), *overrides)

    return made


LAYER = 64 * 16 * (2 * 4 + 2 * 2) + 2 * 16 + 3 * 64 * 128 + 2 * 64
"""q, k, v and the projection out; norms of q and k; gate, up and down; two norms."""
WEIGHTS = 2 * LAYER + 64 + 100 * 64
"""With the last norm and the head; a token is not multiplied by the embedding."""
LAUNCHES = 2 * 60e-6
"""Of a decode step's two layers; of a sequence it takes 11.5 µs."""
HEADS = 2 * 4 * (16 + 16)
"""FLOPs of a key that a query sees, a half, in both layers."""


def test_a_tiny_model_by_hand(tiny):
    recipe, shape = tiny()
    times = plan_seconds(recipe, shape, CARD, samples_of(recipe, (10, 30)))
    tokens = 8 * 4 * (10 + 30)
    forward = tokens * (2 * WEIGHTS + 2 * HEADS * 20)
    layer, head = LAYER - 2 * 64, 100 * 64  # of a stage's time norms are not counted; those of q and k are
    slow = (layer + head) * 2 / (2 * layer + head)
    rate = 4 * 1e9 * seconds.PEAK_SHARE
    # 1,280 tokens over two copies in rows of 64 are 10 micro-batches, 5 in each mini-batch.
    assert times["logprob"].seconds == pytest.approx(forward / rate * slow * (10 + 1) / 10)
    held = LAYER + 64 + 100 * 64  # the last stage's, the embedding being as large as the head
    host = (
        2 * 4 * held / 2 * 16 * 2 / seconds.HOST_RATE
    )  # two steps, four ranks, half of 16 bytes on each, both ways
    assert times["train"].seconds == pytest.approx(3 * forward / rate * slow * (5 + 1) / 5 + host, rel=2e-3)
    assert (times["logprob"].flops, times["train"].flops) == pytest.approx((forward, 3 * forward))
    whole = (2 * LAYER + 64 + 2 * 100 * 64) * 2
    assert times["sync"].seconds == pytest.approx(whole / seconds.SYNC_RATE, rel=0.01)
    staying, _ = tiny("engine.offload_params=0")
    kept = plan_seconds(staying, shape, CARD, samples_of(staying, (10, 30)))
    moved = 2 * (held * 2) / seconds.OFFLOAD_RATE  # it leaves before, and comes back after
    assert times["generate"].seconds - kept["generate"].seconds == pytest.approx(moved, rel=0.02)


def test_decoding_by_hand(tiny):
    """Four vLLMs with 8 samples each: 40 steps, in which 6 sequences of 25 tokens are alive in the mean."""
    recipe, shape = tiny()
    times = plan_seconds(recipe, shape, CARD, samples_of(recipe, (10, 30)))
    of_token = 2 * 2 * 2 * 16 * 2  # two layers, keys and values of two heads
    reads = (WEIGHTS * 2 + 6 * 25 * of_token) / (1e6 * seconds.BANDWIDTH_SHARE)
    prompts = 8 * 10 * (2 * WEIGHTS + 2 * HEADS * 5)
    prefill = prompts / (4 * 1e9 * seconds.PEAK_SHARE)
    assert times["generate"].seconds == pytest.approx(prefill + 40 * (reads + LAUNCHES + 6 * 5.5e-6))
    flops = prompts + 8 * 4 * 30 * (2 * WEIGHTS + 2 * HEADS * 25)
    assert times["generate"].flops == pytest.approx(flops)
    slow = Card(flops=1e6, bandwidth=1e12)
    bound = plan_seconds(recipe, shape, slow, samples_of(recipe, (10, 30)))["generate"]
    step = 6 * (2 * WEIGHTS + 2 * HEADS * 25) / (1e6 * seconds.PEAK_SHARE)
    assert bound.seconds == pytest.approx(prefill * 1e3 + 40 * (step + LAUNCHES + 6 * 5.5e-6))


def test_slots_make_more_steps(tiny):
    """Two at a time of 8 samples: 120 steps for 30 tokens each."""
    few, shape = tiny("rollout.sequences_per_rank=2")
    many, _ = tiny()
    fast = Card(1e15, 1e15)
    longer, shorter = (
        plan_seconds(one, shape, fast, samples_of(one, (10, 30)))["generate"].seconds for one in (few, many)
    )
    assert (longer, shorter) == pytest.approx(
        (120 * (LAUNCHES + 2 * 5.5e-6), 40 * (LAUNCHES + 6 * 5.5e-6)), rel=1e-3
    )


def test_a_rollout_cut_over_ranks_reads_its_part(tiny):
    """Weights, but for the norms, and the cache: half of each on both ranks of a copy, which has twice the samples."""
    whole, cut = (
        plan_seconds(recipe, shape, Card(1e15, 1e6), samples_of(recipe, (10, 30)))["generate"].seconds / 40
        for recipe, shape in (tiny(), tiny("rollout.layout.tp=2"))
    )
    whole, cut = whole - LAUNCHES - 6 * 5.5e-6, cut - LAUNCHES - 12 * 5.5e-6
    # Two sums a layer over both ranks, of 12 sequences' hidden states of 64 numbers in bf16.
    cut -= 2 * 2 * (9e-6 + 12 * 64 * 2 * 19e-12)
    of_token = 2 * 2 * 2 * 16 * 2
    reads = [WEIGHTS * 2 + 6 * 25 * of_token, WEIGHTS + 12 * 25 * of_token / 2]
    assert [whole, cut] == pytest.approx([one / (1e6 * seconds.BANDWIDTH_SHARE) for one in reads], rel=1e-5)


def test_layers_of_another_stage_are_not_read(tiny):
    recipe, shape = tiny("rollout.layout.pp=2")
    setup = setup_of(recipe, shape)
    assert seconds._cache_of_token(recipe, setup, placement_of(recipe)) == 2 * 2 * 16 * 2


def test_a_small_cache_makes_more_steps(tiny):
    """Room for 2 sequences of 25 tokens beside the weights."""
    recipe, shape = tiny("rollout.memory_fraction=1")
    room = rollout_bytes(recipe, setup_of(recipe, shape), None)[0] + 2 * 25 * 256
    found = plan_seconds(recipe, shape, Card(1e15, 1e15), samples_of(recipe, (10, 30)), room)["generate"]
    assert found.seconds == pytest.approx(8 * 30 / 2 * (LAUNCHES + 2 * 5.5e-6), rel=1e-3)


def test_states_on_the_host_are_read_and_written_in_each_update(tiny):
    (away, shape), (here, _) = tiny(), tiny("optimizer.cpu_fraction=0")
    more, less = (plan_seconds(one, shape, CARD, samples_of(one))["train"].seconds for one in (away, here))
    held = LAYER + 64 + 100 * 64
    # two updates; 16 bytes an element, which a stage's two ranks share; four ranks of the node; both ways
    assert (more - less) * seconds.HOST_RATE == pytest.approx(2 * 16 * held / 2 * 4 * 2, rel=0.02)


def test_layers_that_predict_ahead_are_trained_alone():
    """They neither generate nor score; a draft is not predicted."""
    mimo = RECIPES / "mimo_7b_mtp_8gpu.yaml"
    (ahead, deep), (alone, plain) = loaded(mimo), loaded(mimo, "mtp=null", "rollout.draft_tokens=0")
    one, other = (
        plan_seconds(r, s, CARDS["H100"], samples_of(r)) for r, s in ((ahead, deep), (alone, plain))
    )
    assert [one[p].flops for p in ("generate", "logprob")] == [
        other[p].flops for p in ("generate", "logprob")
    ]
    assert 1.02 < one["train"].flops / other["train"].flops < 1.04


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_batch_whose_experts_are_counted_beforehand_takes_a_pass_more(algorithm):
    """Of three in updates, a critic's as well, and no use: what is computed counts the same."""
    times = []
    for words in (
        (),
        ("engine.aux_loss={per: sequence, weight: 0.001}",),
        ("engine.aux_loss={per: batch, weight: 0.001}",),
    ):
        recipe, shape = loaded(
            str(RECIPES / "qwen3_235b_a22b_32_h20.yaml"),
            "engine.recompute=none",
            "optimizer.cpu_fraction=0",
            f"algorithm.name={algorithm}",
            *words,
        )
        times.append(plan_seconds(recipe, shape, CARDS["H20"], samples_of(recipe, (200, 1960)))["train"])
    without, of_sequences, of_batch = times
    assert of_sequences == without
    assert of_batch.seconds == pytest.approx(4 / 3 * without.seconds)
    assert of_batch.flops == without.flops


def test_mfu_is_of_all_ranks(tiny):
    recipe, shape = tiny("layout.pp=1", "train.mini_batches_per_step=1", "optimizer.cpu_fraction=0")
    times = plan_seconds(recipe, shape, CARD, samples_of(recipe))
    assert mfu([times["train"]], CARD, 4) == pytest.approx(seconds.PEAK_SHARE)
    assert times["logprob"].seconds == mfu([times["logprob"]], CARD, 4) == 0  # the update's own serve
    together = mfu(list(times.values()), CARD, 4)
    spent = sum(one.seconds for one in times.values()) * 4 * CARD.flops
    assert together == pytest.approx(sum(one.flops for one in times.values()) / spent)


@pytest.mark.parametrize(
    ("more", "phase", "factor"),
    [
        ("engine.recompute=full", "train", 4 / 3),
        ("train.mini_batches_per_step=8", "train", (3 / 2) / (6 / 5)),  # of two micro-batches each
        ("algorithm.kl_coef=0.1", "logprob", 2),
        ("train.prompts_per_step=16", "logprob", 2 * (21 / 20) / (11 / 10)),
        ("lora.rank=4", "train", 2 / 3),
    ],
)
def test_what_costs_more(tiny, more, phase, factor):
    (before, shape), (after, _) = tiny("optimizer.cpu_fraction=0"), tiny("optimizer.cpu_fraction=0", more)
    one, other = (plan_seconds(r, shape, CARD, samples_of(r, (10, 30)))[phase] for r in (before, after))
    assert other.seconds / one.seconds == pytest.approx(factor)


@pytest.mark.parametrize("name", ["deepseek_v3_96_h20", "qwen2_7b_8_h20"])
def test_longer_responses_and_slower_cards_take_longer(name):
    recipe, shape = loaded(RECIPES / f"{name}.yaml")
    grown = [
        plan_seconds(recipe, shape, CARDS["H20"], samples_of(recipe, (200, r))) for r in (500, 2000, 8000)
    ]
    for phase in ("generate", "logprob", "train"):
        taken = [one[phase].seconds for one in grown]
        assert taken == sorted(taken), phase
        assert taken[0] < taken[-1]
    for faster, slower in (("H200", "H100"), ("H100", "A100"), ("H200", "H20")):
        fast, slow = (
            plan_seconds(recipe, shape, CARDS[c], samples_of(recipe, (200, 2000))) for c in (faster, slower)
        )
        assert all(fast[phase].seconds <= slow[phase].seconds for phase in fast)


def test_experts_that_a_step_meets():
    """One sequence's are those that a token meets; many meet all."""
    shape = read_shape(SHAPES / "Qwen3-235B-A22B")
    embedding = shape.vocab_size * shape.hidden_size
    assert seconds._met(shape, 1) == pytest.approx(shape.active_parameter_count - embedding)
    assert seconds._met(shape, 1000) == pytest.approx(shape.parameter_count - embedding)
    everywhere = replace(shape, moe=replace(shape.moe, top_k=shape.moe.experts))
    assert seconds._met(everywhere, 1) == everywhere.parameter_count - embedding


def test_the_slowest_stage():
    shape = read_shape(SHAPES / "Qwen2-7B")
    assert slowest_over_mean(shape, [[range(28)]]) == 1
    head, layer = 152064 * 3584, 3584 * 128 * (2 * 28 + 2 * 4) + 128 * (28 + 2 * 4) + 3 * 3584 * 18944
    found = slowest_over_mean(shape, [[range(14)], [range(14, 28)]])
    assert found == pytest.approx((14 * layer + head) / ((28 * layer + head) / 2))


def test_means_are_within_the_limits(tiny):
    recipe, _ = tiny()
    for means in ((10, 41), (21, 30), (0, 30), (10, 0)):
        with pytest.raises(UserError, match=r"--mean-tokens .* 1 to 20 .* 1 to 40"):
            samples_of(recipe, means)
    assert samples_of(recipe) == Samples(8, 4, 20, 40, 40)


def value(file, case, metric):
    (found,) = [
        r["value"]
        for r in read_records(RESULTS / f"{file}.json")
        if (r["case"], r["metric"]) == (case, metric)
    ]
    return found


def test_constants_are_those_that_were_measured():
    assert value("engine", "qwen2.5-1.5b/te", "mfu") == pytest.approx(seconds.PEAK_SHARE, rel=0.02)
    copied = value("sync", "qwen3-8b/1gpu", "copy_rate") * 1e9
    assert 2 * copied / CARDS["H200"].bandwidth == pytest.approx(seconds.BANDWIDTH_SHARE, rel=0.02)
    assert value("sync", "qwen3-30b-a3b/2gpu", "gb_s") * 1e9 / 2 == pytest.approx(seconds.SYNC_RATE, rel=0.02)
    case = "qwen2.5-1.5b/te/16384-tokens/recompute-none"
    moved = (value("memory", case, "parameters_gib") + value("memory", case, "optimizer_gib")) * (1 << 30)
    both = value("memory", case, "offload_s") + value("memory", case, "reload_s")
    assert 2 * moved / both == pytest.approx(seconds.OFFLOAD_RATE, rel=0.02)


def decoding(tmp_path, model, backend, samples):
    """Seconds that generating takes on one H200, all samples at once."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    recipe, shape = loaded(
        str(tmp_path), "cluster.device=cuda", "model.dtype=bf16", f"rollout.backend={backend}", "rollout.sequences_per_rank=512",
        "engine.offload_params=0", "engine.offload_grads=0", "engine.offload_optimizer=0",
    )  # fmt: skip
    return plan_seconds(recipe, shape, CARDS["H200"], samples)["generate"].seconds


@pytest.mark.parametrize("backend", ["vllm", "native"])
@pytest.mark.parametrize("case", cases_of("qwen2.5-1.5b"), ids=lambda one: one.name or "equal")
def test_generation_takes_what_was_recorded(tmp_path, backend, case):
    """128 prompts of 256 tokens, 4 samples of each: of 512 tokens, or of a long tail that ends at 2,048."""
    lengths = [n for of_prompt in case.response_tokens() for n in of_prompt]
    samples = Samples(case.prompts, case.samples_per_prompt, 256, sum(lengths) / len(lengths), max(lengths))
    found = decoding(tmp_path, MODELS["qwen2.5-1.5b"].config, backend, samples)
    said = f"qwen2.5-1.5b/1gpu/{case.name}/{backend}".replace("//", "/")
    assert sum(lengths) / found == pytest.approx(value("rollout", said, "tokens_per_second"), rel=0.08)


@pytest.mark.parametrize("context", [512, 4096])
def test_one_sequence_takes_its_layers(tmp_path, context):
    """Of another model and depth, in which next to nothing is read: what is predicted is the least. By how much the host of a record was slower
    than another is told apart by no record: the same case took 0.52 s and 0.69 s."""
    made = TINY | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    }
    made |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768, "max_position_embeddings": 8192}
    found = decoding(tmp_path, made, "vllm", Samples(1, 1, context, 256, 256))
    recorded = 256 / value("mtp", f"400m/vllm/seqs1/context{context}/k0", "rollout_tokens_per_s")
    assert 0.6 * recorded < found < recorded


def test_tensor_parallelism_adds_sums():
    """As measured of vLLM's kernel on H100s (https://github.com/sgl-project/sglang/pull/2904): microseconds by bytes and ranks."""
    measured = {
        512: (9.5, 9.1, 10.1),
        32768: (8.7, 9.2, 11.8),
        262144: (12.9, 20.6, 24.1),
        1048576: (26.6, 40.2, 45.0),
    }
    for size, of_ranks in measured.items():
        for tp, taken in zip((2, 4, 8), of_ranks, strict=True):
            assert seconds.all_reduce_s(size, tp) == pytest.approx(taken * 1e-6, rel=0.3)
    assert seconds.all_reduce_s(1 << 20, 1) == 0


def test_cards_by_their_devices_names():
    assert card_of("NVIDIA H20") is CARDS["H20"]
    assert card_of("NVIDIA H200") is CARDS["H200"]
    assert card_of("NVIDIA H100 NVL") is CARDS["H100 NVL"]
    # As fast as H100s but for NVLink, which is not counted.
    assert card_of("NVIDIA H800") is CARDS["H800"] == CARDS["H100"]
    assert card_of("NVIDIA H800 PCIe") is CARDS["H800 PCIe"] == CARDS["H100 PCIe"]
    assert card_of("a laptop") is None
