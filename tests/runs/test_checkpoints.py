"""Directories of checkpoints: whatever happens to them, what is taken for a checkpoint is one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.runs import checkpoints as checkpoints_module
from quintet.runs.checkpoints import (
    MANIFEST,
    POLICY,
    REFERENCE,
    Checkpoint,
    Checkpoints,
    Damaged,
    Manifest,
    name_of,
)


def manifest(stage: str = "rl", step: int = 1, **other: object) -> Manifest:
    fields = {
        "command": "train",
        "stage": stage,
        "step": step,
        "layout": {"ranks": 1},
        "dtype": "fp32",
        "data": {"position": step},
        "loop": {},
        "recipe": {},
        "versions": {},
        "saved": "",
    }
    return Manifest.model_validate({**fields, **other})


def save(checkpoints: Checkpoints, stage: str, step: int, **other: object) -> Path:
    path = checkpoints.begin(name_of(stage, step))
    (path / POLICY).mkdir()
    (path / POLICY / "0.distcp").write_bytes(b"x" * (10 + step))
    return checkpoints.publish(path, manifest(stage, step, **other)).path


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_the_newest_is_of_rl_before_sft_and_then_of_the_later_step(checkpoints):
    for stage, step in (("sft", 900_000), ("rl", 9), ("rl", 10), ("sft", 2), ("rl", 1_000_000)):
        save(checkpoints, stage, step)
    assert [p.name for p in checkpoints.published()] == [
        "step-1000000", "step-000010", "step-000009", "sft-900000", "sft-000002",
    ]  # fmt: skip
    newest, skipped = checkpoints.latest()
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.data, skipped) == (1_000_000, {"position": 1_000_000}, [])
    assert newest.manifest.files == {"policy/0.distcp": 1_000_010}


def test_none_where_there_is_none(checkpoints):
    assert checkpoints.latest() == (None, [])
    assert checkpoints.published() == []


DAMAGE = {
    "unfinished": lambda p: (p / MANIFEST).unlink(),
    "cut short": lambda p: os.truncate(p / POLICY / "0.distcp", 3),
    "missing": lambda p: (p / POLICY / "0.distcp").unlink(),
    "half a manifest": lambda p: os.truncate(p / MANIFEST, 40),
    "empty manifest": lambda p: (p / MANIFEST).write_text(""),
    "other format": lambda p: (p / MANIFEST).write_text(
        (p / MANIFEST).read_text().replace('"format": 1', '"format": 2')
    ),
    "wrong type": lambda p: (p / MANIFEST).write_text(
        (p / MANIFEST).read_text().replace('"step": 2', '"step": "two"')
    ),
}
SAID = {
    "unfinished": "its save was not finished",
    "cut short": "policy/0.distcp has 3 bytes instead of 12",
    "missing": "policy/0.distcp: No such file",
    "half a manifest": "manifest.json is damaged",
    "empty manifest": "manifest.json is damaged",
    "other format": "has format 2, and this quintet reads 1",
    "wrong type": "damaged (step: Input should be a valid integer",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_passed_over_with_the_reason(checkpoints, kind):
    save(checkpoints, "rl", 1)
    DAMAGE[kind](damaged := save(checkpoints, "rl", 2))
    newest, (reason,) = checkpoints.latest()
    assert newest is not None
    assert newest.manifest.step == 1
    assert reason.startswith("step-000002: ")
    assert SAID[kind] in reason
    with pytest.raises(Damaged):
        Checkpoint.read(damaged)


def test_no_flipped_bit_of_a_manifest_is_believed(checkpoints):
    """It says where the data go on, and what was smoothed so far: a digit more or less would be another run."""
    path = save(checkpoints, "sft", 12, loop={"smooth": 0.1 + 0.2})
    written, whole = Checkpoint.read(path), (path / MANIFEST).read_bytes()
    for at in range(len(whole)):
        (path / MANIFEST).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with contextlib.suppress(Damaged):
            assert Checkpoint.read(path) == written, f"byte {at}"  # white space


def test_a_reference_that_is_gone_is_no_fault_of_the_checkpoint(checkpoints):
    path = checkpoints.begin(REFERENCE)
    (path / POLICY).mkdir()
    (path / POLICY / "0.distcp").write_bytes(b"r")
    checkpoints.publish(path, manifest(step=0))
    save(checkpoints, "sft", 5)
    save(checkpoints, "rl", 1, reference=f"../{REFERENCE}")
    newest, _ = checkpoints.latest()
    assert newest is not None
    assert newest.reference == path / POLICY
    (path / POLICY / "0.distcp").unlink()
    assert checkpoints.latest() == (newest, [])
    with pytest.raises(Damaged, match=r"0\.distcp: No such file"):
        newest.check_reference()


def test_beginning_removes_what_was_never_published_and_nothing_else(checkpoints):
    save(checkpoints, "rl", 1)
    (checkpoints.begin("step-000002") / "half").write_text("x")
    (checkpoints.directory / "notes").mkdir()
    checkpoints.begin(REFERENCE)
    checkpoints.begin("step-000003")
    assert {p.name for p in checkpoints.directory.iterdir()} == {"step-000001", "step-000003", "notes"}


def test_pruning_keeps_the_newest_and_the_reference(checkpoints):
    for stage, step in (("sft", 7), ("rl", 1), ("rl", 2), ("rl", 3)):
        save(checkpoints, stage, step)
    checkpoints.publish(checkpoints.begin(REFERENCE), manifest(step=0))
    for _ in range(2):
        checkpoints.prune(2)
        assert {p.name for p in checkpoints.directory.iterdir()} == {"step-000002", "step-000003", REFERENCE}


def test_what_is_newer_than_a_checkpoint(checkpoints):
    older = Checkpoint.read(save(checkpoints, "sft", 2))
    for step in (1, 2):
        save(checkpoints, "rl", step)
    checkpoints.publish(checkpoints.begin(REFERENCE), manifest(step=0))
    assert {p.name for p in checkpoints.newer_than(older)} == {"step-000001", "step-000002", REFERENCE}
    first = Checkpoint.read(checkpoints.directory / "step-000001")
    assert [p.name for p in checkpoints.newer_than(first)] == ["step-000002"]


def test_a_manifest_reads_back_every_number_bit_by_bit(checkpoints):
    loop = {"smooth": 0.1 + 0.2}
    path = save(checkpoints, "sft", 3, loop=loop)
    assert Checkpoint.read(path).manifest.loop == loop
    assert json.loads((path / MANIFEST).read_text())["step"] == 3


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(["save", "begin", "kill in prune", "lose manifest", "prune"]), min_size=1, max_size=12
    ),
    st.integers(1, 3),
)
def test_whatever_cuts_a_run_off_the_newest_published_stays(events, keep):
    """Saves, saves cut off, and removals cut off half-way: the newest one ever published is found, whole, until it is damaged."""
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoints, whole = Checkpoints(folder / "checkpoints"), []
        for step, event in enumerate(events, start=1):
            if event == "save":
                save(checkpoints, "rl", step)
                whole.append(step)
            elif event == "begin":
                checkpoints.begin(name_of("rl", step))
            elif event == "prune":
                checkpoints.prune(keep)
                whole = whole[-keep:]
            elif event == "kill in prune" and len(whole) > 1:
                # The manifest goes first, so this is what a removal leaves that is cut off.
                (checkpoints.directory / name_of("rl", whole.pop(0)) / MANIFEST).unlink()
            elif event == "lose manifest" and whole:
                (checkpoints.directory / name_of("rl", whole.pop()) / MANIFEST).unlink()
            newest, _ = checkpoints.latest()
            assert (newest.manifest.step if newest else None) == (whole[-1] if whole else None)
    finally:
        shutil.rmtree(folder)


def test_a_publication_that_is_not_safe_on_the_disk_is_none(checkpoints, monkeypatch):
    save(checkpoints, "rl", 1)
    synced = checkpoints_module.fsync_path

    def refuse(path: Path) -> None:
        if path == checkpoints.directory:
            raise OSError(5, "Input/output error", str(path))
        synced(path)

    monkeypatch.setattr(checkpoints_module, "fsync_path", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        save(checkpoints, "rl", 2)
    assert [p.name for p in checkpoints.published()] == ["step-000001"]
    for path in list(checkpoints.directory.iterdir()):
        checkpoints.discard(path)
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step-000001"]
