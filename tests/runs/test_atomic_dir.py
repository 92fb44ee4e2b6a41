"""Directories that appear whole: what others have is left alone, and what a killed process left is removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from quintet.engine.weights.peft import _write
from quintet.errors import UserError
from quintet.runs.atomic_dir import atomic_directory

LINGER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from quintet.runs.atomic_dir import atomic_directory
with atomic_directory(Path(sys.argv[1]), 0) as part:
    (part / "half").write_text("written")
    print("ready", flush=True)
    sys.stdin.read()
"""


def put(path: Path, text: str = "whole") -> None:
    with atomic_directory(path, 1) as part:
        (part / "file").write_text(text)


def test_what_the_user_has_beside_it_stays(tmp_path):
    precious = tmp_path / "model.part" / "precious"
    hidden = tmp_path / ".model.12345678.part" / "precious"
    for one in (precious, hidden):
        one.parent.mkdir()
        one.write_text("mine")
    put(tmp_path / "model")
    with pytest.raises(UserError, match="is there already"):
        put(tmp_path / "model")
    assert precious.read_text() == hidden.read_text() == "mine"


def test_the_second_of_two_is_refused(tmp_path):
    path = tmp_path / "model"
    first = ExitStack()
    part = first.enter_context(atomic_directory(path, 1))
    (part / "file").write_text("first")
    put(path, "second")
    assert (part / "file").read_text() == "first"
    with pytest.raises(UserError, match="not empty"):
        first.close()
    assert (path / "file").read_text() == "second"
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_not(tmp_path):
    path = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, "-c", LINGER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    put(path)
    (left,) = tmp_path.glob(".model.*")
    assert (left / "whole" / "half").read_text() == "written"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (path / "file").unlink()
    put(path)
    assert not list(tmp_path.glob(".model*"))


def test_links_and_places_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    put(tmp_path / "link")
    assert (tmp_path / "target" / "file").read_text() == "whole"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here"):
        with pytest.raises(UserError, match="working directory, which cannot be replaced"):
            put(Path(name))
    put(Path("new"))
    assert (tmp_path / "here" / "new" / "file").is_file()


def test_adapters_appear_whole_too(tmp_path):
    (tmp_path / "adapter.part").mkdir()
    (tmp_path / "adapter.part" / "precious").write_text("mine")
    _write(tmp_path / "adapter", {"a": torch.zeros(2)}, {"r": 1})
    with pytest.raises(UserError, match="is there already"):
        _write(tmp_path / "adapter", {"a": torch.zeros(2)}, {"r": 1})
    assert (tmp_path / "adapter.part" / "precious").read_text() == "mine"
    assert len(list((tmp_path / "adapter").iterdir())) == 2
