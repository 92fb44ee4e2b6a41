"""A disk that is full while a run goes on, and has room again: a real one, of a few pages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.runs.fsync import lossy, write_whole
from quintet.runs.ledger import read_jsonl, read_metrics
from tests.disks import fill, mounted

LONG = {"text": "x" * 5000}
"""More than is left of a page that a file has already."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def record(observer, step: int) -> None:
    observer.step(step, {"loss": 1.0} | {f"metric_{i}": 0.1 for i in range(300)}, show=False)
    observer.samples(step, [LONG])
    observer.replay(step, b"x" * 5000)


def test_records_are_dropped_told_once_and_taken_again(recipe, observe, disk) -> None:
    recipe.run.dir, recipe.run.trackers, recipe.checkpoint.on_error = disk, ["tensorboard"], "continue"
    observer, printed = observe(width=1000)
    directory = observer.directory
    with observer:
        record(observer, 1)
        filler = fill(disk)
        for step in (2, 3, 4):
            record(observer, step)
        assert printed.getvalue().count("warning: ") == 1
        assert (
            f"warning: {directory.metrics} cannot be written: No space left on device" in printed.getvalue()
        )
        filler.unlink()
        record(observer, 5)
        said = "the disk takes records again; left out were 3 of metrics.jsonl, 3 of tensorboard, 3 of samples.jsonl, 3 of samples for replay"
        assert said in printed.getvalue()
        filler = fill(disk)
        record(observer, 6)
    assert printed.getvalue().count("warning: ") == 1
    assert "the disk was full at the end; left out were 1 of metrics.jsonl" in printed.getvalue()
    assert "1 of summary.json, 1 of report.html" in printed.getvalue()
    assert [line["step"] for line in read_metrics(directory.metrics)] == [1, 5]
    assert [line["step"] for line in read_jsonl(directory.samples)] == [1, 5]
    assert sorted(p.name for p in directory.replay.iterdir()) == [
        "step-000001.safetensors",
        "step-000005.safetensors",
    ]
    assert not list(directory.path.glob("*.part"))
    assert logged(directory.path / "tensorboard") == [1, 5]


def test_a_disk_that_is_full_by_turns_is_told_once(recipe, observe, disk, monkeypatch) -> None:
    recipe.run.dir, recipe.checkpoint.on_error = disk, "continue"
    observer, printed = observe(width=1000)

    def turn() -> None:
        filler = fill(disk)
        record(observer, 1)
        filler.unlink()
        record(observer, 2)

    with observer:
        for _ in range(3):
            turn()
        assert printed.getvalue().count("warning: ") == 1
        assert printed.getvalue().count("the disk takes records again; left out were 1 of metrics") == 1
        monkeypatch.setattr("quintet.observe.losses.AT_MOST_EVERY_S", 0.0)  # a minute later
        turn()
        assert "the disk takes records again; left out were 3 of metrics" in printed.getvalue()
        monkeypatch.setattr("quintet.observe.losses.AT_MOST_EVERY_S", 60.0)
        turn()
    assert "the disk was full again; left out were 1 of metrics" in printed.getvalue()
    assert printed.getvalue().count("warning: ") == 1


def logged(directory: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(directory)).Reload().Scalars("loss")]


def test_by_default_the_first_record_that_is_lost_ends_the_run(recipe, observe, disk) -> None:
    recipe.run.dir, recipe.run.trackers = disk, ["tensorboard"]
    observer, _ = observe()
    fill(disk)
    lost = pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: No space left on device")
    with lost, observer:
        record(observer, 1)


def test_a_log_says_what_is_missing(disk) -> None:
    with (disk / "log").open("ab", buffering=0) as file:
        log = lossy(file.fileno())
        print("before", file=log)
        filler = fill(disk)
        for _ in range(3):
            print("x" * 5000, file=log)
        filler.unlink()
        print("after", file=log)
        log.close()
    text = (disk / "log").read_text()
    assert text.startswith("before\nxxx"), "what fits the page is taken"
    lost = 3 * 5001 - text.count("x")
    assert text.endswith(f"\n[the disk was full: {lost} bytes are missing here]\nafter\n")


def test_a_file_is_whole_or_as_it_was(disk) -> None:
    file = disk / "summary.json"
    write_whole(file, b"before")
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"x" * 5000)
    assert file.read_bytes() == b"before"
    assert not list(disk.glob("*.part"))


PRINTS = """
import sys
from pathlib import Path
from quintet.observe.observer import Observer
from quintet.recipe.schema import Checkpoint, Recipe, Run
from tests.disks import fill

disk = Path(sys.argv[1])
observer = Observer(Recipe(run=Run(dir=disk / "runs"), checkpoint=Checkpoint(on_error="continue")))
filler = fill(disk)
for _ in range(3):
    observer.note("x" * 5000)
filler.unlink()
observer.note("after")
"""


def test_what_is_printed_goes_on_where_it_is_a_file(disk) -> None:
    with (disk / "out").open("w") as out:
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", PRINTS, str(disk)], stdout=out, cwd=root, check=True)
    assert (disk / "out").read_text().endswith(" bytes are missing here]\nafter\n")
