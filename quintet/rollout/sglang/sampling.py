"""Between quintet's words and SGLang's for sampling: parameters on the way in, answers on the way out.

SGLang tells one log-prob a token: of softmax(logits / temperature) before anything is cut, which is the policy's own
(sglang 0.5.17, srt/layers/sampler.py, `Sampler.forward`; with speculation srt/layers/logprob_processor.py,
`compute_spec_v2_logprobs`; greedy requests are those of temperature 1). Log-probs of a prompt's tokens have no
temperature. So training's log-probs are right at any temperature, whatever is cut.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quintet.errors import QuintetError
from quintet.models import ModelShape
from quintet.rollout.base import Request, Sampling
from quintet.rollout.external_engine import Answer, Job

COUNTS = {
    "prompt_tokens": "prefix_cache_queries",
    "cached_tokens": "prefix_cache_hits",
    "spec_verify_ct": "drafts",
    "spec_num_proposed_drafts": "draft_tokens",
    "spec_num_correct_drafts": "accepted_tokens",
}
"""What SGLang counts of a request, and what `SglangRollout.metrics` calls it."""


def parameters(sampling: Sampling, request: Request, number: int, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters for sample `number` of a request."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "sampling_seed": seed,
        "max_new_tokens": request.limits(sampling)[number],
        "stop": list(sampling.stop),
        "stop_token_ids": [] if sampling.ignore_end else list(sampling.stop_token_ids),
        # Besides the end-of-sequence tokens of the model's config, this leaves stop_token_ids out of account.
        "ignore_eos": sampling.ignore_end,
        "skip_special_tokens": False,
    }


def answer(result: Mapping[str, Any], job: Job) -> Answer:
    """Return the answer in a result of SGLang's `Engine.async_generate`, as its `TokenizerManager` makes it
    (sglang 0.5.17, srt/managers/tokenizer_manager.py: `_handle_batch_output`, `_handle_abort_req`)."""
    meta, ids = result["meta_info"], list(result["output_ids"])
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length", "abort"):
        raise QuintetError(f"SGLang ended a request with {reason['type']!r}")
    if reason.get("matched") == "NaN happened":
        raise QuintetError(
            "SGLang's model computed scores that are no numbers: its weights or kernels are wrong"
        )
    # routes: int32 numbers in base64, one behind another (srt/state_capturer/routed_experts.py)
    told, routes = meta.get("output_token_logprobs", []), meta.get("routed_experts")
    if [token for _, token, _ in told[: len(ids)]] != ids:
        raise QuintetError(
            f"SGLang told log-probs of {len(told)} tokens, and they are not those of the {len(ids)} it generated"
        )
    return Answer(
        ids,
        [value for value, _, _ in told[: len(ids)]],
        _finish(reason["type"], ids, job),
        [value for value, _, _ in meta.get("input_token_logprobs", [])[1:]] if job.scores else [],
        None if routes is None else np.frombuffer(base64.b64decode(routes), dtype=np.int32),
        {name: float(meta[key]) for key, name in COUNTS.items() if key in meta},
    )


def _finish(told: str, ids: Sequence[int], job: Job) -> str:
    """SGLang looks at the length, and whether a request is given up, before it looks whether the response is complete."""
    if ids and ids[-1] in job.parameters.get("stop_token_ids", ()):
        return "stop"
    if told == "abort" and ids and len(ids) >= job.parameters["max_new_tokens"]:
        return "length"
    return told


def routes_of(flat: np.ndarray, shape: ModelShape, tokens: int) -> np.ndarray:
    """Return `Sample.routes` of a sequence of `tokens` tokens: int16 [tokens - 1, layers with experts, top-k].

    SGLang tells of every layer and every token but the last; where a layer has no experts, its numbers say nothing.
    """
    assert shape.moe is not None
    expected = (tokens - 1, shape.layers, shape.moe.top_k)
    if flat.size != np.prod(expected):
        raise QuintetError(f"SGLang told {flat.size} routes of {tokens} tokens, which are not {expected}")
    return flat.reshape(expected)[:, list(shape.moe_layers)].astype(np.int16)
