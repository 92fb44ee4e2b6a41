"""What goes wrong while saving or loading is told in words, on every rank, and leaves nothing half done."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.checkpoint.checkpoints import Checkpoints
from quintet.engine.checkpoint.loader import Load
from quintet.errors import DamagedCheckpoint, UserError
from tests.engine.checkpoint.ranks import bare_engine, held, release, step
from tests.oracle.cases import Case
from tests.oracle.models import save

CASE = Case("qwen2", dp=2, distributed_optimizer=True)


def message(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def same(a: Any, b: Any) -> bool:
    return all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in zip(a, b, strict=True))


def trained(path: Path, case: Case = CASE, **how: Any) -> Any:
    engine = bare_engine(case, path, **how)
    engine.load_hf(path)
    if how.get("trained", True):
        step(engine, case)
    return engine


def damages(path: Path, where: Path) -> dict[str, str]:
    """On each of two ranks: save, damage what rank 1 alone reads, and load; then load what is whole."""
    import torch.distributed as dist

    engine = trained(path)
    engine.save(where)
    saved = held(engine)
    step(engine, CASE)
    later, steps = held(engine), engine.steps
    said = {"occupied": message(lambda: engine.save(where))}
    file = where / "__1_0.distcp"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for name, data in {"flipped": bytes(flipped), "cut": whole[:-1], "gone": None}.items():
        dist.barrier()
        if dist.get_rank() == 0:
            file.unlink() if data is None else file.write_bytes(data)
        dist.barrier()
        said[name] = message(lambda: engine.load(where))
        assert same(held(engine), later), name
        assert engine.steps == steps
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)
    dist.barrier()
    finds_fault = mock.patch.object(Checkpoints, "_check_optimizer", side_effect=UserError("of rank 1"))
    with finds_fault if dist.get_rank() == 1 else contextlib.nullcontext():
        said["fitting"] = message(lambda: engine.load(where))
    assert not same(saved, later)
    engine.load(where)
    assert same(held(engine), saved)
    assert engine.steps == 1
    release(engine)
    return said


def test_damage_that_one_rank_sees_stops_all_before_anything_changes(pool, models, tmp_path):
    path = save("qwen2", models / "qwen2")
    first, second = pool.run(damages, 2, path, tmp_path / "saved")
    assert "is not empty" in first["occupied"]
    for name, words in {
        "flipped": "is damaged",
        "cut": "bytes, and was written with",
        "gone": "is missing",
    }.items():
        assert words in first[name], first
        assert "__1_0.distcp" in first[name]
    assert first["fitting"] == "of rank 1"
    assert first == second


def refusal(call: Any) -> tuple[str, str]:
    """Kind and words."""
    try:
        call()
    except UserError as error:
        return type(error).__name__, str(error)
    return "", ""


def flips(path: Path, where: Path) -> list[tuple[str, str, str]]:
    """On each of two ranks: one bit after another is flipped in every file; each time, the file and the kind and words of the
    refusal. What is not refused is loaded as it was saved."""
    import torch.distributed as dist

    engine = trained(path)
    engine.save(where)
    saved, rng = held(engine), random.Random(0)
    step(engine, CASE)
    later = held(engine)
    told = []
    for file in sorted(where.iterdir()):
        whole = file.read_bytes()
        for at in (rng.randrange(len(whole)) for _ in range(6)):
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            dist.barrier()
            refused = refusal(lambda: engine.load(where))
            told.append((file.name, *refused))
            assert same(held(engine), later if refused[0] else saved), f"byte {at} of {file.name}"
            if not refused[0]:
                step(engine, CASE)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)
    release(engine)
    return told


def test_no_flipped_bit_is_loaded(pool, models, tmp_path):
    path = save("qwen2", models / "qwen2")
    first, second = pool.run(flips, 2, path, tmp_path / "saved")
    assert first == second, "ranks parted"
    assert {kind for _, kind, _ in first} <= {"DamagedCheckpoint", ""}
    assert all(str(tmp_path / "saved") in words for _, kind, words in first if kind)
    # The rest is not read, or white space of JSON.
    for name in (
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "rng-00000.json",
        "rng-00001.json",
        "state.json",
    ):
        assert all(kind for file, kind, _ in first if file == name), name


def unreadable(path: Path, where: Path) -> tuple[str, str]:
    """On each of two ranks: rank 1 may open no more files; then it may again."""
    import torch.distributed as dist

    engine = trained(path)
    engine.save(where)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        dist.barrier()
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        said = refusal(lambda: engine.load(where))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    engine.load(where)
    release(engine)
    return said


def test_a_rank_that_cannot_read_finds_no_damage(pool, models, tmp_path):
    path = save("qwen2", models / "qwen2")
    first, second = pool.run(unreadable, 2, path, tmp_path / "saved")
    assert first == second
    assert first[0] == "UserError"
    assert "cannot be read: Too many open files" in first[1]


def parted(found: list[type[UserError]]) -> tuple[str, str]:
    """On each of two ranks: what is raised when each finds something of its own."""
    import torch.distributed as dist

    def work() -> None:
        raise found[dist.get_rank()](f"of rank {dist.get_rank()}")

    return refusal(lambda: run_on_all_or_raise(work))


def test_all_ranks_call_it_damage_or_none_does(pool):
    assert [kind for kind, _ in pool.run(parted, 2, [DamagedCheckpoint] * 2)] == ["DamagedCheckpoint"] * 2
    for found in ([DamagedCheckpoint, UserError], [UserError, DamagedCheckpoint]):
        first, second = pool.run(parted, 2, found)
        assert first == second == ("UserError", f"of rank {found.index(UserError)}")


def full_disk(path: Path, where: Path) -> list[str]:
    """On each of two ranks: rank 1 may write no more than 100 KB to a file; then it may again."""
    import torch.distributed as dist

    engine = trained(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        said = [message(lambda: engine.save(where))]
        engine.save(where / "second", wait=False)
        step(engine, CASE)  # goes on
        said.append(message(lambda: engine.save_finished(wait=True)))
        engine.save(where / "in place", wait=False, aside=False)
        said.append(message(lambda: engine.save_finished(wait=True)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    dist.barrier()
    said.append("left" if [*where.glob("second/*"), *where.glob("in place/*")] else "removed")
    dist.barrier()
    engine.save(where / "third")
    engine.load(where / "third")
    release(engine)
    return said


def test_a_full_disk(pool, models, tmp_path):
    path = save("qwen2", models / "qwen2")
    first, second = pool.run(full_disk, 2, path, tmp_path / "saved")
    assert first[0] == second[0]
    assert "was not saved" in first[0]
    assert "__1_0.distcp: File too large" in first[0]
    assert all("was not saved" in told for told in (*first[1:3], *second[1:3]))
    assert first[3] == second[3] == "removed"


def refusals(path: Path, other: Path, where: Path) -> dict[str, Any]:
    """On one rank: what does not fit."""
    case = Case("qwen2")
    engine = trained(path, case)
    engine.save(where / "adamw")
    engine.offload(params=1.0)
    with pytest.raises(RuntimeError, match="offloaded"):
        engine.save(where / "offloaded")
    engine.reload()
    engine.save(where / "unwaited", wait=False)
    with pytest.raises(RuntimeError, match="save_finished"):
        engine.save(where / "too-early")
    engine.save_finished(wait=True)
    assert engine.save_finished(wait=False)
    weights = trained(path, case, trained=False)
    weights.save(where / "weights")
    weights.load(where / "adamw")  # without what it has no use for
    assert same(held(weights), [one for one in held(engine) if not one[0].startswith("optimizer.")])
    sgd = bare_engine(Case("qwen2", optimizer="sgd"), path)
    another = bare_engine(Case("qwen3"), other)
    said = {
        "sgd": message(lambda: sgd.load(where / "adamw")),
        "weights": message(lambda: engine.load(where / "weights")),
        "model": message(lambda: another.load(where / "adamw")),
        "none": message(lambda: engine.load(where / "nothing")),
        "file": message(lambda: engine.save(where / "adamw" / "state.json" / "x")),
    }
    with mock.patch.object(Load, "commit", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.load(where / "adamw")
    said["midway"] = message(lambda: engine.save(where / "midway"))
    engine.load(where / "adamw")
    state = json.loads((where / "weights" / "state.json").read_text())
    (where / "weights" / "checksums.json").unlink()
    said["checksums"] = refusal(lambda: weights.load(where / "weights"))
    (where / "weights" / "state.json").write_text(json.dumps({"format": 1}))
    said["state"] = message(lambda: weights.load(where / "weights"))
    (where / "weights" / "state.json").write_text(json.dumps(state | {"format": 99}))
    said["format"] = refusal(lambda: weights.load(where / "weights"))
    for one in (engine, weights, sgd, another):
        release(one)
    return said


def test_what_does_not_fit_is_refused(pool, models, tmp_path):
    paths = [save(name, models / name) for name in ("qwen2", "qwen3")]
    (said,) = pool.run(refusals, 1, *paths, tmp_path)
    assert "optimizer.name=adamw" in said["sgd"]
    assert "momentum_buffer" in said["sgd"]
    assert "weights alone" in said["weights"]
    assert "lacks tensors of this model" in said["model"]
    assert "q_layernorm" in said["model"]
    assert "is not a checkpoint" in said["none"]
    assert "was not saved" in said["file"]
    assert said["format"][0] == "UserError"
    assert "format 99" in said["format"][1]
    assert said["checksums"][0] == "DamagedCheckpoint"
    assert "checksums.json is missing" in said["checksums"][1]
    assert "it does not say steps, optimizer, moments, layout" in said["state"]
    assert "the weights are incomplete" in said["midway"]
    assert "adamw could not be loaded to its end" in said["midway"]


def draws(path: Path, where: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """On each rank: what is drawn after a save, after a load in the same layout, and after one in another."""

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), random.gauss()]

    engine = trained(path)
    torch.manual_seed(3 + engine.mesh.rank)
    random.seed(3 + engine.mesh.rank)
    random.gauss()  # Python keeps the second of two for the next call
    engine.save(where)
    after_save = draw()
    draw()
    engine.load(where)
    again = draw()
    other = bare_engine(Case("qwen2", tp=2), path)
    torch.manual_seed(99)
    random.seed(99)
    expected = draw()
    torch.manual_seed(99)
    random.seed(99)
    other.load(where)
    elsewhere = draw()
    release(engine)
    release(other)
    assert elsewhere == expected
    return after_save, again, elsewhere


def test_random_states(pool, models, tmp_path):
    path = save("qwen2", models / "qwen2")
    told = pool.run(draws, 2, path, tmp_path / "saved")
    assert all(after_save == again for after_save, again, _ in told)
    assert told[0][0] != told[1][0]
