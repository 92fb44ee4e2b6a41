"""The SGLang adapter without SGLang: what it asks, how it reads what is told, and its order around pauses and syncs."""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing import reductions

from quintet.errors import QuintetError, UserError
from quintet.models import ModelShape, MoeShape
from quintet.models.mcore import whole_box
from quintet.recipe import schema
from quintet.recipe.sglang import DECIDED, refusals
from quintet.rollout import options
from quintet.rollout.base import Piece, Request, Sampling
from quintet.rollout.external_engine import Job
from quintet.rollout.native.sampler import draw
from quintet.rollout.sglang import compat
from quintet.rollout.sglang.buckets import in_buckets
from quintet.rollout.sglang.engine import SglangEngine
from quintet.rollout.sglang.rollout import SglangRollout
from quintet.rollout.sglang.sampling import answer, parameters, routes_of
from quintet.rollout.sglang.settings import engine_arguments
from tests.models.directory import write_model
from tests.rollout.sglang import stand_in

ENTRY = """
import asyncio, atexit, os
asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())

class Engine:
    def __init__(self, starts):
        atexit.register(self.shutdown)
        self.scheduler = self.run_scheduler_process_func
        self.meeting = os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
        self.tokenizer_manager = self._subprocess_watchdog = self
        if not starts:
            raise RuntimeError("no room")

    def stop(self):
        pass

    def shutdown(self):
        pass
"""
"""What is of SGLang's own engine here."""
ARGUMENTS = {"tp_size": 1, "context_length": 8192}

# what is asked


def test_sampling_is_asked_in_its_words():
    sampling = Sampling(0.7, 0.9, 0, 0.0, 16, stop=("\n",), stop_token_ids=(7,))
    asked = parameters(sampling, Request([1], samples=2, max_response_tokens=(3, 4)), 1, 99)
    assert asked == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "sampling_seed": 99,
        "max_new_tokens": 4,
        "stop": ["\n"],
        "stop_token_ids": [7],
        "ignore_eos": False,
        "skip_special_tokens": False,
    }


def test_going_on_past_the_end_leaves_out_all_that_ends_a_response():
    asked = parameters(Sampling(ignore_end=True, stop_token_ids=(7,)), Request([1]), 0, 0)
    assert asked["ignore_eos"] is True
    assert asked["stop_token_ids"] == []


def recipe(**rollout) -> schema.Recipe:
    return schema.Recipe(rollout=schema.Rollout(backend="sglang", **rollout))


@pytest.mark.parametrize("name", sorted(DECIDED))
def test_options_that_quintet_decides_are_refused(name):
    (problem,) = refusals(recipe(sglang={name: 1}).rollout)
    assert f"rollout.sglang.{name}" in problem.keys
    assert problem.message.endswith("; remove it")


@pytest.mark.parametrize(
    ("rollout", "names"),
    [
        ({"top_k": 5, "top_p": 0.5}, "top_k=5 with rollout.top_p=0.5"),
        ({"min_p": 0.1}, "min_p=0.1: SGLang has no min_p for requests with a seed"),
        (
            {
                "min_p": 0.1,
                "sglang": {"enable_deterministic_inference": False, "speculative_algorithm": "NGRAM"},
            },
            "nor where drafts are judged",
        ),
        ({"mode": "server"}, "rollout.mode=server is of vllm"),
        ({"quantization": "fp8"}, "rollout.quantization=fp8 with SGLang"),
        ({"layout": {"pp": 2}}, "rollout.layout.pp=2 with SGLang"),
        ({"layout": {"tp": 4, "ep": 3}}, "an ep that divides tp=4"),
        ({"sglang": {"speculative_algorithm": "EAGLE"}}, "speculative_algorithm=EAGLE: a model that drafts"),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_do(rollout, names):
    (problem,) = refusals(recipe(**rollout).rollout)
    assert names in problem.message
    assert "; use " in problem.message


@pytest.mark.parametrize(
    "rollout",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 9},
        {"min_p": 0.1, "top_p": 0.9, "sglang": {"enable_deterministic_inference": False}},
        {"layout": {"tp": 4, "ep": 2}, "sglang": {"attention_backend": "fa3"}},
    ],
)
def test_what_it_can_do_is_not_refused(rollout):
    assert not list(refusals(recipe(**rollout).rollout))


def test_a_recipe_becomes_its_arguments(monkeypatch, tmp_path):
    known = frozenset({"attention_backend", "moe_runner_backend", "tp_size"})
    monkeypatch.setattr(options, "declared_fields", lambda *place: known)
    one = recipe(layout={"tp": 2}, sleep_level=1, return_routes=True, sglang={"attention_backend": "fa3"})
    arguments = engine_arguments(one, tmp_path, 0.8)
    assert arguments["tp_size"] == 2
    assert arguments["mem_fraction_static"] == one.rollout.memory_fraction / 0.8
    assert arguments["enable_weights_cpu_backup"]
    assert arguments["enable_return_routed_experts"]
    assert arguments["enable_deterministic_inference"]
    assert arguments["attention_backend"] == "fa3"
    assert arguments["moe_runner_backend"] == "triton"
    asked = recipe(sglang={"moe_runner_backend": "deep_gemm"})
    assert engine_arguments(asked, tmp_path, 1.0)["moe_runner_backend"] == "deep_gemm"
    assert arguments["context_length"] > one.data.max_prompt_tokens + one.rollout.max_response_tokens + 1
    with pytest.raises(
        UserError, match=r"attention_backand: the ServerArgs .* did you mean attention_backend"
    ):
        engine_arguments(recipe(sglang={"attention_backand": "fa3"}), tmp_path, 1.0)


@pytest.mark.parametrize("seed", [-1, 2**40 + 3])
def test_any_seed_of_a_recipe_is_one_of_its(tmp_path, seed):
    """It hands its own to numpy, srt/utils/common.py: set_random_seed."""
    of_seed = recipe().model_copy(update={"run": schema.Run(seed=seed)})
    np.random.RandomState(engine_arguments(of_seed, tmp_path, 1.0)["random_seed"])


def test_a_share_of_memory_that_is_not_free_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"rollout.memory_fraction=0.6: 0.40 of its fullest device.*use 0.38 or less"
    ):
        engine_arguments(recipe(memory_fraction=0.6), tmp_path, 0.4)


@pytest.mark.parametrize(("devices", "share"), [(1, 0.9), (2, 0.75), (3, 0.25)])
def test_the_fullest_of_its_devices_counts(monkeypatch, devices, share):
    """SGLang has all ranks count with what is free on the fullest, srt/distributed/bootstrap.py: pre_model_load_memory."""
    used = [5, 20, 70, 90]  # of 100, and with what the driver keeps, which torch does not count
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (90, 100))
    monkeypatch.setattr("torch.cuda.device_memory_used", used.__getitem__)
    assert compat.free_share(devices) == share


# versions


def test_without_sglang_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda: None)
    with pytest.raises(
        UserError, match=r"not installed; supported is sglang 0\.5\.17: pip install -e '\.\[sglang\]'"
    ):
        compat.prepare("cuda")


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17.post1", "0.6.0"])
def test_another_version_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(compat, "installed", lambda: version)
    with pytest.raises(
        UserError, match=rf"sglang {version} is installed, and not supported; supported is sglang 0\.5\.17"
    ):
        compat.prepare("cuda")


def test_a_transformers_that_it_cannot_be_imported_with_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda: "0.5.17")
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "5.19.0")
    with pytest.raises(UserError, match=r"needs transformers 5\.12, and 5\.19\.0 is installed.*pip install"):
        compat.prepare("cuda")


def test_it_needs_gpus_and_log_probs_of_the_policy(monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda: "0.5.17+cu130")
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "5.12.1")
    with pytest.raises(UserError, match="needs NVIDIA GPUs"):
        compat.prepare("cpu")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    with pytest.raises(UserError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB is set.*unset it"):
        compat.prepare("cuda")


def test_what_its_engine_changes_here_is_as_it_was(monkeypatch, tmp_path):
    """What srt/entrypoints/engine.py and srt/utils/common.py of sglang 0.5.17 change in the process that makes an engine."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    environment, handlers = dict(os.environ), logging.getLogger().handlers[:]
    method, policy = multiprocessing.get_start_method(allow_none=True), asyncio.get_event_loop_policy()
    with compat.for_its_processes(tmp_path / "meeting"):
        assert os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/meeting"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_NVLS_ENABLE": "0"}
        logging.basicConfig(level=logging.ERROR, force=True)
        multiprocessing.set_start_method("spawn", force=True)
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    assert dict(os.environ) == environment
    assert logging.getLogger().handlers == handlers
    assert (multiprocessing.get_start_method(allow_none=True), asyncio.get_event_loop_policy()) == (
        method,
        policy,
    )


@pytest.mark.parametrize("starts", [True, False])
def test_neither_its_import_nor_a_start_that_fails_leaves_anything(monkeypatch, tmp_path, starts):
    """As sglang 0.5.17's srt/entrypoints/engine.py: a policy of event loops, and something to do at the end."""
    package = tmp_path / "sglang" / "srt" / "entrypoints"
    package.mkdir(parents=True)
    (package / "engine.py").write_text(ENTRY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy, told = asyncio.get_event_loop_policy(), tmp_path / "told"
    left: list[object] = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    if starts:
        made = compat.make_engine({"starts": True}, told)
        assert made.meeting == f"file://{told}"
        assert made.scheduler is compat.run_scheduler
    else:
        with pytest.raises(RuntimeError, match="no room"):
            compat.make_engine({"starts": False}, told)
    assert not left
    assert asyncio.get_event_loop_policy() is policy
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def sglang_modules(monkeypatch, **contents):
    """Have modules of these names below sglang.srt, with these contents; __ stands for a dot."""
    for name, content in contents.items():
        parts = ["sglang", "srt", *name.split("__")]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[".".join(parts)]).update(content)


def test_it_draws_with_quintets_noise(monkeypatch):
    """A draw that SGLang's own noise spoils: `multinomial_with_seed` of sglang 0.5.17 takes token 90164 here, whatever its probability,
    as the 32 bits of murmur_hash32(seed, position, token) are all ones."""
    ran = []
    own = {"multinomial_with_seed": lambda logprobs, seed, positions: torch.full((len(seed), 1), 90164)}
    sglang_modules(
        monkeypatch,
        layers__sampler=own,
        managers__scheduler={"run_scheduler_process": lambda *a: ran.append(a)},
    )
    compat.run_scheduler(1, 2)
    assert ran == [(1, 2)]
    draws = sys.modules["sglang.srt.layers.sampler"].multinomial_with_seed
    seeds = torch.tensor([8800173437388836502, 7])
    positions = torch.tensor([4349, 3], dtype=torch.int32)
    sure = torch.full((2, 151936), -60.0, dtype=torch.float64)
    sure[:, 7] = 0.0
    assert draws(sure, seeds, positions).tolist() == [[7], [7]]
    even = torch.zeros(2, 64).log_softmax(-1)
    native, *_ = draw(even, Sampling(), seeds, positions.long())
    assert draws(even, seeds, positions)[:, 0].tolist() == native.tolist()


def test_ranks_that_write_on_a_tensor_have_one_each(monkeypatch):
    """gpt-oss's biases: all ranks but the first fill what they were handed with zeros, and the first may not have read it yet."""
    handed = []
    sglang_modules(
        monkeypatch,
        managers__io_struct={"UpdateWeightsFromTensorReqInput": SimpleNamespace},
        utils={
            "MultiprocessingSerializer": SimpleNamespace(
                serialize=lambda one: handed.append(one["flattened_tensor"])
            )
        },
        utils__patch_torch={"monkey_patch_torch_reductions": lambda: None},
        weight_sync__tensor_bucket={"FlattenedTensorMetadata": lambda *fields: fields},
    )

    class Manager:
        async def update_weights_from_tensor(self, asked, request):
            return True, ""

    engine = SimpleNamespace(tokenizer_manager=Manager())
    for name, apart in (("experts.down_proj_bias", True), ("experts.down_proj", False)):
        handed.clear()
        entry = (f"model.layers.0.mlp.{name}", (4,), torch.float32, 0, 16)
        assert asyncio.run(compat.load(engine, torch.zeros(16, dtype=torch.uint8), [entry], 2)) == (True, "")
        first, second = handed
        assert (first.data_ptr() != second.data_ptr()) is apart


def test_tensors_of_the_host_are_sent_as_before(monkeypatch):
    """After what srt/utils/patch_torch.py of sglang 0.5.17 puts in the place of torch's functions."""

    def patch():
        if hasattr(reductions, "_reduce_tensor_original"):
            return
        reductions._reduce_tensor_original = reductions.reduce_tensor
        reductions.reduce_tensor = lambda tensor: reductions._reduce_tensor_original(tensor)[6]
        reductions.init_reductions()

    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    for name in ("sglang.srt", "sglang.srt.utils", "sglang.srt.utils.patch_torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.utils.patch_torch"].monkey_patch_torch_reductions = patch
    for _ in range(2):
        with compat._devices_by_uuid(), pytest.raises(IndexError):
            ForkingPickler.dumps(torch.ones(3))
        ForkingPickler.dumps(torch.ones(3))


def test_the_extra_is_the_version_supported():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={compat.SUPPORTED[0]}"]


# what is told: results of the shape of srt/managers/tokenizer_manager.py of sglang 0.5.17


def result(ids, reason, **meta):
    told = [(-0.5, token, None) for token in ids]
    return {
        "text": "",
        "output_ids": list(ids),
        "meta_info": {"id": "x", "finish_reason": reason, "output_token_logprobs": told, **meta},
    }


JOB = Job([1, 2, 3], {"max_new_tokens": 3, "stop_token_ids": [9]})
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.mark.parametrize(
    ("ids", "reason", "finish"),
    [
        ([4, 9], {"type": "stop", "matched": 9}, "stop"),
        ([4, 5], {"type": "stop", "matched": "\n\n"}, "stop"),
        ([4, 5, 6], {"type": "length", "length": 3}, "length"),
        ([4, 5, 9], {"type": "length", "length": 3}, "stop"),
        ([4], ABORTED, "abort"),
        ([], {"type": "abort", "message": "Abort in waiting queue"}, "abort"),
        ([4, 9], ABORTED, "stop"),
        ([4, 5, 6], ABORTED, "length"),
    ],
)
def test_the_finish_is_what_ended_the_response(ids, reason, finish):
    made = answer(result(ids, reason), JOB)
    assert made.finish == finish
    assert made.response_ids == ids
    assert made.logprobs == [-0.5] * len(ids)


def test_a_scored_prompt_has_no_log_prob_of_its_first_token():
    told = [(None, 1, None), (-2.0, 2, None), (-3.0, 3, None)]
    job = Job([1, 2, 3], {"max_new_tokens": 0}, scores=True)
    made = answer(result([], {"type": "length", "length": 0}, input_token_logprobs=told), job)
    assert made.prompt_logprobs == [-2.0, -3.0]
    assert answer(result([], ABORTED), job).finish == "abort"


def test_counts_are_named_as_those_of_vllm():
    meta = {
        "prompt_tokens": 8,
        "cached_tokens": 6,
        "spec_verify_ct": 3,
        "spec_num_proposed_drafts": 9,
        "spec_num_correct_drafts": 5,
    }
    made = answer(result([4], {"type": "length", "length": 1}, **meta), JOB)
    assert made.counts == {
        "prefix_cache_queries": 8,
        "prefix_cache_hits": 6,
        "drafts": 3,
        "draft_tokens": 9,
        "accepted_tokens": 5,
    }


def test_log_probs_of_other_tokens_are_an_error():
    wrong = result([4, 5], {"type": "stop", "matched": 5})
    wrong["meta_info"]["output_token_logprobs"][1] = (-0.5, 6, None)
    with pytest.raises(QuintetError, match="not those of the 2 it generated"):
        answer(wrong, JOB)
    del wrong["meta_info"]["output_token_logprobs"]
    with pytest.raises(QuintetError, match="log-probs of 0 tokens"):
        answer(wrong, JOB)


def test_an_end_of_another_kind_is_an_error():
    with pytest.raises(QuintetError, match="SGLang ended a request with 'preempted'"):
        answer(result([4], {"type": "preempted"}), JOB)


def test_scores_that_are_no_numbers_are_an_error():
    told = result([1, 5], {"type": "stop", "matched": "NaN happened"})
    with pytest.raises(QuintetError, match="scores that are no numbers"):
        answer(told, JOB)


def test_routes_are_of_layers_with_experts():
    moe = MoeShape(experts=8, top_k=2, ffn_hidden_size=8, dense_layers=(0,))
    shape = ModelShape(
        family="qwen3_moe",
        layers=3,
        hidden_size=8,
        ffn_hidden_size=8,
        heads=2,
        kv_heads=2,
        head_dim=4,
        vocab_size=16,
        max_positions=64,
        tied_embeddings=False,
        norm_eps=1e-6,
        moe=moe,
    )
    flat = np.arange(4 * 3 * 2, dtype=np.int32)
    routes = routes_of(flat, shape, 5)
    assert routes.dtype == np.int16
    assert (routes == flat.reshape(4, 3, 2)[:, 1:]).all()
    with pytest.raises(QuintetError, match="24 routes of 6 tokens"):
        routes_of(flat, shape, 6)


# weights


def whole(name, tensor):
    return Piece(name, tuple(tensor.shape), whole_box(tensor.shape), tensor)


def unpacked(buckets):
    return {
        name: bucket.flat[start:stop].view(dtype).view(shape).clone()
        for bucket in buckets
        for name, shape, dtype, start, stop in bucket.entries
    }


def test_buckets_hold_every_tensor_bit_by_bit():
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(300, 1000),
        "b": torch.randn(7, dtype=torch.bfloat16),
        "large": torch.randn(600, 1000),
        "c": torch.randint(-9, 9, (5, 3), dtype=torch.int8),
        "d": torch.randn(3, dtype=torch.float64),
    }

    def pieces():
        for name, tensor in tensors.items():
            passing = tensor.clone()
            yield whole(name, passing)
            passing.zero_()  # its memory is the next piece's

    buckets = list(in_buckets(pieces(), 1, torch.device("cpu")))
    assert [[name for name, *_ in bucket.entries] for bucket in buckets] == [
        ["a"],
        ["b"],
        ["large"],
        ["c", "d"],
    ]
    assert max(len(bucket.flat) for bucket in buckets) < 600 * 1000 * 4 + 512
    found = unpacked(buckets)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_tensors_that_sglang_joins_share_a_bucket():
    layer = "model.layers.{}.self_attn.{}.weight"
    names = [
        layer.format(0, "q_a_proj"),
        layer.format(0, "o_proj"),
        layer.format(1, "kv_a_proj_with_mqa"),
        layer.format(0, "kv_a_proj_with_mqa"),
        layer.format(1, "q_a_proj"),
        layer.format(2, "kv_a_proj_with_mqa"),
    ]
    big = 150_000  # of which one bucket of 1 MiB holds one
    pieces = [whole(name, torch.full((big,), float(at))) for at, name in enumerate(names)]
    buckets = list(in_buckets(pieces, 1, torch.device("cpu")))
    held = [{name for name, *_ in bucket.entries} for bucket in buckets]
    for at in (0, 1):
        pair = {layer.format(at, "q_a_proj"), layer.format(at, "kv_a_proj_with_mqa")}
        assert any(pair <= bucket for bucket in held)
    assert {name: float(tensor[0]) for name, tensor in unpacked(buckets).items()} == {
        name: float(at) for at, name in enumerate(names)
    }


def test_a_part_of_a_tensor_is_refused():
    part = Piece("a", (4, 4), ((0, 2), (0, 4)), torch.zeros(2, 4))
    with pytest.raises(QuintetError, match="a: SGLang takes whole tensors"):
        list(in_buckets([part], 1, torch.device("cpu")))


# pauses, aborts, sleep


@pytest.fixture
def stand_ins(monkeypatch):
    """The stand-ins of SGLang's engine that were made instead of it."""
    made = []

    def make(arguments, meeting):
        made.append(stand_in.Engine(**arguments))
        return made[-1]

    monkeypatch.setattr(compat, "make_engine", make)
    monkeypatch.setattr(compat, "prepare", lambda device: None)
    monkeypatch.setattr(compat, "free_share", lambda devices: 1.0)
    monkeypatch.setattr(compat, "release", lambda engine, parts: engine.release(list(parts)))
    monkeypatch.setattr(compat, "restore", lambda engine, parts: engine.restore(list(parts)))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100 - stand_in.in_use(made), 100))
    monkeypatch.setattr("torch.cuda.device_memory_used", lambda device: 10 * device + stand_in.in_use(made))
    return made


@pytest.fixture
def engine(stand_ins):
    one = SglangEngine(ARGUMENTS)
    (one.inner,) = stand_ins
    yield one
    one.close()


def jobs(n, tokens=50, **changes):
    return [
        Job([1, at], {"max_new_tokens": tokens, "stop_token_ids": [], "ignore_eos": False} | changes)
        for at in range(n)
    ]


def ordered(engine, work):
    told = {place: made for together in engine.run(work) for place, made in together.items()}
    return [told[place] for place in range(len(work))]


class Running:
    """A call of `run` in a thread of its own."""

    def __init__(self, engine, work):
        self.answers = None
        self._thread = threading.Thread(target=self._run, args=(engine, work))
        self._thread.start()
        while not engine.inner.requests:
            time.sleep(0.001)

    def _run(self, engine, work):
        self.answers = ordered(engine, work)

    def done(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.answers


def test_jobs_are_answered_by_their_places(engine):
    answers = ordered(engine, jobs(5))
    assert [a.response_ids for a in answers] == [[(at + k + 1) % 100 for k in range(50)] for at in range(5)]
    assert {a.finish for a in answers} == {"length"}
    done = [place for together in engine.run([*jobs(1, tokens=80), *jobs(1)]) for place in together]
    assert done == [1, 0], "told as they finish"


def test_what_is_paused_goes_on_where_it_was(engine):
    expected = ordered(engine, jobs(3))
    running = Running(engine, jobs(3))
    time.sleep(0.03)
    engine.pause()
    assert not engine.inner.requests
    before = len(engine.inner.log)
    time.sleep(0.05)
    assert len(engine.inner.log) == before, "something ran while paused"
    engine.resume()
    assert [(a.response_ids, a.logprobs, a.finish) for a in running.done()] == [
        (a.response_ids, a.logprobs, a.finish) for a in expected
    ]
    resumed = [int(line.split()[1]) for line in engine.inner.log[before:]]
    assert min(resumed) > 2, "what was generated before the pause was not kept"


def test_with_stop_strings_a_paused_response_begins_anew(engine):
    running = Running(engine, jobs(2, stop=["x"]))
    time.sleep(0.03)
    engine.pause()
    engine.inner.log.clear()
    engine.resume()
    assert all(len(a.response_ids) == 50 for a in running.done())
    assert engine.inner.log == ["generate 2"] * 2


@pytest.mark.parametrize("paused", [False, True])
def test_what_is_aborted_has_the_tokens_it_came_to(engine, paused):
    running = Running(engine, jobs(3, tokens=5000))
    time.sleep(0.03)
    if paused:
        engine.pause()
    engine.abort()
    answers = running.done()
    assert {a.finish for a in answers} == {"abort"}
    assert all(0 < len(a.response_ids) == len(a.logprobs) < 5000 for a in answers)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(ordered, engine, jobs(1))
        if paused:  # and stays so
            time.sleep(0.05)
            assert not later.done()
            engine.forget_prefixes()  # which nobody may have requests for
            engine.resume()
        assert len(later.result(20)[0].response_ids) == 50, "it goes on after an abort"


def test_memory_is_given_up_and_weights_taken_only_without_requests(engine):
    running = Running(engine, jobs(2, tokens=300))
    with pytest.raises(QuintetError, match="only without requests: pause or abort them first"):
        engine.release(["kv_cache", "weights"])
    with pytest.raises(QuintetError, match="only without requests"):
        engine.forget_prefixes()
    engine.pause()
    engine.inner.log.clear()
    engine.release(["kv_cache", "weights"])
    assert engine.inner.log == ["flush", "release kv_cache weights"]
    engine.restore(["weights"])
    engine.restore(["kv_cache"])
    engine.resume()
    assert all(len(a.response_ids) == 300 for a in running.done())


def test_a_request_that_fails_leaves_nothing_behind(engine):
    bad = Job([1], {"max_new_tokens": 5})  # no stop_token_ids: the stand-in fails of it
    with pytest.raises(KeyError):
        ordered(engine, [*jobs(3, tokens=5000), bad])
    assert not engine.inner.requests
    assert len(ordered(engine, jobs(1))) == 1


def test_its_processes_end_with_it_and_no_others(stand_ins):
    other = subprocess.Popen(["sleep", "600"])
    try:
        one = SglangEngine(ARGUMENTS)
        assert one._meeting.is_file(), "its ranks find each other in it as long as they live"
        one.close()
        assert not one._meeting.exists()
        assert not psutil.pid_exists(stand_ins[0].process.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_engine_that_does_not_start_says_why(monkeypatch):
    met = []

    def fails(arguments, meeting):
        met.append(meeting)
        raise RuntimeError("no room for the KV cache")

    monkeypatch.setattr(compat, "make_engine", fails)
    before = signal.getsignal(signal.SIGQUIT)
    with pytest.raises(RuntimeError, match="no room"):
        SglangEngine(ARGUMENTS)
    assert signal.getsignal(signal.SIGQUIT) is before
    assert not met[0].exists()


def test_a_kv_cache_that_does_not_hold_a_sequence_is_an_error(stand_ins):
    """SGLang would end responses where it is full, as if they had come to their limit."""
    with pytest.raises(
        UserError, match=r"holds 10000 tokens, and a sequence may have 10001: .* rollout.memory_fraction"
    ):
        SglangEngine(ARGUMENTS | {"context_length": stand_in.TOKENS + 1})
    assert not psutil.pid_exists(stand_ins[0].process.pid)


@pytest.fixture
def start(stand_ins, tmp_path):
    """`start(**rollout)`: a rollout on the stand-in."""
    made = []

    def one(**rollout):
        made.append(SglangRollout(recipe(**rollout), write_model(tmp_path / "m"), device="cuda", decode=str))
        return made[-1]

    yield one
    for rollout in made:
        rollout.close()


def test_samples_and_counts_of_the_rollout(start):
    rollout = start()
    ((sample, _),) = rollout.generate([Request([1, 2], samples=2)], Sampling(max_response_tokens=3))
    assert sample.response_ids == [3, 4, 5]
    assert sample.policy_logprobs == [-3.0, -4.0, -5.0]
    counted = rollout.metrics()
    assert counted["prefix_cache_queries"] == 4
    assert counted["prefix_cache_hits"] == 2
    assert set(rollout.metrics().values()) == {0.0}
    assert rollout.score([[4, 5, 6]]) == [[-5.0, -6.0]]


@pytest.mark.parametrize("level", [1, 2])
def test_it_generates_once_awake_and_never_with_weights_it_forgot(start, level):
    rollout = start(sleep_level=level)
    ask = ([Request([1])], Sampling(max_response_tokens=2))
    rollout.pause()
    rollout.sleep(level)
    rollout.resume()
    rollout.wake("weights")
    with pytest.raises(QuintetError, match="kv_cache are asleep"):
        rollout.generate(*ask)
    rollout.wake("kv_cache")
    if level == 1:
        assert rollout.generate(*ask)[0][0].response_ids == [2, 3]
    else:
        with pytest.raises(QuintetError, match="weights are undefined"):
            rollout.generate(*ask)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_leaves_and_comes_is_told_of_all_devices(start, devices):
    """By how their memory in use changes: SGLang itself does not tell."""
    rollout = start(sleep_level=1, layout={"tp": devices})
    weights, cache = (devices * stand_in.SIZES[part] for part in ("weights", "kv_cache"))
    assert rollout.sleep(0) == cache
    assert rollout.sleep(1) == weights
    assert rollout.sleep(1) == 0
    assert rollout.wake("weights") == weights
    assert rollout.wake("weights") == 0
    assert rollout.wake("kv_cache") == cache
    assert rollout.sleep(1) == weights + cache


def test_no_bucket_stays_on_the_device(start, monkeypatch):
    """Of the memory that weights came in, nothing is this process's once the KV cache wakes and training goes on."""
    seen, emptied = [], []
    rollout = start()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([one() for one in seen]))
    monkeypatch.setattr(torch, "device", lambda *args: "cpu")

    async def load(engine, flat, entries, ranks):
        seen.append(weakref.ref(flat))
        return True, ""

    class Source:
        def batches(self, receiver):
            yield [whole(f"w{at}", torch.zeros(1 << 18)) for at in range(3)]

    monkeypatch.setattr(compat, "load", load)
    rollout.update_weights(Source())
    assert emptied == [[None]]
