"""Writes docs/recipe.md, the reference of every recipe key, from the schema alone.

python tools/recipe_reference.py            # write it
python tools/recipe_reference.py --check    # exit 1 when it is not what the schema says
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from quintet.models.shape import LARGEST  # noqa: E402
from quintet.recipe.keys import expected, leaf_keys  # noqa: E402

PAGE = ROOT / "docs" / "recipe.md"


def reference() -> str:
    """The page as Markdown."""
    lines = [
        "# Every recipe key",
        "",
        "A recipe is a YAML file of these keys; any of them can be set on the command line as `key=value`. What is not",
        "written has its default. `quintet check RECIPE.yaml` prints a recipe with every key written out.",
        f"Whole numbers without another limit are at most {LARGEST:,}.",
        "This page is made by `python tools/recipe_reference.py`.",
    ]
    section = None
    for key, field in leaf_keys().items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"## {section}", "", "| key | default | takes | what it is |", "|---|---|---|---|"]
        default = field.get_default(call_default_factory=True)
        shown = (
            "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        )
        meaning = " ".join((field.description or "").split())
        takes = expected(field).replace(f" and at most {LARGEST:,}", "")
        cells = (f"`{key}`", f"`{shown}`" if shown else "", takes, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    page = reference()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
