"""What every command checks before it starts a process: weights, lengths with padding, ends of sequence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quintet.data.tokenizer import build_char_tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Recipe
from quintet.train.inputs import prepare
from tests.models.directory import QWEN3, write_model

ALPHABET = "0123456789+="


@pytest.fixture(autouse=True)
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked of a task's problems is no other of 16,384."""
    monkeypatch.setattr("quintet.data.prompts.TRAIN_PROBLEMS", 512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    build_char_tokenizer(ALPHABET, path)
    return write_model(path)


def recipe(model: Path, **sections: dict) -> Recipe:
    return Recipe.model_validate({"model": {"path": model}, "data": {"task": "addition"}} | sections)


def test_end_ids_are_the_tokenizers_and_the_models(model: Path, tmp_path: Path) -> None:
    assert prepare(recipe(model), "generate", tmp_path).end_ids == [1]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert prepare(recipe(model), "generate", tmp_path).end_ids == [1, 7]


def test_prompts_of_a_command_are_read_before_anything_starts(model: Path, tmp_path: Path) -> None:
    short = recipe(model, data={"task": "addition", "chat": False, "max_prompt_tokens": 5})
    inputs = prepare(short, "generate", tmp_path, texts=["1+2=", "34+5="])
    assert [len(prompt.token_ids) for prompt in inputs.prompts] == [4, 5]
    with pytest.raises(UserError, match=r"the prompt has 6 tokens, more than data\.max_prompt_tokens=5"):
        prepare(short, "generate", tmp_path, texts=["1+2=", "34+56="])


def test_weights_that_do_not_fit_are_found(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3 | {"intermediate_size": 80}))
    with pytest.raises(UserError, match="implies"):
        prepare(recipe(model), "generate", tmp_path)


def test_a_critic_reads_what_the_policy_says(model: Path, tmp_path: Path) -> None:
    asked = {"algorithm": {"name": "ppo"}, "critic": {"path": model}}
    prepare(recipe(model, **asked), "train", tmp_path)
    fewer = write_model(tmp_path / "fewer", QWEN3 | {"vocab_size": QWEN3["vocab_size"] // 2})
    asked["critic"]["path"] = fewer
    with pytest.raises(UserError, match=r"critic\.path: the model in .*fewer has \d+ tokens and the policy"):
        prepare(recipe(model, **asked), "train", tmp_path)
    (fewer / "config.json").write_text(json.dumps(QWEN3 | {"intermediate_size": 80}))
    with pytest.raises(UserError, match="implies"):
        prepare(recipe(model, **asked), "train", tmp_path)


def test_a_sample_fits_with_the_padding_of_sequence_parallelism(model: Path, tmp_path: Path) -> None:
    inputs = prepare(recipe(model, sft={}), "sft", tmp_path)
    assert inputs.sft is not None
    longest = max(len(prompt.token_ids) + len(prompt.response_ids) for prompt in inputs.sft)
    fits = {"sft": {}, "engine": {"tokens_per_microbatch_per_rank": longest}}
    assert longest % 2
    prepare(recipe(model, **fits), "sft", tmp_path)
    with pytest.raises(UserError, match="with padding to a multiple of 2"):
        prepare(recipe(model, layout={"tp": 2, "sp": True}, **fits), "sft", tmp_path)


def test_a_row_that_fits_no_micro_batch_is_told_with_what_it_fits(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "1" * 150}]
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": "jsonl", "sft_path": str(file), "chat": False}
    long = recipe(
        model,
        data=data,
        cluster={"ranks": 4},
        layout={"cp": 2, "dynamic_cp": True},
        sft={"samples_per_step": 2},
        engine={"tokens_per_microbatch_per_rank": 64},
    )
    said = r"sft.jsonl:2: .* are 155, .*per_rank=64 × layout.cp=2. It fits with engine.tokens_per_microbatch_per_rank=78 or layout.cp=4; or take the row out"
    with pytest.raises(UserError, match=said):
        prepare(long, "sft", tmp_path)
    fits = {"engine": {"tokens_per_microbatch_per_rank": 64}, "rollout": {"max_response_tokens": 32}}
    generates = data | {"train_path": str(file), "answer_key": "", "sft_path": None}
    prepare(recipe(model, data=generates, **fits), "generate", tmp_path)  # which looks at no response


def test_a_problem_that_fits_no_micro_batch_has_no_row_to_take_out(model: Path, tmp_path: Path) -> None:
    data = {"task": "addition", "chat": False, "task_options": {"digits": 12}}
    short = {"engine": {"tokens_per_microbatch_per_rank": 16}, "rollout": {"max_response_tokens": 2}}
    with pytest.raises(
        UserError, match=r"addition train problem .*; or make problems shorter \(data.task_options\)"
    ):
        prepare(recipe(model, data=data, sft={"samples_per_step": 2}, **short), "sft", tmp_path)


def test_gpus_are_asked_for_before_a_run_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    wanted = recipe(model, cluster={"device": "cuda"})
    with pytest.raises(UserError, match=r"cluster\.device=cpu to do without\. This machine has none"):
        prepare(wanted, "train", tmp_path)
    prepare(wanted, "train", tmp_path, starts=False)  # check may be of another machine


def test_what_needs_gpus_is_refused_without_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(model, optimizer={"cpu_fraction": 0.5})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    prepare(settings, "generate", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"optimizer.cpu_fraction .* needs GPUs: .* This machine has no GPU"):
        prepare(settings, "generate", tmp_path)
    prompts_cut = recipe(model, rollout={"backend": "vllm", "vllm": {"enable_chunked_prefill": True}})
    with pytest.raises(UserError, match=r"enable_chunked_prefill=true: .*so that cluster.device=auto is cpu"):
        prepare(prompts_cut, "generate", tmp_path)


def test_a_reward_is_tried_before_anything_starts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(prompt, response, answer):\n    return None\n")
    asked = recipe(model, reward={"function": f"{tmp_path / 'mine.py'}:reward"})
    for command in ("train", "eval"):
        with pytest.raises(UserError, match=r"made-up response .*mine\.py:1\) returned None"):
            prepare(asked, command, tmp_path)
    prepare(asked, "generate", tmp_path)


def test_rows_need_answers_only_where_the_reward_reads_them(model: Path, tmp_path: Path) -> None:
    rows, file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text('{"prompt": "1+1=", "level": 3}\n')
    file.write_text(
        "def reads(prompt, response, answer): return 1.0\n\n"
        "def reads_none(prompt, response, *, row): return float(row['level'])\n"
    )
    data = {"task": "jsonl", "chat": False, "train_path": str(rows), "eval_path": str(rows)}
    for name in ("length", f"{file}:reads_none"):
        inputs = prepare(recipe(model, data=data, reward={"function": name}), "train", tmp_path)
        assert inputs.train is not None
        assert inputs.train[0].row == {"prompt": "1+1=", "level": 3}
    for name in ("exact_match", f"{file}:reads"):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: no column 'answer'"):
            prepare(recipe(model, data=data, reward={"function": name}), "train", tmp_path)


def test_adapters_to_start_from_are_part_of_the_reference_policy(model: Path, tmp_path: Path) -> None:
    """A run without a warm-up reads it at every start: other adapters would be another one, without a word."""
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.parent.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (file.parent / "adapter_config.json").write_text(json.dumps(config))
    asked = recipe(model, algorithm={"kl_coef": 0.01}, lora={"path": file.parent})

    def weights(value: float) -> str:
        sizes = {"A": (2, QWEN3["hidden_size"]), "B": (QWEN3["hidden_size"], 2)}
        names = [
            f"base_model.model.model.layers.{n}.self_attn.o_proj" for n in range(QWEN3["num_hidden_layers"])
        ]
        tensors = {
            f"{name}.lora_{x}.weight": torch.full(size, value) for name in names for x, size in sizes.items()
        }
        save_file(tensors, file)
        return prepare(asked, "train", tmp_path).weights or ""

    alone = prepare(recipe(model, algorithm={"kl_coef": 0.01}), "train", tmp_path).weights
    assert alone is not None
    one, other = weights(1.0), weights(2.0)
    assert one != other
    assert one.startswith(alone)  # as checkpoints of before have it
    assert other.startswith(alone)
