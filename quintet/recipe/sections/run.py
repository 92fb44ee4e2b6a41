"""Where a run lives, on what, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from quintet.recipe.sections.fields import NonNegativeInt, PositiveInt, Ranks, Section, Timeout, UserPath


class Run(Section):
    name: str = "run"
    """Name of the run; its directory is `dir/name-<time>`."""
    dir: UserPath = Path("runs")
    """Where run directories are made."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seeds data order, initial weights and sampling noise."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides metrics.jsonl."""
    samples_logged_per_step: NonNegativeInt = 4
    """Samples written to samples.jsonl each step, spread over its prompts; of an evaluation as many sampled and as many greedy ones."""


class Cluster(Section):
    address: str | None = None
    """Ray address of an existing cluster; null starts a local one."""
    ray_auth: Literal["token", "none"] = "token"
    """What Ray asks of whoever connects: a token, made anew for a local Ray, and of an existing cluster found where Ray looks for it
    (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token); or nothing."""
    ranks: Ranks = 1
    """Worker processes; one device each. The product of the layout's sizes must divide it. On CPUs each has its share of the cores as
    threads, or OMP_NUM_THREADS. generate and eval are one rank, in their own process, where that is enough."""
    ranks_per_node: Ranks | None = None
    """Ranks on one node; null packs them on as few nodes as hold them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    collective_timeout_s: Timeout = 600.0
    """A collective that waits longer ends the run with the stacks of all ranks."""


class Checkpoint(Section):
    """Saves of the whole state of training, from which a run goes on: see docs/checkpoints.md."""

    every_steps: NonNegativeInt = 0
    """Save after so many steps of SFT and of RL, and after the last; 0 saves nothing to resume from."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; an older one is removed once a newer one is whole."""
    async_save: bool = True
    """Write while the next steps go on, from a copy in host memory; false makes no copy, and training waits for the disk."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a failed save (a full disk) does to the run."""
    hf_every_steps: NonNegativeInt = 0
    """Write the model as a Hugging Face directory after so many steps, under hf/ of the run directory; all are kept. The
    trained model is written at the end in any case."""
