"""The import rules of the house: they point one way, and the pure rooms stay pure."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
