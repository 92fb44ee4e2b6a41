"""A working directory full of modules that are called like those a run imports: no process of the run takes one of them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import BUSY

ROOT = Path(__file__).parents[2]
TINY = [
    *(
        "model.build.layers=1",
        "model.build.hidden_size=32",
        "sft=null",
        "train.steps=1",
        "train.eval_prompts=0",
    ),
    *("train.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4"),
    *("optimizer.warmup_steps=0", "cluster.ranks=1", "cluster.device=cpu", "data.max_prompt_tokens=64"),
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with a module of every name that the standard library and the installed packages have.

    Those that Python itself needs to get as far as `python -m quintet` are left out: no program could help there.
    """
    code = "import runpy, sys; print(*sys.modules)"
    needed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    names = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys() | {"socks"}
    path = tmp_path / "work"
    path.mkdir()
    trace = f"import os; open({str(tmp_path / 'trace')!r}, 'a').write(__name__ + ' ')\n"
    for name in names - set(needed.stdout.split()) - {"quintet", "tests"}:
        if name.isidentifier():
            (path / f"{name}.py").write_text(trace)
    return path


def run(hostile: Path, *words: str, code: int = 0, **environment: str) -> str:
    """What a command says in the working directory. Asserts that nothing there was imported."""
    done = subprocess.run(
        [*words],
        cwd=hostile,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120 * BUSY,
        check=False,
    )
    trace = hostile.parent / "trace"
    assert not trace.exists(), f"imported: {trace.read_text()}\n{done.stderr}"
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


RECIPE = str(ROOT / "recipes" / "laptop_demo.yaml")
MODULE = [sys.executable, "-m", "quintet"]
SCRIPT = [str(Path(sys.executable).with_name("quintet"))]


@pytest.mark.parametrize(
    "quintet", [MODULE, pytest.param(SCRIPT, marks=pytest.mark.slow)], ids=["python -m", "script"]
)
def test_check_imports_nothing_from_there(hostile: Path, quintet: list[str]) -> None:
    assert "is a sound recipe" in run(hostile, *quintet, "check", RECIPE, *TINY)


@pytest.fixture
def my_reward(hostile: Path) -> str:
    """A reward that lies there, named as a file."""
    (hostile / "my_reward.py").write_text("def score(prompt, response, answer):\n    return 1.0\n")
    return "reward.function=my_reward.py:score"


@pytest.mark.parametrize(
    "quintet", [MODULE, pytest.param(SCRIPT, marks=pytest.mark.nightly)], ids=["python -m", "script"]
)
@pytest.mark.slow
def test_no_process_of_a_run_imports_anything_from_there(
    hostile: Path, quintet: list[str], my_reward: str
) -> None:
    """But for the reward that is asked for."""
    assert "Run finished after 1 steps" in run(hostile, *quintet, "train", RECIPE, *TINY, my_reward)


@pytest.mark.nightly
def test_nor_do_those_of_verify_resume(hostile: Path) -> None:
    said = run(hostile, *MODULE, "verify-resume", RECIPE, *TINY, "--steps", "1")
    assert "identical: every step and every weight" in said


@pytest.mark.slow
@pytest.mark.usefixtures("my_reward")
def test_a_reward_there_is_named_as_a_file_or_put_on_the_path(hostile: Path) -> None:
    said = run(hostile, *MODULE, "train", RECIPE, *TINY, "reward.function=my_reward:score", code=2)
    assert "there is no module 'my_reward'; it is here as my_reward.py" in said
    assert "write my_reward.py:function, or put the directory into PYTHONPATH" in said


@pytest.mark.vllm
def test_nor_do_vllms_own_processes(hostile: Path) -> None:
    """Of an engine with two ranks, which it starts itself."""
    rollout = ["rollout.backend=vllm", "rollout.layout.tp=2", "model.build.head_dim=32"]
    said = run(hostile, *MODULE, "generate", RECIPE, *TINY, *rollout, "--prompt", "1+1=", "cluster.ranks=2")
    assert '"prompt": "1+1="' in said
