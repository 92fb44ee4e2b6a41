"""Write the golden files anew; `git diff` then shows what has changed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.golden.runs import CASES, file_of, lines_of, write

for case in CASES:
    with tempfile.TemporaryDirectory() as directory:
        write(case, lines_of(case, Path(directory)))
    print(file_of(case))
