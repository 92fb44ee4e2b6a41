"""vLLM's synchronous engine: all requests of a step together, stepped here.

Stepping it here, rather than by vLLM's `LLM.generate`, is what lets another thread pause and abort.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from quintet.rollout.external_engine import Answer, Job
from quintet.rollout.process_watchdog import ProcessWatchdog
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.adapters import adapter_request
from quintet.rollout.vllm.extension import answers, message
from quintet.rollout.vllm.jobs import answer, asked
from quintet.rollout.vllm.sampling import own_logprobs

P = ParamSpec("P")
T = TypeVar("T")


class OfflineEngine:
    """A synchronous vLLM engine: see `jobs.Engine`. `arguments` are those of vLLM's EngineArgs. With one device the engine lives
    in this process, with more its core and its workers have processes of their own."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        devices = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
        with ProcessWatchdog.over_children("vLLM") as self._watch:
            self._engine = compat.make_offline(arguments, processes=devices > 1)
        self._counts = compat.StepCounts(self._engine)
        self._adapter = adapter_request() if arguments.get("enable_lora") else None
        self._apart = devices > 1
        self._calls = threading.Lock()  # one call of `run` at a time
        # One thread at a time is in the engine. `run` is in it all the time, but for when others wait.
        self._turn = threading.Condition(threading.RLock())
        self._waiting = 0
        self._counting = threading.Lock()
        self._paused = False
        self._under_way: set[str] = set()
        self._aborted: dict[str, Answer] = {}

    def run(self, jobs: Sequence[Job]) -> Generator[dict[int, Answer]]:
        with self._calls, self._watch.named():
            names = [job.name for job in jobs]
            try:
                with self._turn:
                    self._add(jobs)
                yield from self._step_through(names)
            finally:
                with self._turn:
                    self._aborted.clear()
                    if self._under_way:  # an error: nothing of it may be left for the next call
                        with suppress(Exception):  # a dead engine's second error would hide its first
                            self._engine.abort_request(list(self._under_way))
                        self._under_way.clear()

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            prompt, params = asked(job)
            self._under_way.add(job.name)
            self._engine.add_request(job.name, prompt, params, lora_request=self._adapter)

    def _step_through(self, names: Sequence[str]) -> Iterator[dict[int, Answer]]:
        """Answers are told a step late: what workers wrote down of these has come to the host by then, where asking at once would
        wait for the step that is under way, with none behind it."""
        places = {name: place for place, name in enumerate(names)}
        left, late = len(names), dict[int, Answer]()
        while left:
            with self._turn:
                while self._waiting or (self._paused and not self._aborted and not late):
                    self._turn.wait()
                answers, self._aborted = self._aborted, {}
                if self._under_way and not self._paused:
                    for output in self._engine.step():
                        if output.finished and output.request_id in self._under_way:
                            answers[output.request_id] = answer(output)
                            self._under_way.discard(output.request_id)
            left -= len(answers)
            if not left:
                with self._turn:
                    compat.settle(self._engine)
            if late:
                yield late
            late = {places[name]: made for name, made in answers.items()}
        yield late

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._counting:
            self._waiting += 1
        with self._turn:
            with self._counting:
                self._waiting -= 1
            try:
                with self._watch.named():
                    yield
            finally:
                self._turn.notify_all()

    def _answer_of(self, function: Callable[[], T]) -> T:
        """What the engine answers. One in this process is asked in this thread, which has its device and streams."""
        return self._watch.call(function) if self._apart else function()

    def rpc(self, verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        with self._between_steps():
            told = message(verb, *args, **kwargs)
            return answers(verb, self._answer_of(lambda: self._engine.collective_rpc(*told)))

    def counts(self) -> dict[str, float]:
        return dict(self._counts.counts)

    def forget_prefixes(self) -> None:
        with self._between_steps():
            self._answer_of(lambda: self._engine.reset_prefix_cache(reset_running_requests=True))

    def pause(self) -> None:
        from vllm.v1.engine.core import EngineCore

        with self._between_steps():
            self._paused = True
            self._schedule(EngineCore.pause_scheduler, "keep", False)

    def resume(self) -> None:
        from vllm.v1.engine.core import EngineCore

        with self._between_steps():
            self._schedule(EngineCore.resume_scheduler)
            self._paused = False

    def _schedule(self, verb: Callable[..., Any], *args: Any) -> None:
        """Tell a core in a process of its own, which steps whether or not it is asked for what it made."""
        if self._apart:
            self._answer_of(lambda: self._engine.engine_core.call_utility(verb.__name__, *args))

    def abort(self) -> None:
        with self._between_steps():
            for name in self._under_way:
                ids, logprobs = compat.unfinished(self._engine, name)
                self._aborted[name] = Answer(ids, own_logprobs(logprobs), "abort")
            self._engine.abort_request(list(self._under_way))
            self._under_way.clear()

    def close(self) -> None:
        self._watch.close()
        with self._between_steps():
            compat.end_offline(self._engine)
