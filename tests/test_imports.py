"""The import rules of the house: they point one way, and the pure rooms stay pure."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from quintet.skip_dynamo_import import uncompiled

ROOT = Path(__file__).resolve().parent.parent
OF_A_RANK = [
    "torch._dynamo",
    "torch._inductor",
    "wandb",
    "sympy",
    "setuptools",
    "tensorboard",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers",
]
"""What a rank imports when it uses it, or never."""
TORCH_FREE = ["packing", "recipe", "models", "plan"]


def rooms(names: list[str]) -> list[str]:
    return [name for name in names if (ROOT / "quintet" / name / "__init__.py").exists()]


def modules(room: str) -> list[str]:
    files = sorted((ROOT / "quintet" / room).rglob("*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]


def imported(file: Path) -> set[str]:
    """Every dotted name that a file imports or reaches through torch, wherever in the file it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


def test_import_linter_contracts_hold() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_torch_free_room_is_under_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = next(c for c in contracts if c["type"] == "forbidden" and "torch" in c["forbidden_modules"])
    assert set(forbidden["source_modules"]) == {f"quintet.{room}" for room in rooms(TORCH_FREE)}


@pytest.mark.parametrize("room", rooms(TORCH_FREE))
def test_room_imports_without_torch(room: str) -> None:
    names = modules(room)
    command = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}]; "
        "sys.exit(', '.join(m for m in ('torch', 'ray', 'megatron', 'transformers') if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{names} brought in: {done.stderr}"


@pytest.mark.parametrize("room", rooms(["algorithms", "packing"]))
def test_room_does_not_use_torch_distributed(room: str) -> None:
    # import-linter sees a foreign package as a whole, so it cannot tell torch.distributed from torch.
    for file in (ROOT / "quintet" / room).rglob("*.py"):
        found = {name for name in imported(file) if name.startswith("torch.distributed")}
        assert not found, f"{file}: {found}"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("quintet.controller.verbs", ["torch", "megatron", "transformers", "quintet.controller.worker"]),
        (
            "quintet.train.ppo",
            ["torch._dynamo", "torch._inductor", "megatron", "quintet.controller.worker", "wandb"],
        ),
        ("quintet.controller.worker", OF_A_RANK),
        ("quintet.controller.rollout_worker", OF_A_RANK),
        # What vLLM's own processes compute with: megatron-core, and TransformerEngine with it, are a third of their start.
        ("quintet.engine.head, quintet.rollout.vllm.weights, quintet.rollout.vllm.param_map", ["megatron"]),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for GPUs are compiled")
def test_a_process_of_a_run_starts_without_what_it_does_not_use(
    module: str, unwanted: list[str], tmp_path: Path
) -> None:
    """The compiler alone costs a laptop seconds in each process."""
    (tmp_path / "wandb.py").touch()  # whether it is installed or not
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = f"import sys, {module}; sys.exit(', '.join(m for m in {unwanted} if m in sys.modules) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{module} brought in: {done.stderr}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for GPUs are compiled")
def test_a_process_of_a_run_trains_without_the_compiler() -> None:
    command = """
import sys, torch
from quintet.data.batch import make_batch
make_batch([[5, 6, 7]], [1])
from quintet.engine.megatron_compat import install
install()
for kind, options in ((torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.5, **options)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    print(kind.__name__, [round(one, 2) for one in weight.tolist()], weight.requires_grad)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "AdamW [0.5, 0.5] True",  # decayed by 0.005 too
        "Adam [0.5, 0.5] True",
        "SGD [0.5, 0.5] True",
        "[]",
    ], done.stderr


def test_marks_for_the_compiler_do_nothing_within_uncompiled_and_are_back_after(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    marks = [torch.compile, torch.compiler.disable, torch.compiler.allow_in_graph]
    with uncompiled():

        @torch.compile(dynamic=True)
        @torch.compiler.disable
        def plain(x: int) -> int:
            return x + 1

    assert plain(1) == 2
    assert not hasattr(plain, "__wrapped__")
    assert marks == [torch.compile, torch.compiler.disable, torch.compiler.allow_in_graph]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for GPUs are compiled")
def test_what_is_imported_later_is_the_module_itself() -> None:
    command = """
import sys, torch
from quintet.skip_dynamo_import import LATER, uncompiled
before = [name in sys.modules for name in LATER]
with uncompiled():
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, guard_or_false, statically_known_true
    from torch.utils import cpp_extension
    inside = statically_known_true(True)
print(before, "sympy" in sys.modules, inside, guard_or_false(1 > 2), issubclass(GuardOnDataDependentSymNode, Exception))
with uncompiled():
    from torch.fx.experimental import symbolic_shapes as shapes
print(hasattr(shapes, "ShapeEnv"), LATER[1] in sys.modules, cpp_extension.include_paths("cpu") != [])
from torch.utils.cpp_extension import CUDAExtension
print(CUDAExtension.__module__)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "[False, False] True True False True",
        "True False True",
        "torch.utils.cpp_extension",
    ], done.stderr
