"""vLLM alone, without quintet: what the rollout benchmark compares quintet's adapter with, on the same card in the same run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BareSample:
    """What `measure` looks at of a sample."""

    response_ids: list[int]
    policy_logprobs: list[float]


class BareVllm:
    """vLLM's own `LLM`, in this process, with a seed a request and the sampled tokens' log-probs.

    second_runner: with its second model runner and scheduling that runs ahead, its best options; otherwise the first, in turns
    with the GPU, which is how it ran for quintet at first. logprobs: False leaves these out, to see what they cost.
    """

    def __init__(
        self,
        model: Path,
        *,
        longest: int,
        sequences: int,
        gpus: int,
        dtype: str,
        memory_fraction: float,
        second_runner: bool,
        logprobs: bool = True,
    ) -> None:
        self._logprobs = logprobs
        os.environ |= {
            "VLLM_USE_V2_MODEL_RUNNER": "1" if second_runner else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        from vllm import LLM

        on_gpu = {"async_scheduling": True} if second_runner else {}
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype=dtype,
            tensor_parallel_size=gpus,
            max_model_len=longest,
            max_num_seqs=sequences,
            gpu_memory_utilization=memory_fraction,
            **on_gpu,
        )

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[list[BareSample]]:
        """Return the samples of each request: temperature 1, nothing cut, its seed plus the sample's number for a seed."""
        from vllm import SamplingParams, TokensPrompt

        prompts, params = [], []
        for request in requests:
            for number, limit in enumerate(request.limits(sampling)):
                prompts.append(TokensPrompt(prompt_token_ids=request.prompt_ids))
                params.append(
                    SamplingParams(
                        seed=request.seed * 64 + number,
                        max_tokens=limit,
                        ignore_eos=True,
                        logprobs=0 if self._logprobs else None,
                        flat_logprobs=self._logprobs,
                        detokenize=False,
                    )
                )
        done = self._llm.generate(prompts, params, use_tqdm=False)
        outs = (one.outputs[0] for one in done)
        made = iter(
            BareSample(list(one.token_ids), list(one.logprobs.logprobs) if self._logprobs else [])
            for one in outs
        )
        return [[next(made) for _ in range(request.samples)] for request in requests]

    def close(self) -> None:
        """End with the process: the second runner of vLLM 0.20.2 cannot be shut down."""
