"""A step that draws a token for each of few sequences, by the replay of CUDA graphs alone. A part of `gpu_worker` by its length apart. vLLM
alone imports this.

vLLM 0.20.2's second runner captures the forward pass. What goes before it (positions, block tables, the plan of attention) and after it
(logits, noise, log-probs, counts) are some fifty launches and as many small tensors a step: the host took three times as long as the GPU for
a step of few sequences, of which a long tail is made. Here the GPU reads all of it where it left it the step before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    prepare_pos_seq_lens,
)

MOST = 256
"""Sequences of the largest step that is captured. Its graph holds their logits, a quarter of a gigabyte of 152,000 words, also while vLLM sleeps."""

Drawn = tuple[Any, Tensor, Tensor]
"""vLLM's SamplerOutput, and how many tokens were drawn and how many rejected, each [sequences]."""


class Captured(NamedTuple):
    """What computes a step of up to so many sequences: graphs of what goes before the forward pass and after it, vLLM's batch and key of its
    own graph of that pass, and what is drawn."""

    before: torch.cuda.CUDAGraph
    after: torch.cuda.CUDAGraph
    forward: Any
    batch: Any
    drawn: Drawn


def can_be_captured(runner: Any) -> bool:
    """Return whether steps of this second runner are nothing but what is captured here: one device, no adapters, no drafts, and an attention
    that plans a step on the GPU alone."""
    states, groups = runner.model_state, [one for groups in runner.attn_groups for one in groups]
    return (
        runner.vllm_config.parallel_config.world_size_across_dp == 1
        and not (runner.lora_config or runner.speculator or runner.supports_mm_inputs or states.rope_state)
        and all(isinstance(one.get_metadata_builder(), FlashAttentionMetadataBuilder) for one in groups)
        and runner.cudagraph_manager.hidden_states is not None
        and not runner.sampler.compute_nans
    )


class CapturedSteps:
    """Execute steps as the runner's own `execute_model` and `sample_tokens` do: by replay, where a step is of a captured size and plain.

    runner: vLLM's second model runner, whose forward passes are captured, and which `can_be_captured`. Plain is a step in which every
    sequence has one token, none is new, and nothing but its temperature and seed is it drawn by.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        states, sampler, tables = runner.req_states, runner.sampler, runner.block_tables
        drawn_by = sampler.sampling_states
        self._count = torch.zeros((), dtype=torch.int32, device=runner.device)
        self._rows = torch.zeros(MOST, dtype=torch.int32, device=runner.device)
        """Of a step's sequences among all, and up to the size that is captured one that is none of them: for it no token is read, so none is
        drawn, and its state stays."""
        starts = runner.input_buffers.query_start_loc
        self._numbers = torch.arange(len(starts), dtype=starts.dtype, device=runner.device)
        np.maximum(states.prefill_len.np, 1, out=states.prefill_len.np)  # a row that no request had yet, too
        # vLLM writes these to other places with each request or step; a graph reads them from one.
        self._given = [
            (one, one.gpu.clone()) for one in (drawn_by.temperature, drawn_by.seeds, states.prefill_len)
        ]
        widths = torch.tensor([[one.shape[1]] for one in tables.input_block_tables], dtype=torch.int32)
        # All of a sequence's row, so that it need not be known how much of it is in use.
        self._held = [
            *self._given,
            (tables.num_blocks, widths.to(runner.device).expand(-1, runner.max_num_reqs).contiguous()),
        ]
        self._plain: list[tuple[np.ndarray, float]] = [
            (sampler.logit_bias_state.use_logit_bias, False),
            (sampler.penalties_state.use_penalty, False),
            (sampler.bad_words_state.num_bad_words.np, 0),
            (drawn_by.min_p.np, 0.0),
            (drawn_by.top_p.np, 1.0),
            (drawn_by.top_k.np, drawn_by.vocab_size),
            (drawn_by.num_logprobs, -1),
        ]
        """By sequence, and what it is of one that nothing but temperature and seed matter to."""
        self._graphs: dict[int, Captured] = {}
        self._names: list[str] = []
        """Of the step before, where it was replayed."""
        self._places = np.zeros(0, dtype=np.int32)
        self._under_way: Captured | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the sizes that vLLM has captured the forward pass for, from the largest on, whose memory the others then find, and take the
        runner's steps over."""
        runner = self._runner
        temperature = runner.sampler.sampling_states.temperature.np
        asked = [(array, array.copy()) for array in (temperature, *(array for array, _ in self._plain))]
        vllms = [one.gpu for one, _ in self._held]
        temperature.fill(0.5)  # at 0 and 1 vLLM leaves it out
        for array, plain in self._plain:
            array.fill(plain)
        for one, held in self._held:
            one.gpu = held
        pool = torch.cuda.graph_pool_handle()
        made: dict[int, Captured] = {}
        most = min(MOST, runner.max_num_reqs)
        try:
            for count in range(most, 0, -1):
                forward = runner.cudagraph_manager.dispatch(count, count, 1)
                size = forward.num_tokens
                if forward.cg_mode == CUDAGraphMode.FULL and size <= most:
                    if size not in made:
                        made[size] = self._captured(size, forward, pool)
                    self._graphs[count] = made[size]
        finally:
            for array, before in asked:
                array[:] = before
            for (one, _), gpu in zip(self._held, vllms, strict=True):
                one.gpu = gpu
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens

    def _captured(self, size: int, forward: Any, pool: Any) -> Captured:
        runner, rows = self._runner, self._rows[:size]
        buffers, states = runner.input_buffers, runner.req_states
        batch = replace(
            InputBatch.make_dummy(size, size, buffers), idx_mapping=rows, expanded_idx_mapping=rows
        )
        hidden = runner.cudagraph_manager.hidden_states[:size]

        def prepare() -> None:
            torch.minimum(self._numbers, self._count, out=buffers.query_start_loc)
            computed, starts = states.num_computed_tokens.gpu, batch.query_start_loc
            prepare_pos_seq_lens(rows, starts, computed, buffers.positions, buffers.seq_lens)
            batch.seq_lens.mul_(self._numbers[:size] < self._count)
            combine_sampled_and_draft_tokens(
                buffers.input_ids,
                rows,
                states.last_sampled_tokens,
                starts,
                batch.seq_lens,
                states.prefill_len.gpu,
                states.draft_tokens,
                batch.cu_num_logits,
                size,
            )
            groups, config = runner.attn_groups, runner.kv_cache_config
            runner.model_state.prepare_attn(
                batch, CUDAGraphMode.FULL, *runner.prepare_attn(batch), groups, config, for_capture=True
            )

        def draw() -> Drawn:
            output, drawn, rejected = runner.sample(hidden, batch, None)
            runner.postprocess(batch, output.sampled_token_ids, drawn, rejected)
            return output, drawn, rejected

        for state in (states.num_computed_tokens, states.total_len):
            state.gpu.zero_()  # which each draw counts up, of a sequence that there is not
        self._count.fill_(size)
        prepare()  # what is not compiled yet is compiled
        draw()
        before, after = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(before, pool):
            prepare()
        with torch.cuda.graph(after, pool):
            drawn = draw()
        return Captured(before, after, forward, batch, drawn)

    def execute_model(self, step: Any, intermediate_tensors: Any = None, **others: Any) -> Any:
        """Compute the hidden states of a step: the runner's `execute_model`."""
        captured = None if others else self._captured_for(step)
        self._under_way = captured
        if captured is None:
            self._names = []  # rows may be given to others
            return self._execute(step, intermediate_tensors, **others)
        runner = self._runner
        runner.finish_requests(step)
        runner.update_requests(step)
        runner.block_tables.apply_staged_writes()
        captured.before.replay()
        runner.cudagraph_manager.run_fullgraph(captured.forward)
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        """Draw a step's tokens: the runner's `sample_tokens`."""
        captured, runner = self._under_way, self._runner
        if captured is None:
            return self._sample(grammar)
        captured.after.replay()
        output, drawn, _ = captured.drawn
        made = ModelRunnerOutput(
            req_ids=self._names, req_id_to_index={name: at for at, name in enumerate(self._names)}
        )
        # These are on their way to the host while the next step writes.
        count = len(self._names)
        told = AsyncOutput(
            model_runner_output=made,
            sampler_output=replace(output, sampled_token_ids=output.sampled_token_ids[:count].clone()),
            num_sampled_tokens=drawn[:count].clone(),
            main_stream=runner.main_stream,
            copy_stream=runner.output_copy_stream,
        )
        runner.req_states.num_computed_tokens_np[self._places] += 1
        return told if runner.use_async_scheduling else told.get_output()

    def _captured_for(self, step: Any) -> Captured | None:
        """What computes this step; None where it is not plain, or of no captured size."""
        scheduled = step.num_scheduled_tokens
        captured = self._graphs.get(len(scheduled))
        plain = step.total_num_scheduled_tokens == len(scheduled) and not step.scheduled_new_reqs
        if captured is None or not plain or step.has_structured_output_requests:
            return None
        if (names := list(scheduled)) == self._names:
            return captured
        states = self._runner.req_states
        places = np.fromiter(map(states.req_id_to_index.__getitem__, names), np.int32, len(names))
        special = np.any([array[places] != usual for array, usual in self._plain])
        if special or states.any_prefills(places):
            return None
        self._names, self._places = names, places
        size = captured.batch.num_reqs
        rows = np.full(size, min(set(range(size)).difference(places), default=0), dtype=np.int32)
        rows[: len(names)] = places
        self._rows[:size].copy_(torch.from_numpy(rows), non_blocking=True)
        self._count.fill_(len(names))
        for one, held in self._given:
            held.copy_(one.gpu, non_blocking=True)
        return captured
