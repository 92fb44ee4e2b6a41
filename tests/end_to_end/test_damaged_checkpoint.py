"""A bit of the newest checkpoint is flipped: the run goes on from the one before, and takes the lost step as it was taken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.test_resume import SMALL, only, recorded, run

RECIPE = ["train", *SMALL, "sft.steps=1", "train.prompts_per_step=4", "rollout.samples_per_prompt=2"]
RECIPE += ["optimizer.warmup_steps=0", "optimizer.decay_steps=1"]  # a step is the same whatever follows
NEWEST, BEFORE = "step-000001", "sft-000001"
"""The one before is of the other stage: all of the loop has to go back."""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Copies of a run that ended after its first step of RL, in directories of their own."""
    made = tmp_path_factory.mktemp("made")
    run(*RECIPE, "train.steps=1", f"run.dir={made}")

    def copy() -> Path:
        return Path(shutil.copytree(only(made), tmp_path_factory.mktemp("runs") / only(made).name))

    return copy


def contents(directory: Path) -> dict[str, bytes]:
    """What the ranks' parts of the state are."""
    return {file.name: file.read_bytes() for file in directory.glob("*.distcp")}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def go_on(directory: Path, resume: str, code: int = 0) -> str:
    recipe = [*RECIPE, "train.steps=2", f"run.dir={directory.parent}"]
    return " ".join(run(*recipe, f"resume={resume}", code=code).split())


@pytest.mark.slow
def test_a_flipped_bit_costs_one_checkpoint(copies: Callable[[], Path]) -> None:
    damaged = copies()
    before, whole = recorded(damaged), contents(damaged / "checkpoints" / NEWEST / "policy")
    file = damaged / "checkpoints" / NEWEST / "policy" / "__1_0.distcp"
    flip(file)
    said = go_on(damaged, "auto")
    assert f"passed over in {damaged}: {NEWEST}: {file}: " in said
    assert "is damaged: its checksum is not the one it was written with" in said
    assert f"going on after sft step 1, from {damaged}/checkpoints/{BEFORE}; newer checkpoints are in" in said
    assert (damaged / "set_aside" / "1" / "checkpoints" / NEWEST / "policy" / file.name).exists(), "kept"
    assert (damaged / "checkpoints" / NEWEST).is_dir(), "saved again"
    taken = [line for line in before if "loss" in line]
    assert [line["stage"] for line in taken] == ["sft", "rl"]
    assert [line for line in recorded(damaged) if "loss" in line][:2] == taken
    assert contents(damaged / "checkpoints" / NEWEST / "policy") == whole


@pytest.mark.nightly
def test_a_checkpoint_that_was_named_is_not_passed_over(copies: Callable[[], Path]) -> None:
    directory = copies()
    path = directory / "checkpoints" / NEWEST
    flip(path / "policy" / "state.json")
    said = go_on(directory, str(path), code=2)
    assert f"error: {path}/policy/state.json is damaged" in said
    assert f"To go on from the checkpoint before set resume={directory}/checkpoints/{BEFORE}" in said
    assert not (directory / "set_aside").exists()


@pytest.mark.nightly
def test_where_all_are_damaged_each_is_named(copies: Callable[[], Path]) -> None:
    directory = copies()
    flip(directory / "checkpoints" / NEWEST / "policy" / "__0_0.distcp")
    flip(directory / "checkpoints" / BEFORE / "policy" / "rng-00001.json")
    said = go_on(directory, "auto", code=2)
    assert (
        f"error: resume=auto: no checkpoint of {directory} is whole ({NEWEST}: {directory}/checkpoints/"
        in said
    )
    assert f"{NEWEST}/policy/__0_0.distcp: " in said
    assert f"{BEFORE}: {directory}/checkpoints/{BEFORE}/policy/rng-00001.json is damaged" in said
    assert not (directory / "set_aside").exists()


@pytest.mark.nightly
def test_a_damaged_reference_policy_costs_no_checkpoint(copies: Callable[[], Path]) -> None:
    directory = copies()
    file = directory / "checkpoints" / "reference" / "policy" / "__0_0.distcp"
    flip(file)
    said = go_on(directory, "auto", code=2)
    assert "error: the reference policy in" in said
    assert f"cannot be loaded: {file}: " in said
    assert f"resume={directory}/checkpoints/{BEFORE} begins RL anew" in said
    assert (directory / "checkpoints" / NEWEST).is_dir()
    assert not (directory / "set_aside").exists()
    go_on(directory, str(directory / "checkpoints" / BEFORE))
