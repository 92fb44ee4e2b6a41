"""vLLM's asynchronous engine: its core in a process of its own, requests one by one, its event loop in a thread here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from quintet.rollout.external_engine import Answer, Job
from quintet.rollout.process_watchdog import ProcessWatchdog
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.adapters import adapter_request
from quintet.rollout.vllm.extension import answers, message
from quintet.rollout.vllm.jobs import answer, asked

P = ParamSpec("P")
T = TypeVar("T")
ABORTS_AGAIN_S = 0.02


class ServerEngine:
    """An asynchronous vLLM engine: see `jobs.Engine`. `arguments` are those of vLLM's EngineArgs."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server", daemon=True)
        self._thread.start()
        with ProcessWatchdog.over_children("vLLM") as self._watch:
            self._engine = self._do(_start(arguments))
        self._adapter = adapter_request() if arguments.get("enable_lora") else None
        self._under_way: set[str] = set()

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop, from any thread but that one."""
        return self._watch.wait_for(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def run(self, jobs: Sequence[Job]) -> Generator[dict[int, Answer]]:
        with self._watch.named():
            done: SimpleQueue[dict[int, Answer] | None] = SimpleQueue()
            yield from self._watch.each(
                asyncio.run_coroutine_threadsafe(self._all(jobs, done), self._loop), done
            )

    async def _all(self, jobs: Sequence[Job], done: SimpleQueue[dict[int, Answer] | None]) -> None:
        async def one(place: int, job: Job) -> None:
            done.put({place: await self._one(job)})

        tasks = [asyncio.ensure_future(one(place, job)) for place, job in enumerate(jobs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the first error ends the others
                task.cancel()

    async def _one(self, job: Job) -> Answer:
        prompt, params = asked(job)
        self._under_way.add(job.name)
        try:
            async for output in self._engine.generate(prompt, params, job.name, lora_request=self._adapter):
                if output.finished:
                    return answer(output)
        finally:
            self._under_way.discard(job.name)
        raise RuntimeError(f"vLLM ended request {job.name} without an answer")

    def rpc(self, verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        with self._watch.named():
            return answers(verb, self._do(self._engine.collective_rpc(*message(verb, *args, **kwargs))))

    def counts(self) -> dict[str, float]:
        return compat.counters()

    def forget_prefixes(self) -> None:
        with self._watch.named():
            self._do(self._engine.reset_prefix_cache(reset_running_requests=True))

    def pause(self) -> None:
        with self._watch.named():
            self._do(self._engine.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        with self._watch.named():
            self._do(self._engine.resume_generation())

    def abort(self) -> None:
        async def all_of_them() -> None:
            """Once is not enough: vLLM does not know a request yet whose prompt it is still preparing."""
            asked = set(self._under_way)
            while left := asked & self._under_way:
                await self._engine.abort(list(left))
                await asyncio.sleep(ABORTS_AGAIN_S)

        with self._watch.named():
            self._do(all_of_them())

    def close(self) -> None:
        self._watch.close()
        self._engine.shutdown()
        self._do(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
