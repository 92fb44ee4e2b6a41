"""What follows a forward pass of few sequences, as one CUDA graph. A part of `gpu_worker` by its length apart. vLLM alone imports this.

vLLM 0.20.2's second runner captures the forward pass alone: logits, noise, log-probs and counts are some thirty launches a step besides. On a
slow host these took half of a step of few sequences, of which a long tail is made; where the GPU is what a step waits for, little is gained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

MOST = 128
"""Sequences of the largest step that is captured. There is a graph for each number up to it: of a row too many the state would be another's."""

Drawn = tuple[Any, Tensor, Tensor]
"""vLLM's SamplerOutput, and how many tokens were drawn and how many rejected, each [sequences]."""
Draw = Callable[[Tensor, Any, Any], Drawn]
"""Hidden states [tokens, hidden size], vLLM's InputBatch, and what a grammar allows or None."""


class CapturedDraws:
    """Draw as `draw` does, the runner's `sample`: by the replay of a graph, where a step is of a captured size and plain.

    runner: vLLM's second model runner, whose forward passes are captured. Plain is a step in which every sequence has one token, and nothing but its
    temperature and seed to be drawn by.
    """

    def __init__(self, runner: Any, draw: Draw) -> None:
        self._runner, self._draw = runner, draw
        self._hidden: Tensor = runner.cudagraph_manager.hidden_states
        sampler = runner.sampler
        states = sampler.sampling_states
        self._rows = torch.zeros(MOST, dtype=torch.int32, device=runner.device)
        # vLLM writes these to other places with each request; a graph reads them from one.
        self._given = [
            (one, one.gpu.clone())
            for one in (states.temperature, states.seeds, runner.req_states.prefill_len)
        ]
        self._plain: list[tuple[np.ndarray, float]] = [
            (sampler.logit_bias_state.use_logit_bias, False),
            (sampler.penalties_state.use_penalty, False),
            (sampler.bad_words_state.num_bad_words.np, 0),
            (states.min_p.np, 0.0),
            (states.top_p.np, 1.0),
            (states.top_k.np, states.vocab_size),
            (states.num_logprobs, -1),
        ]
        """By sequence, and what it is of one that nothing but temperature and seed matter to."""
        self._special = np.ones(runner.max_num_reqs, dtype=bool)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any, Drawn]] = {}
        self._stale = True

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, from the largest on, whose memory the others then find."""
        temperature = self._runner.sampler.sampling_states.temperature.np
        asked = [(array, array.copy()) for array in (temperature, *(array for array, _ in self._plain))]
        vllms = [one.gpu for one, _ in self._given]
        temperature.fill(0.5)  # at 0 and 1 vLLM leaves it out
        for array, plain in self._plain:
            array.fill(plain)
        for one, held in self._given:
            one.gpu = held
        pool = torch.cuda.graph_pool_handle()
        try:
            for size in range(min(MOST, len(self._hidden), self._runner.max_num_reqs), 0, -1):
                batch = InputBatch.make_dummy(size, size, self._runner.input_buffers)
                rows = self._rows[:size]
                batch = replace(batch, idx_mapping=rows, expanded_idx_mapping=rows)
                self._draw(self._hidden[:size], batch, None)  # compiles what is not compiled yet
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool):
                    drawn = self._draw(self._hidden[:size], batch, None)
                self._graphs[size] = graph, batch, drawn
        finally:
            for array, before in asked:
                array[:] = before
            for (one, _), gpu in zip(self._given, vllms, strict=True):
                one.gpu = gpu

    def renew(self) -> None:
        """Read again what sequences are drawn by: other ones have come."""
        self._stale = True

    def __call__(self, hidden: Tensor, batch: Any, grammar: Any) -> Drawn:
        size = batch.num_reqs
        captured = self._graphs.get(size)
        is_static = hidden.data_ptr() == self._hidden.data_ptr()
        if captured is None or batch.num_tokens != size or grammar is not None or not is_static:
            return self._draw(hidden, batch, grammar)
        if self._stale:
            self._read()
        if self._special[batch.idx_mapping_np].any():
            return self._draw(hidden, batch, grammar)
        graph, _, (output, drawn, rejected) = captured
        self._rows[:size].copy_(batch.idx_mapping)
        graph.replay()
        # These are on their way to the host while the next step writes.
        ids, drawn = output.sampled_token_ids.clone(), drawn.clone()
        return replace(output, sampled_token_ids=ids, num_sampled=drawn), drawn, rejected

    def _read(self) -> None:
        for one, held in self._given:
            held.copy_(one.gpu, non_blocking=True)
        self._special = np.any([array != plain for array, plain in self._plain], axis=0)
        self._stale = False
