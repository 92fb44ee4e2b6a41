"""`quintet train` with vLLM: the whole loop, its weights proved after every sync."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.data.tokenizer import build_char_tokenizer
from quintet.runs.ledger import read_metrics
from tests.engine.test_fp8_checkpoints import in_eight_bits
from tests.rollout.vllm.conftest import DEVICE, TOLERANCE
from tests.rollout.vllm.models import save

ROOT = Path(__file__).parents[3]
TINY = [
    *("train.steps=2", "train.prompts_per_step=4", "train.eval_prompts=4", "train.eval_samples_per_prompt=2"),
    *("model.build.layers=2", "model.build.hidden_size=64", "sft=null", "rollout.samples_per_prompt=4"),
    *("optimizer.warmup_steps=1", f"cluster.device={DEVICE}", "rollout.memory_fraction=0.1"),
    *("rollout.backend=vllm", "rollout.sequences_per_rank=16", "rollout.max_response_tokens=6"),
]

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(
            [
                *("cluster.ranks=2", "layout.tp=2", "rollout.layout.tp=2"),
                *("engine.offload_params=1", "engine.offload_optimizer=1"),
            ],
            id="colocated",
        ),
        pytest.param(
            ["cluster.ranks=1", "rollout.placement=separate", "rollout.ranks=1"],
            marks=pytest.mark.nightly,
            id="separate",
        ),
        pytest.param(
            ["cluster.ranks=1", "lora.rank=4", "rollout.adapter_sync=separate", "optimizer.lr=1.0e-3"],
            id="adapters",
        ),
        pytest.param(
            [
                *("cluster.ranks=1", "model.build.family=mimo", "model.build.tied_embeddings=false"),
                *("model.build.heads=2", "model.build.kv_heads=2", "model.build.head_dim=32"),
                *("mtp.init_layers=1", "rollout.draft_tokens=1", "rollout.sleep_level=0"),
            ],
            id="drafts-awake",
        ),
    ],
)
def test_a_run_trains_on_what_vllm_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], placement: list[str]
) -> None:
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *TINY, *placement, f"run.dir={tmp_path}"]) == 0, capsys.readouterr()
    (run,) = tmp_path.iterdir()
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["sync/gib"] > 0
        assert line["sync/proof_seconds"] > 0
        assert (line.get("rollout/draft_tokens", 0) > 0) == ("rollout.draft_tokens=1" in placement)
        # The same weights, in fp32, by other kernels.
        assert line["mismatch/logprob_gap_max"] < max(TOLERANCE, 1e-3)
    asleep = "rollouts sleep" in (run / "logs" / "hybrid.log").read_text()
    assert asleep == ("rollout.sleep_level=0" not in placement)  # a separate one's KV cache does
    # Once vLLM's loading has shown what each of two devices needs, which is before the first step, each gets that alone.
    (weights,) = (run / "checkpoint").glob("*.safetensors")
    travelled = {line["sync/gib"] * 2**30 / weights.stat().st_size for line in steps}
    low, high = (0.0, 0.2) if "rollout.adapter_sync=separate" in placement else (0.9, 1.2)
    assert all(low < one < high for one in travelled), travelled


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 160}, []),
        (
            "qwen3",
            {"intermediate_size": 160},
            ["lora.rank=4", "rollout.adapter_sync=separate", "optimizer.lr=1.0e-3"],
        ),
    ],
    ids=["whole", "adapters"],
)
def test_a_directory_in_8_bits_is_trained_and_generates_in_more(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    sizes: dict[str, int],
    words: list[str],
) -> None:
    """Without 8 bits in vLLM, whose log-probs are those of the numbers that the trainer makes of the blocks."""
    path = save(family, tmp_path / "model", hidden_size=256, **sizes)
    in_eight_bits(path)
    build_char_tokenizer("0123456789+=>", path)
    given = [one for one in TINY if "model.build" not in one]
    given += ["model.build=null", f"model.path={path}", "cluster.ranks=1", f"run.dir={tmp_path / 'runs'}"]
    given += words
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *given]) == 0, capsys.readouterr()
    (run,) = (tmp_path / "runs").iterdir()
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(steps) == 2
    assert all(line["mismatch/logprob_gap_max"] < max(TOLERANCE, 1e-3) for line in steps)
    assert "quantization_config" not in json.loads((run / "checkpoint" / "config.json").read_text())
