"""vLLM behind quintet's adapter with log-probs neither asked for, computed nor fetched: what `vllm` is beside to see what they cost."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from quintet.rollout.base import Sample, Sampling
from quintet.rollout.external_engine import Answer, Job
from quintet.rollout.vllm import rollout
from quintet.rollout.vllm.settings import engine_arguments


class SilentVllm(rollout.VllmRollout):
    """Generate as `VllmRollout` does, by the same options; the samples have no log-probs. Takes its arguments."""

    def __init__(self, *given: Any, **named: Any) -> None:
        with patch.object(rollout, "engine_arguments", silent_arguments):
            super().__init__(*given, **named)
        self._tells_logprobs = self._stores = False  # of requests: nothing is asked, and workers keep nothing

    def _sample(self, job: Job, told: Answer, finished: float, sampling: Sampling) -> Sample:
        ids = told.response_ids
        return Sample(ids, None, [], None, told.finish, self._decode(ids), finished=finished)


def silent_arguments(*given: Any) -> dict[str, Any]:
    """Return quintet's arguments of vLLM's engine, with a worker that computes no log-probs in place of the one that writes them down."""
    arguments = engine_arguments(*given)
    if "worker_cls" in arguments:
        arguments["worker_cls"] = "benchmarks.rollout_silent_worker.SilentWorker"
    return arguments
