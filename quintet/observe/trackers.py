"""TensorBoard and Weights & Biases by the same methods. metrics.jsonl stays the record; these are windows on it.

`log` takes a step's metrics, but for those that are None. `go_on` goes on with a resumed run: of what was logged its lines hold. When
`close` returns all is written out.
"""

from __future__ import annotations

import io
import netrc
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.recipe.schema import Recipe
from quintet.runs.ledger import append, open_to_append


class TensorBoard:
    """An event file in `tensorboard/` of the run directory, written without torch.

    Not by TensorBoard's own writer: its thread dies of a full disk, with half an event in the file.
    """

    name = "tensorboard"

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._directory.mkdir(exist_ok=True)
        self._begin()

    def _begin(self) -> None:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_to_append(self._directory / name)
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        append(self._file, record.getvalue())

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _named(stage, metrics).items()]
        self._write(step=step, summary=Summary(value=values))

    def go_on(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the event file anew: TensorBoard's own way to drop later steps would drop those of the other stage too."""
        self._file.close()
        for file in self._directory.iterdir():
            file.unlink()
        self._begin()
        for line in lines:
            values = {key: value for key, value in line.items() if key not in ("stage", "step")}
            self.log(line["stage"], line["step"], values)

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A W&B run in the project "quintet": online with a key, otherwise offline below the run directory.

    WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE are W&B's own and are respected.
    """

    name = "wandb"

    def __init__(self, recipe: Recipe, directory: Path, say: Callable[[str], None]) -> None:
        import wandb

        self._say = say

        # The same run at W&B for every start of ours.
        name = directory / "wandb_run_id"
        if resumed := name.exists():
            run_id = name.read_text(encoding="ascii").strip()
        else:
            name.write_text((run_id := secrets.token_hex(6)) + "\n", encoding="ascii")
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "quintet"),
            "name": directory.name,
            "id": run_id,
            "resume": "allow" if resumed else None,
            "dir": str(directory),
            "config": recipe.model_dump(mode="json"),
        }
        try:
            options["settings"] = wandb.Settings(init_timeout=30, console="off", silent=True)
            try:
                self._run = wandb.init(mode=mode, **options)
            except wandb.errors.Error:
                if mode != "online":
                    raise
                # No network: `wandb sync` can send it later.
                self._run = wandb.init(mode="offline", **options)
        except (wandb.errors.Error, ValueError) as error:
            raise UserError(
                f"run.trackers=[wandb]: W&B starts no run; correct WANDB_… in the environment, or remove wandb: {error}"
            ) from None
        # W&B insists on one growing step; the stages count from the start each.
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("sft/*", step_metric="sft/step")

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        step_key = "sft/step" if stage == "sft" else "step"
        self._tell("log", {**_named(stage, metrics), step_key: step})

    def go_on(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the W&B run, which keeps what it has: steps that are taken again appear twice there."""

    def close(self) -> None:
        self._tell("finish")

    def _tell(self, verb: str, *what: Any) -> None:
        """Have W&B do it, by a process of its own; where that fails, the run goes on, and W&B is told nothing more."""
        try:
            if self._run is not None:
                getattr(self._run, verb)(*what)
        except Exception as error:
            self._run = None
            self._say(
                f"warning: W&B failed ({type(error).__name__}: {error}): what is new is in metrics.jsonl alone"
            )


Tracker = TensorBoard | WeightsAndBiases


def make_trackers(recipe: Recipe, directory: Path, say: Callable[[str], None] = print) -> list[Tracker]:
    """Return the trackers of `run.trackers`, started. say: shows a line."""
    return [
        TensorBoard(recipe, directory) if name == "tensorboard" else WeightsAndBiases(recipe, directory, say)
        for name in recipe.run.trackers
    ]


def _named(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Warm-up metrics get a prefix, so that two losses do not share a curve."""
    prefix = "sft/" if stage == "sft" else ""
    return {prefix + key: float(value) for key, value in metrics.items() if value is not None}


def _has_wandb_key() -> bool:
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    return False
