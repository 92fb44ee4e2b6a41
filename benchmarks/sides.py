"""The sides of a benchmark as processes that live through it and take turns: a line of JSON in, a line out."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from benchmarks.records import ROOT

FAILED = "failed"
"""Key of an answer that is a rank's last: why."""


class Side:
    """The ranks of one side, as processes that wait for commands.

    command: module and arguments of each rank. environment: what `torchrun` would set is added, if `ranked`, one thread among it, which is what
    Ray gives a rank on a GPU too: with as many as the host has cores, ranks that plan a micro-batch waited for each other's threads.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ranks: int,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        ranked: bool = True,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the processes)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            numbers = {key: str(number) for key, number in place.items()} if ranked else {}
            if ranked:
                numbers["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=ROOT,
                    env={**os.environ, "MASTER_ADDR": "127.0.0.1", **(environment or {}), **numbers},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
            )

    def answer(self) -> list[dict[str, Any]]:
        """One answer a rank. SystemExit with what a rank says of its failure (FAILED), or with the end of the log when one ends or all are silent for
        `timeout_s`. Whoever fails first: the others may wait for it, or fail after it."""
        answers: dict[int, dict[str, Any]] = {}
        while waiting := {one.stdout: n for n, one in enumerate(self._ranks) if n not in answers}:
            ready, _, _ = select.select(list(waiting), [], [], self.timeout_s)
            if not ready:
                self._fail(f"was silent for {self.timeout_s:.0f} s")
            lines = {waiting[stream]: stream.readline() for stream in ready}  # type: ignore[union-attr]
            answers |= {rank: json.loads(line) for rank, line in lines.items() if line}
            for rank, answer in answers.items():
                if FAILED in answer:
                    self.kill()
                    raise SystemExit(f"{self.name}, rank {rank}: {answer[FAILED]}")
            if not all(lines.values()):
                self._fail("ended")
        return [answers[rank] for rank in range(len(self._ranks))]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        self._tell(command)
        return self.answer()

    def stop(self) -> None:
        self._tell({"do": "quit"})
        for rank in self._ranks:
            rank.wait(60)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _tell(self, command: dict[str, Any]) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(json.dumps(command) + "\n")
                rank.stdin.flush()
            except BrokenPipeError:  # killed while the other side had its turn
                self._fail("ended")

    def _fail(self, how: str) -> None:
        self.kill()
        self._log.seek(0)
        raise SystemExit(f"{self.name} {how}:\n{self._log.read()[-6000:]}")


def answer_stream() -> TextIO:
    """Where a rank writes its answers; what libraries print goes to the log from here on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream
