"""SGLang's engine as its source describes it (sglang 0.5.17), without a model: what its verbs answer, and what it dies of.

A response is the numbers that follow the last token, a token a tick; each one's log-prob is its negative. Where SGLang's
scheduler would die of an assertion, this raises AssertionError.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np

TICK_S = 0.002
LAYERS, TOP_K = 4, 2
TOKENS = 10_000
"""That its KV cache holds."""

SIZES = {"weights": 20, "kv_cache": 30}
"""Of a device's 100 bytes."""


def in_use(engines: list[Engine]) -> int:
    """Bytes of each device that engines have."""
    return sum(size for one in engines for part, size in SIZES.items() if part not in one.asleep)


class Engine:
    """srt/entrypoints/engine.py: what quintet calls of it. `tokenizer_manager` is the engine itself."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.max_req_input_len = min(arguments["context_length"], TOKENS) - 6
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self
        self.requests: set[SimpleNamespace] = set()
        self.log: list[str] = []
        self.asleep: set[str] = set()
        self.busy = 2  # milliseconds: its scheduler is idle a little later than its last answer
        self.process = subprocess.Popen(["sleep", "600"])

    async def async_generate(
        self, *, input_ids, sampling_params, return_logprob, logprob_start_len, return_routed_experts
    ) -> dict[str, Any]:
        assert return_logprob
        assert not self.asleep
        request = Request()
        self.requests.add(request)
        self.log.append(f"generate {len(input_ids)}")
        ids: list[int] = []
        try:
            reason = {"type": "length", "length": sampling_params["max_new_tokens"]}
            while len(ids) < sampling_params["max_new_tokens"]:
                await asyncio.sleep(TICK_S)
                if request.aborted:
                    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                    break
                ids.append((input_ids[-1] + len(ids) + 1) % 100)
                # `update_finish_state`: the length is looked at first
                if len(ids) == sampling_params["max_new_tokens"]:
                    break
                if ids[-1] in sampling_params["stop_token_ids"] and not sampling_params["ignore_eos"]:
                    reason = {"type": "stop", "matched": ids[-1]}
                    break
        finally:
            self.requests.discard(request)
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(input_ids),
            "cached_tokens": 1,
            "completion_tokens": len(ids),
            "output_token_logprobs": [(-float(token), token, None) for token in ids],
            "input_token_logprobs": [],
        }
        if logprob_start_len >= 0:
            told = [None, *(-float(token) for token in input_ids[1:])]
            meta["input_token_logprobs"] = [(v, t, None) for v, t in zip(told, input_ids, strict=True)]
        if return_routed_experts:
            tokens = len(input_ids) + len(ids) - 1
            routes = np.arange(tokens * LAYERS * TOP_K, dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert abort_all
        for request in self.requests:
            request.aborted = True

    async def flush_cache(self, timeout_s: float | None = None) -> SimpleNamespace:
        self.log.append("flush")
        while not self.requests and self.busy and timeout_s is not None and timeout_s > 0:
            self.busy, timeout_s = self.busy - 1, timeout_s - 0.001
            await asyncio.sleep(0.001)
        return SimpleNamespace(success=not self.requests and not self.busy)

    async def release(self, parts: list[str]) -> None:
        assert not self.requests
        self.asleep |= set(parts)
        self.log.append(f"release {' '.join(parts)}")

    async def restore(self, parts: list[str]) -> None:
        assert set(parts) <= self.asleep
        self.asleep -= set(parts)
        self.log.append(f"restore {' '.join(parts)}")

    def get_all_child_pids(self) -> list[int]:
        return [self.process.pid]

    def shutdown(self) -> None:
        raise AssertionError("it stops every process that this one has started")


class Request(SimpleNamespace):
    aborted = False
    __hash__ = object.__hash__
