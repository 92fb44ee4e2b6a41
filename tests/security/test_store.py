"""Whoever reaches the port of rank 0's store can read and write there: nothing that a rank reads from it is run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from quintet.engine.checkpoint import saver
from quintet.errors import UserError
from tests.engine.checkpoint.ranks import bare_engine, release
from tests.oracle.cases import Case
from tests.oracle.models import save
from tests.patience import BUSY
from tests.security.stranger import Stranger

CASE = Case("qwen2", dp=2, distributed_optimizer=True)


def save_while_poisoned(path: Path, where: Path, poisoned: Path) -> str:
    """On each of two ranks: save; rank 0 looks at what rank 1 tells only when a stranger has been there."""
    engine = bare_engine(CASE, path)
    engine.load_hf(path)
    write = saver._write_part

    def waits(job):
        deadline = time.monotonic() + 60 * BUSY
        while dist.get_rank() == 0 and not poisoned.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(job)

    saver._write_part = waits
    said = ""
    try:
        engine.save(where)
    except UserError as error:
        said = str(error)
    finally:
        saver._write_part = write
    release(engine)
    return said


def test_what_a_stranger_writes_to_the_store_is_not_run(pool, tmp_path):
    path = save("qwen2", tmp_path / "qwen2")
    pool.run(dist.get_rank, 2)
    harm, poisoned = tmp_path / "harm", tmp_path / "poisoned"
    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(pool.run, save_while_poisoned, 2, path, tmp_path / "saved", poisoned)
        stranger = Stranger("quintet checkpoint", harm)
        stranger.knock(pool._store.port)
        while not stranger.poisoned and not saving.done():
            stranger.poison()
        poisoned.touch()
        said = saving.result()
    assert len(stranger.poisoned) == 1
    assert not harm.exists()
    assert "what rank 0's store has from rank 1 was not written by that rank" in said[0]
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("forged", [b"", b"x" * 31, b'{"entries": [], "problem": null}'])
def test_what_is_not_sealed_is_refused(tmp_path, forged):
    store = dist.HashStore()
    job = saver._Job(tmp_path / "saved", "token", "ab" * 32, 0, 2, [], [], True, {}, {"steps": 1})
    store.set("quintet checkpoint token 1", forged)
    assert isinstance(saver._conclude(job, store, [], None), UserError)
