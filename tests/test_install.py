"""A wheel holds all that is needed outside of the checkout: the package, and the recipes that docs and --help name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.install import shipped_recipe
from tools.bootstrap import run_pip

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which quintet comes from a wheel."""
    work = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    tree = work / "source"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.run(
        listed, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines():
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes((ROOT / path).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", work, tree], check=True)
    (wheel,) = work.glob("quintet_rl-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--ignore-installed", "--prefix", work / "to", wheel], check=True
    )
    (packages,) = (work / "to").glob("lib/python*/site-packages")
    return os.environ | {"PYTHONPATH": str(packages)}


@pytest.mark.slow
def test_a_wheel_brings_its_recipes(installed: dict[str, str], tmp_path: Path) -> None:
    quintet = [sys.executable, "-m", "quintet"]
    where = subprocess.run(
        [sys.executable, "-c", "import quintet.install as i; print(i.__file__, i.version())"],
        env=installed,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert where.startswith(installed["PYTHONPATH"])
    for recipe in (ROOT / "recipes").glob("laptop_[dp]*.yaml"):
        subprocess.run([*quintet, "check", f"recipes/{recipe.name}"], env=installed, cwd=tmp_path, check=True)


@pytest.mark.nightly
def test_a_wheel_trains_outside_of_the_checkout(installed: dict[str, str], tmp_path: Path) -> None:
    quintet = [sys.executable, "-m", "quintet"]
    short = [
        "sft.steps=12",
        "sft.optimizer.warmup_steps=2",
        "train.steps=2",
        "optimizer.warmup_steps=1",
        "train.eval_prompts=8",
    ]
    subprocess.run(
        [*quintet, "train", "recipes/laptop_demo.yaml", *short], env=installed, cwd=tmp_path, check=True
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "checkpoint" / "config.json").exists()


def test_only_recipes_are_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_recipe(Path("recipes/laptop_demo.yaml")) == ROOT / "recipes" / "laptop_demo.yaml"
    for other in (
        "laptop_demo.yaml",
        "recipes/none.yaml",
        "my/recipes/laptop_demo.yaml",
        "/recipes/laptop_demo.yaml",
    ):
        assert shipped_recipe(Path(other)) is None


def test_a_failed_set_up_says_what_else_wheels_may_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_pip([sys.executable, "-c", "raise SystemExit('no torch')"], ["install"])
    said = capsys.readouterr().err
    assert "no torch" in said
    assert "PIP_INDEX_URL names another index, PIP_FIND_LINKS a directory with torch's wheel" in said
