"""What a recipe becomes as arguments of vLLM's engine. Runs with the other tests: it needs no vLLM."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from pydantic import create_model

from quintet.errors import UserError, WorkerFailure
from quintet.recipe import schema
from quintet.recipe.vllm import DECIDED, second_runner_lacks
from quintet.rollout import draft_length as draft_length_of
from quintet.rollout.base import Sampling
from quintet.rollout.draft_length import Measured
from quintet.rollout.vllm import compat, runners
from quintet.rollout.vllm.sampling import check, mode_of
from quintet.rollout.vllm.settings import captured_sizes, draft_length, engine_arguments
from tests.models.directory import DEEPSEEK_V3, GPT_OSS, QWEN3, write_model
from tests.rollout.vllm.conftest import recipe_of

MIMO = QWEN3 | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "require", lambda: "0.32.0")
    monkeypatch.setattr(
        "quintet.rollout.options.declared_fields",
        lambda *place: frozenset(
            {"async_scheduling", "enforce_eager", "hf_overrides", "load_format", "max_cudagraph_capture_size"}
        ),
    )
    model = write_model(tmp_path / "model")
    return lambda device="cuda", **rollout: engine_arguments(recipe_of(**rollout), model, device)


def test_sizes_follow_the_recipe(arguments):
    made = arguments(layout={"tp": 2, "pp": 2, "ep": 2}, memory_fraction=0.3)
    assert made["max_model_len"] == 32 + 32 + 1
    assert made["max_num_seqs"] == 16
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"]) == (2, 2)
    assert made["enable_expert_parallel"]
    assert made["distributed_executor_backend"] == "mp"
    assert made["gpu_memory_utilization"] == 0.3
    assert made["dtype"] == "bfloat16"
    assert made["enable_sleep_mode"]
    assert made["trust_remote_code"] is False
    assert "enforce_eager" not in made


@pytest.mark.parametrize("seed", [-1, 2**40 + 3])
def test_any_seed_of_a_recipe_is_one_of_its(tmp_path, monkeypatch, seed):
    """It hands its own to numpy, vllm/utils/torch_utils.py: set_random_seed."""
    monkeypatch.setattr(compat, "require", lambda: "0.32.0")
    of_seed = recipe_of().model_copy(update={"run": schema.Run(seed=seed)})
    made = engine_arguments(of_seed, write_model(tmp_path / "model"), "cuda")
    np.random.RandomState(made["seed"])


def test_a_full_step_is_a_graph_however_many_sequences_it_has(arguments):
    made = arguments("cuda", sequences_per_rank=1024)["cudagraph_capture_sizes"]
    assert made[-1] == 1024
    assert made == sorted(set(made))
    assert all(b <= a + max(8, a // 8) for a, b in pairwise(made[3:]))
    assert captured_sizes(1001)[-1] == 1001
    assert "cudagraph_capture_sizes" not in arguments("cuda", sequences_per_rank=512)
    assert "cudagraph_capture_sizes" not in arguments("cpu", sequences_per_rank=1024)
    own = {"max_cudagraph_capture_size": 256}
    assert "cudagraph_capture_sizes" not in arguments("cuda", sequences_per_rank=1024, vllm=own)


def test_on_cpu_the_cache_holds_what_the_slots_need(arguments):
    made = arguments("cpu")
    assert made["dtype"] == "float32"
    assert made["enforce_eager"]
    assert made["kv_cache_memory_bytes"] % (128 * 4) == 0
    assert not made["enable_chunked_prefill"]
    assert made["max_num_batched_tokens"] >= made["max_model_len"]
    assert arguments("cpu", sequences_per_rank=32)["kv_cache_memory_bytes"] > made["kv_cache_memory_bytes"]
    assert "gpu_memory_utilization" not in made
    for layout in ({"tp": 2, "ep": 2}, {"pp": 2}):
        with pytest.raises(UserError, match=r"rollout\.layout\.pp=., ep=.: vLLM for CPU"):
            arguments("cpu", layout=layout)


def test_experts_with_biases_have_the_kernel_that_adds_them(arguments, tmp_path):
    gpt_oss = write_model(tmp_path / "gpt_oss", GPT_OSS)
    assert engine_arguments(recipe_of(), gpt_oss, "cuda")["moe_backend"] == "triton"
    assert "moe_backend" not in engine_arguments(recipe_of(), gpt_oss, "cpu")
    assert "moe_backend" not in arguments("cuda")


def test_drafts_are_a_setting_of_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "require", lambda: "0.32.0")
    model = write_model(tmp_path / "model", MIMO)

    def made(device, **rollout):
        return engine_arguments(recipe_of(**rollout), model, device)

    assert "speculative_config" not in made("cuda")
    assert made("cuda", draft_tokens=2)["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }
    without, drafting = made("cpu"), made("cpu", draft_tokens=1)
    layers = MIMO["num_hidden_layers"]
    assert drafting["kv_cache_memory_bytes"] * layers == without["kv_cache_memory_bytes"] * (layers + 1)
    many = made("cpu", draft_tokens=3, sequences_per_rank=1000)
    assert many["max_num_batched_tokens"] == 4000


def test_auto_drafts_as_was_measured(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", MIMO)
    rows = [
        Measured("cpu", n, 64, k, 0.6 * k, speed)
        for n, k, speed in ((16, 1, 1.3), (16, 2, 1.1), (64, 1, 0.8))
    ]
    monkeypatch.setattr(draft_length_of, "read_table", lambda: rows)
    for sequences, length in ((16, 1), (17, 0)):
        chosen = draft_length(recipe_of(draft_tokens="auto", sequences_per_rank=sequences), model, "cpu")
        assert chosen.draft_tokens == length, chosen.why
    other = draft_length(recipe_of(draft_tokens=2), model, "cpu")
    assert (other.draft_tokens, other.why) == (2, "rollout.draft_tokens=2")


def test_routes_cost_the_prefix_cache_on_cpu_alone(arguments):
    assert not arguments("cpu", return_routes=True)["enable_prefix_caching"]
    made = arguments("cuda", return_routes=True)
    assert made["enable_prefix_caching"]


def test_the_second_runner_writes_down_what_it_draws(arguments, monkeypatch, tmp_path):
    for runner, worker in (("1", "StoringWorker"), ("0", "")):
        monkeypatch.setenv(runners.RUNNER, runner)
        for routes in (True, False):
            made = arguments("cuda", return_routes=routes)
            assert made.get("worker_cls", "").rpartition(".")[2] == worker
            assert made.get("additional_config") == ({"routes": routes} if worker else None)
    monkeypatch.setenv(runners.RUNNER, "1")
    assert "worker_cls" not in arguments("cpu")
    drafting = engine_arguments(recipe_of(draft_tokens=1), write_model(tmp_path / "mimo", MIMO), "cuda")
    assert "worker_cls" not in drafting
    assert "worker_cls" not in arguments("cuda", layout={"pp": 2})


def test_on_a_gpu_no_request_that_is_held_loses_a_token(arguments):
    for options in ({}, {"async_scheduling": True}):
        assert arguments("cuda", vllm=options)["scheduler_cls"].endswith(".WholeScheduler")
    assert "scheduler_cls" not in arguments("cuda", vllm={"async_scheduling": False})
    assert "scheduler_cls" not in arguments("cpu")


def test_with_more_than_two_stages_no_step_is_scheduled_ahead(arguments):
    assert arguments("cuda", layout={"pp": 2})["scheduler_cls"].endswith(".WholeScheduler")
    made = arguments("cuda", layout={"pp": 4})
    assert made["async_scheduling"] is False
    assert "scheduler_cls" not in made


def test_adapters_alone_have_a_slot(arguments):
    lora = {"rank": 20, "alpha": 20, "targets": ["layers.0.*.q_proj", "o_proj"]}
    made = arguments(lora=lora, adapter_sync="separate")
    assert (made["enable_lora"], made["max_loras"], made["max_lora_rank"]) == (True, 1, 32)
    assert made["lora_target_modules"] == ["o_proj", "q_proj"]
    assert "enable_lora" not in arguments(lora=lora)


def test_8_bits_are_told_as_a_model_of_8_bits_tells_them(arguments):
    made = arguments(quantization="fp8", vllm={"hf_overrides": {"rope_theta": 1}})
    assert made["load_format"] == "dummy"
    assert made["hf_overrides"]["quantization_config"]["weight_block_size"] == [128, 128]
    assert made["hf_overrides"]["rope_theta"] == 1


@pytest.mark.usefixtures("arguments")
@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK_V3])
def test_of_a_directory_in_8_bits_vllm_loads_none(tmp_path, config):
    published = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    plain = write_model(tmp_path / "plain", config)
    eight = write_model(tmp_path / "eight", config | {"quantization_config": published})
    made = engine_arguments(recipe_of(), eight, "cuda")
    told = {"load_format": "dummy", "hf_overrides": {"quantization_config": None}}
    assert made == engine_arguments(recipe_of(), plain, "cuda") | told | {"model": str(eight)}
    of_plain, of_eight = (
        engine_arguments(recipe_of(quantization="fp8"), one, "cuda") for one in (plain, eight)
    )
    assert of_eight == of_plain | {"model": str(eight)}


def test_what_is_set_is_refused_of_a_user_unless_it_may_be_another(arguments, monkeypatch):
    monkeypatch.setenv(runners.RUNNER, "1")
    lora = {"lora": {"rank": 8}, "adapter_sync": "separate"}
    made = [
        arguments(),
        arguments("cpu"),
        arguments(layout={"tp": 2, "pp": 4}, sequences_per_rank=1024, quantization="fp8"),
        arguments(**lora),
    ]
    assert {name for one in made for name in one} - DECIDED.keys() == {
        "async_scheduling",
        "cudagraph_capture_sizes",
        "enable_chunked_prefill",
        "enforce_eager",
        "hf_overrides",
        "kv_cache_memory_bytes",
        "load_format",
        "max_num_batched_tokens",
    }


def test_options_go_through(arguments):
    assert arguments(vllm={"enforce_eager": True})["enforce_eager"]
    with pytest.raises(UserError, match=r"rollout\.vllm\.enforce_eagr.*did you mean enforce_eager"):
        arguments(vllm={"enforce_eagr": True})


@pytest.mark.parametrize(
    ("temperature", "mode"),
    [(0.0, "raw_logprobs"), (1.0, "raw_logprobs"), (0.7, "processed_logprobs"), (1.5, "processed_logprobs")],
)
def test_the_log_prob_told_is_the_policys(temperature, mode):
    assert mode_of(recipe_of(temperature=temperature).rollout) == mode


@pytest.mark.parametrize(
    ("sampling", "mode", "fine"),
    [
        (Sampling(), "raw_logprobs", True),
        (Sampling(top_p=0.5), "raw_logprobs", True),
        (Sampling(temperature=0.7), "raw_logprobs", False),
        (Sampling(), "processed_logprobs", True),
        (Sampling(top_k=5), "processed_logprobs", False),
        (Sampling(temperature=0.7), "processed_logprobs", True),
        (Sampling(temperature=0.7, min_p=0.1), "processed_logprobs", False),
        (Sampling(temperature=0), "raw_logprobs", True),
        (Sampling(temperature=0, top_p=0.5), "processed_logprobs", True),
    ],
)
def test_a_sampling_whose_policy_cannot_be_told_is_refused(sampling, mode, fine):
    if fine:
        check(sampling, mode)
    else:
        with pytest.raises(UserError, match="cannot tell the policy's log-probs"):
            check(sampling, mode)


def test_what_vllm_has_against_a_value_is_a_sentence(monkeypatch):
    """vLLM checks its settings as quintet does its recipes: by pydantic."""
    monkeypatch.setattr(compat, "require", lambda: "0.32.0")
    settings = create_model("CacheConfig", block_size=(int, 16))
    said = r"vLLM 0\.32\.0 refuses its settings: block_size: Input should be a valid integer.*rollout\.vllm"
    with pytest.raises(UserError, match=said), compat.starting():
        settings(block_size="abc")


@contextmanager
def stdout_in(log):
    """For the length of the block this process and its children write there, as those of a rank do."""
    kept = os.dup(1)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@pytest.mark.parametrize(
    ("written", "kind", "told"),
    [
        ([], WorkerFailure, r"did not start; all that they wrote is in this rank's log"),
        (
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
            RuntimeError,
            "^CUDA out of memory. Tried to allocate 2.00 GiB.$",
        ),
        (
            ["ValueError: Free memory on device cuda:1 (9.1/139.8 GiB) is less than desired. "],
            UserError,
            r"cannot start as the recipe asks: Free memory on device cuda:1 \(9.1/139.8 GiB\) is less than desired\. \(What",
        ),
        (
            ["    raise KeyError(name)", "KeyError: 'lm_head'", "RuntimeError: Worker failed with error 'lm_head'"],
            WorkerFailure,
            r"did not start \(KeyError: 'lm_head'\); all that they wrote is in this rank's log",
        ),
    ],
)  # fmt: skip
def test_why_processes_do_not_start_is_told(tmp_path, monkeypatch, written, kind, told):
    """vLLM says no more than that they did not; its processes write why, here beside those of an earlier run."""
    monkeypatch.setattr(compat, "require", lambda: "0.20.2")
    monkeypatch.setattr(compat, "other_runner", lambda: "")

    def log(said):
        os.write(1, f"(Worker_TP1 pid=9) ERROR 11-29 14:40:54 [core.py:953] {said}\n".encode())

    def start():
        for line in written:
            log(line)
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    with stdout_in(tmp_path / "rollout-0.log"):
        log("ValueError: of yesterday")
        with pytest.raises(kind, match=told), compat.starting():
            start()


def test_an_error_of_this_process_goes_on_as_it_is():
    said = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught, compat.starting():
        raise said
    assert caught.value is said


@pytest.mark.parametrize(
    ("rollout", "lacks"),
    [
        ({}, None),
        ({"layout": {"tp": 2}, "quantization": "fp8"}, None),
        ({"return_routes": True}, None),
        ({"layout": {"pp": 2}}, "rollout.layout.pp > 1 (not tried)"),
        ({"lora": {"rank": 8}, "adapter_sync": "separate"}, "rollout.adapter_sync=separate"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "rollout.vllm.speculative_config"),
        ({"draft_tokens": 1}, None),
        ({"vllm": {"enforce_eager": True, "enable_dbo": True}}, "rollout.vllm.enable_dbo (not tried)"),
        ({"vllm": {"enforce_eager": True}}, None),
        ({"vllm": {"async_scheduling": True, "cudagraph_capture_sizes": [1, 8, 64]}}, None),
        ({"vllm": {"async_scheduling": False}}, "rollout.vllm.async_scheduling (not tried)"),
        ({"vllm": {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 9}}, None),
        ({"vllm": {"hf_overrides": {"rope_theta": 2}, "load_format": "dummy"}}, None),
    ],
)
def test_the_second_runner_is_taken_where_it_can_do_all(monkeypatch, rollout, lacks):
    monkeypatch.setenv(runners.RUNNER, "left by an engine before")
    monkeypatch.setattr(runners, "_RUNNER_ASKED", None)
    assert second_runner_lacks(recipe_of(**rollout)) == lacks
    line = runners.choose_runner(recipe_of(**rollout))
    assert os.environ[runners.RUNNER] == ("0" if lacks else "1")
    assert line == (
        f"vLLM on GPUs: the first model runner, the slower: the second lacks {lacks}"
        if lacks
        else "vLLM on GPUs: the second model runner, the faster: it can do all that the recipe asks"
    )


def test_the_users_runner_is_taken(monkeypatch):
    monkeypatch.setenv(runners.RUNNER, "0")
    monkeypatch.setattr(runners, "_RUNNER_ASKED", "0")
    line = runners.choose_runner(recipe_of())
    assert line.endswith("the first model runner, the slower: VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    assert os.environ[runners.RUNNER] == "0"
    with pytest.raises(
        UserError, match=r"return_routes=true with VLLM_USE_V2_MODEL_RUNNER=0 in the env.* second"
    ):
        runners.choose_runner(recipe_of(return_routes=True))
    for wrong in ("2", "true"):
        monkeypatch.setattr(runners, "_RUNNER_ASKED", wrong)
        with pytest.raises(
            UserError, match=f"VLLM_USE_V2_MODEL_RUNNER={wrong} in the environment is no model"
        ):
            runners.choose_runner(recipe_of())


def test_an_empty_choice_of_runner_is_none(monkeypatch):
    monkeypatch.setenv(runners.RUNNER, "")
    spec = importlib.util.find_spec(runners.__name__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh._RUNNER_ASKED is None
    assert runners.RUNNER not in os.environ
