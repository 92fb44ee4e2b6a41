"""vLLM's synchronous engine: all requests of a step together, stepped here.

Stepping it here, rather than by vLLM's `LLM.generate`, is what lets another thread pause and abort.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.rollout.death import Watch
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.jobs import Answer, Job, Progress, answer
from quintet.rollout.vllm.sampling import told


class OfflineEngine:
    """See `jobs.Engine`. `arguments` are those of vLLM's EngineArgs."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._params, self._prompt, self._final = SamplingParams, TokensPrompt, RequestOutputKind.FINAL_ONLY
        devices = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
        with Watch.over_children("vLLM") as self._watch:
            self._engine = compat.make_offline(arguments, processes=devices > 1)
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # one thread at a time is in the engine
        self._running = threading.Event()
        self._running.set()
        self._calls = threading.Lock()  # and one at a time has jobs in it
        self._under_way: set[str] = set()
        self._aborted: dict[str, Answer] = {}

    def run(self, jobs: Sequence[Job], progress: Progress) -> list[Answer]:
        with self._calls, self._watch.named():
            names = [f"q{next(self._numbers)}" for _ in jobs]
            with self._lock:
                for name, job in zip(names, jobs, strict=True):
                    params = self._params(**job.parameters, output_kind=self._final)
                    self._engine.add_request(name, self._prompt(prompt_token_ids=job.prompt_ids), params)
                    self._under_way.add(name)
            try:
                answers = self._step_through(set(names), progress)
            finally:
                with self._lock:
                    if self._under_way:  # an error: nothing of it may be left for the next call
                        self.abort()
                    self._aborted.clear()
            return [answers[name] for name in names]

    def _step_through(self, names: set[str], progress: Progress) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        while len(answers) < len(names):
            self._running.wait()
            with self._lock:
                if not self._running.is_set():
                    continue
                before = len(answers)
                if self._under_way:
                    for output in self._engine.step():
                        if output.finished and output.request_id in self._under_way:
                            answers[output.request_id] = answer(output)
                            self._under_way.discard(output.request_id)
                answers |= self._aborted
            if len(answers) > before:
                progress(len(answers))
        return answers

    def rpc(self, method: str, *args: Any) -> list[Any]:
        with self._lock, self._watch.named():
            return list(self._engine.collective_rpc(method, args=args))

    def forget_prefixes(self) -> None:
        with self._lock, self._watch.named():
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def pause(self) -> None:
        with self._lock:  # a step under way ends first
            self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def abort(self) -> None:
        with self._lock:
            for name in self._under_way:
                ids, logprobs = compat.unfinished(self._engine, name)
                self._aborted[name] = Answer(ids, told(logprobs), "abort", [])
            self._engine.abort_request(list(self._under_way))
            self._under_way.clear()
        self._running.set()

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            self._engine.engine_core.shutdown()
