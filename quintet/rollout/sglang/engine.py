"""SGLang's engine in a thread of its own, where its event loop runs; other threads ask from outside.

SGLang empties its caches, gives memory up and takes weights only when it has no requests at all. So what is paused is
taken from it, and kept here with what it has come to; after `resume` it goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from quintet.errors import QuintetError, UserError
from quintet.rollout.external_engine import Answer, Job
from quintet.rollout.process_watchdog import ProcessWatchdog
from quintet.rollout.sglang import compat
from quintet.rollout.sglang.sampling import answer

_IDLE_TIMEOUT_S = 60.0
"""SGLang has nothing to do within this time of its last request; longer is an error."""


class SglangEngine:
    """One SGLang engine. `arguments` are those of its ServerArgs. Its methods may be called from several threads."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._tells_routes = bool(arguments.get("enable_return_routed_experts"))
        self._before: Any = signal.SIG_DFL
        if _in_main_thread():
            # A process of SGLang that fails sends this, which would end the whole process; the watch tells who it was.
            self._before = signal.signal(signal.SIGQUIT, lambda number, frame: None)
        file, meeting = tempfile.mkstemp(prefix="quintet-sglang-")
        os.close(file)
        self._meeting = Path(meeting)
        with ProcessWatchdog.over_children("SGLang") as self._watch:
            # SGLang's processes end with the thread that started them: it stays as long as they are needed.
            made: Future[None] = Future()
            threading.Thread(target=self._drive, args=(arguments, made), name="sglang", daemon=True).start()
            try:
                made.result()
            except BaseException:
                self._go_back()
                raise
        self._calls = threading.Lock()  # one thread at a time has jobs in it
        self._changed, self._running = asyncio.Condition(), True
        self._inside = 0  # requests that SGLang has
        self._pauses = self._aborts = 0

    def _drive(self, arguments: Mapping[str, Any], made: Future[None]) -> None:
        try:
            self._engine = compat.make_engine(arguments, self._meeting)
            if (room := compat.room(self._engine)) < (longest := arguments["context_length"]):
                compat.end(self._engine)
                raise UserError(
                    f"SGLang's KV cache holds {room} tokens, and a sequence may have {longest}: use a larger rollout.memory_fraction or "
                    "rollout.layout.tp, or a smaller data.max_prompt_tokens or rollout.max_response_tokens"
                )
            self._loop: asyncio.AbstractEventLoop = self._engine.loop
            self._ranks = int(arguments["tp_size"])
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(None)
        self._loop.run_forever()

    def _ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the loop's thread and wait; WorkerFailure when a process of SGLang dies meanwhile."""
        return self._watch.wait_for(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # jobs

    def run(self, jobs: Sequence[Job]) -> Generator[dict[int, Answer]]:
        done: SimpleQueue[dict[int, Answer] | None] = SimpleQueue()
        with self._calls:
            future = asyncio.run_coroutine_threadsafe(self._all(jobs, done), self._loop)
            yield from self._watch.each(future, done)

    async def _all(self, jobs: Sequence[Job], done: SimpleQueue[dict[int, Answer] | None]) -> None:
        begun = self._aborts

        async def one(place: int, job: Job) -> None:
            done.put({place: await self._one(job, begun)})

        tasks = [asyncio.create_task(one(place, job)) for place, job in enumerate(jobs)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            compat.abort_all(self._engine)  # nothing of it may be left for the next call
            raise

    async def _one(self, job: Job, begun: int) -> Answer:
        """The answer of a job, through any number of pauses. begun: how often all was aborted before it."""
        made = Answer([], [], "abort")
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._running or self._aborts != begun)
            if self._aborts != begun:
                break
            pauses = self._pauses
            made = _joined(made, await self._send(job, made))
            if made.finish != "abort" or self._aborts != begun:
                break
            if self._pauses == pauses:
                raise QuintetError("SGLang gave a request up that nobody aborted")
            if job.parameters.get("stop"):
                # The string may lie across the place of the pause.
                made = replace(made, response_ids=[], logprobs=[])
        return made

    async def _send(self, job: Job, made: Answer) -> Answer:
        """What comes of the job from here on."""
        left = job.parameters["max_new_tokens"] - len(made.response_ids)
        rest = replace(job, parameters=job.parameters | {"max_new_tokens": left})
        self._inside += 1
        try:
            result = await self._engine.async_generate(
                input_ids=[*job.prompt_ids, *made.response_ids],
                sampling_params=dict(rest.parameters),
                return_logprob=True,
                logprob_start_len=0 if job.scores else -1,
                return_routed_experts=self._tells_routes and not job.scores,
            )
        except Exception as error:
            if not compat.was_aborted(error):
                raise
            return Answer([], [], "abort")
        finally:
            self._inside -= 1
        return answer(result, rest)

    def pause(self) -> None:
        """Take everything from SGLang, and hold it until `resume`."""
        self._ask(self._pause())

    async def _pause(self) -> None:
        self._running = False
        self._pauses += 1
        await self._emptied()

    def resume(self) -> None:
        self._ask(self._resume())

    async def _resume(self) -> None:
        self._running = True
        async with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        self._ask(self._abort())

    async def _abort(self) -> None:
        self._aborts += 1
        await self._emptied()
        async with self._changed:  # those that are held end; what comes after them is held as before
            self._changed.notify_all()

    async def _emptied(self) -> None:
        """Once is not enough: a request on its way to the scheduler is not yet there to be given up."""
        while self._inside:
            compat.abort_all(self._engine)
            await asyncio.sleep(0.02)

    # weights and memory

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Raises QuintetError while requests are under way that are not held."""
        self._ask(self._idle())

    async def _idle(self) -> None:
        if self._inside:
            raise QuintetError(
                "SGLang takes weights and gives memory up only without requests: pause or abort them first"
            )
        if not await compat.flush(self._engine, _IDLE_TIMEOUT_S):
            raise QuintetError(f"SGLang was not idle {_IDLE_TIMEOUT_S:.0f} s after its last request")

    def release(self, parts: Sequence[str]) -> None:
        self._ask(self._release(parts))

    async def _release(self, parts: Sequence[str]) -> None:
        await self._idle()
        await compat.release(self._engine, parts)

    def restore(self, parts: Sequence[str]) -> None:
        self._ask(compat.restore(self._engine, parts))

    def load(self, flat: Any, entries: Sequence[Any]) -> None:
        """Load a bucket of weights, see `compat.load`; returns when all workers have taken it."""
        success, message = self._ask(compat.load(self._engine, flat, entries, self._ranks))
        if not success:
            raise QuintetError(f"SGLang did not take new weights: {message}")

    def close(self) -> None:
        """Stop SGLang's processes."""
        self._watch.close()
        compat.end(self._engine)
        self._loop.call_soon_threadsafe(self._stop)
        self._go_back()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):  # SGLang's own, which wait for its processes
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _go_back(self) -> None:
        self._meeting.unlink(missing_ok=True)
        if _in_main_thread():
            signal.signal(signal.SIGQUIT, self._before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _joined(first: Answer, second: Answer) -> Answer:
    """A response and what came after it."""
    names = first.counts | second.counts
    return replace(
        second,
        response_ids=first.response_ids + second.response_ids,
        logprobs=first.logprobs + second.logprobs,
        counts={name: first.counts.get(name, 0.0) + second.counts.get(name, 0.0) for name in names},
    )
