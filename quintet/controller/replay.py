"""Samples of a step as rollout and trainer had them: what `quintet diagnose mismatch` replays.

A file a step, RUN/replay/step-000012.safetensors. Its tensors are flat, samples one after another:

    generated_ids, trained_ids            int32   tokens of prompt and response, as the rollout and as the trainer had them
    generated_lengths, trained_lengths    int32   [samples]; the same of prompts: generated_prompts, trained_prompts
    generated_logprobs                    fp32    of the response's tokens, as the rollout told them
    rollout_logprobs, old_logprobs        fp32    as the trainer was given them, and its own before the step's first update
    routes                                int16   [tokens - samples, layers, top-k], where the rollout tells them

and its metadata holds one text, `quintet`: JSON with the step, the step after which the weights came that generated, the
sampling, and each sample's prompt, response and finish.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.controller.messages import ReplayTokens, TrainedTokens
from quintet.controller.samples import Samples
from quintet.errors import UserError
from quintet.rollout.base import Sampling
from quintet.runs.directory import replay_name


@dataclass(frozen=True)
class ReplaySample:
    """One sample, as the rollout made it and as the trainer had it."""

    prompt: str
    response: str
    finish: str
    generated: ReplayTokens
    trained: TrainedTokens


@dataclass(frozen=True)
class Replay:
    """What is kept of a step."""

    step: int
    weights: int
    """The step after which the weights came that the samples were generated with."""
    sampling: Sampling
    samples: list[ReplaySample]


def replay_of(step: int, sampling: Sampling, samples: Samples, trained: dict[int, TrainedTokens]) -> Replay:
    """Return the replay of a step from what its rollouts told and what its trainers told, by number of the sample."""
    chosen = []
    for number in sorted(trained):
        made, prompt = samples.generated[number], samples.prompts[samples.groups[number]]
        assert made.kept is not None, (
            "each rollout tells at least as many of its own first samples with tokens"
        )
        chosen.append(ReplaySample(prompt.text, made.text, made.finish, made.kept, trained[number]))
    return Replay(step, step - 1, sampling, chosen)


def pack(replay: Replay) -> bytes:
    """Return the content of a replay file."""
    from safetensors.torch import save

    made, trained = [s.generated for s in replay.samples], [s.trained for s in replay.samples]
    tensors = {
        "generated_ids": _flat([one.ids for one in made], torch.int32),
        "generated_lengths": _flat([[len(one.ids) for one in made]], torch.int32),
        "generated_prompts": _flat([[one.prompt_tokens for one in made]], torch.int32),
        "generated_logprobs": _flat([one.logprobs for one in made], torch.float32),
        "trained_ids": _flat([one.ids for one in trained], torch.int32),
        "trained_lengths": _flat([[len(one.ids) for one in trained]], torch.int32),
        "trained_prompts": _flat([[one.prompt_tokens for one in trained]], torch.int32),
        "rollout_logprobs": _flat([one.rollout_logprobs for one in trained], torch.float32),
        "old_logprobs": _flat([one.old_logprobs for one in trained], torch.float32),
    }
    routes = [one.routes for one in made if one.routes is not None]
    if routes and len(routes) == len(made):
        # A copy: what came through the object store cannot be written, of which torch warns.
        tensors["routes"] = torch.from_numpy(np.concatenate(routes, dtype=np.int16)).contiguous()
    told = {
        "step": replay.step,
        "weights": replay.weights,
        "sampling": dataclasses.asdict(replay.sampling),
        "texts": [[one.prompt, one.response, one.finish] for one in replay.samples],
    }
    return save(tensors, {"quintet": json.dumps(told, ensure_ascii=False)})


def read(path: Path) -> Replay:
    """Read a replay file. Raises UserError for one that is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["quintet"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        return _replay(told, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is no replay file: {error}") from None


def replay_file(run: Path, step: int) -> Path:
    """Return where a run's replay of a step is."""
    return run / "replay" / replay_name(step)


def _replay(told: dict[str, Any], tensors: dict[str, Tensor]) -> Replay:
    made = _columns(tensors, "generated", ["generated_logprobs"])
    if "routes" in tensors:
        rows = tensors["routes"].split([size - 1 for size in tensors["generated_lengths"].tolist()])
        made.append([row.numpy() for row in rows])
    trained = _columns(tensors, "trained", ["rollout_logprobs", "old_logprobs"])
    of_each = zip(told["texts"], zip(*made, strict=True), zip(*trained, strict=True), strict=True)
    samples = [
        ReplaySample(prompt, response, finish, ReplayTokens(*one), TrainedTokens(*other))
        for (prompt, response, finish), one, other in of_each
    ]
    settings: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in told["sampling"].items()
    }
    return Replay(told["step"], told["weights"], Sampling(**settings), samples)


def _columns(tensors: dict[str, Tensor], who: str, of_responses: Sequence[str]) -> list[list[Any]]:
    """By sample its tokens, how many are the prompt, and these of its response's tokens: the first fields of `ReplayTokens` and of
    `TrainedTokens`."""
    sizes, prompts = (tensors[f"{who}_{what}"].tolist() for what in ("lengths", "prompts"))
    responses = [size - prompt for size, prompt in zip(sizes, prompts, strict=True)]
    ids = _cut(tensors[f"{who}_ids"], sizes)
    return [ids, prompts, *(_cut(tensors[name], responses) for name in of_responses)]


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def _cut(values: Tensor, sizes: list[int]) -> list[list[Any]]:
    return [row.tolist() for row in values.split(sizes)]
