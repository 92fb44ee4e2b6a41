"""The documentation tells today's truth: keys, commands, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_key_reference_is_what_the_schema_says():
    script = [sys.executable, str(ROOT / "tools" / "recipe_reference.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run: python tools/recipe_reference.py"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_loads(recipe, tmp_path):
    from quintet.recipe import load_recipe

    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    needs_files = "task: gsm8k" in recipe.read_text()
    paths = [f"data.train_path={file}", f"data.eval_path={file}"] if needs_files else []
    assert load_recipe(recipe, paths).run.name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/recipe.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    assert "@@" not in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_commands_in_the_readme_are_sound(tmp_path, capsys):
    """Every `quintet train` line that names a recipe of ours is checked as written, with the files it names."""
    from quintet.cli import main

    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"quintet train (recipes/\S+[^\n]*)", text)
    assert len(lines) >= 2
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    for line in lines:
        words = [w for w in line.split() if not w.startswith(("model.", "#"))]
        words = [re.sub(r"(data\.\w+_path)=.*", rf"\1={rows}", w) for w in words]
        assert main(["check", str(ROOT / words[0]), *words[1:]]) == 0, capsys.readouterr().err
