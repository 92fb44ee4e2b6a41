"""The error types: what they print, and that they cross process boundaries whole."""

import pickle

from quintet.errors import QuintetError, UserError, WorkerFailure


def test_exit_codes_differ() -> None:
    assert [error.exit_code for error in (QuintetError, UserError, WorkerFailure)] == [1, 2, 3]


def test_worker_failure_prints_traceback_and_stacks() -> None:
    error = WorkerFailure(
        "Rank 3 died in train", rank=3, phase="train", traceback="Traceback: boom\n", stacks={1: "in f"}
    )
    text = str(error)
    for part in ("Rank 3 died in train", "Traceback: boom", "Stacks of rank 1:\nin f"):
        assert part in text


def test_worker_failure_survives_pickling() -> None:
    error = WorkerFailure("hung", phase="sync", stacks={0: "a", 2: "b"})
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, WorkerFailure)
    assert (copy.message, copy.rank, copy.phase, copy.stacks) == ("hung", None, "sync", {0: "a", 2: "b"})
    assert str(copy) == str(error)
