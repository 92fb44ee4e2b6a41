"""One call of `generate`: the rows it computes, the tokens it draws, and who is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.engine.head import VocabSlice, logits
from quintet.engine.product import packed
from quintet.engine.row import MicroBatch, PackedRow, pack
from quintet.packing.align import Alignment
from quintet.rollout.base import Sampling
from quintet.rollout.native.cache import SlotCache
from quintet.rollout.native.routes import Routes
from quintet.rollout.native.sampler import draw
from quintet.rollout.native.scheduler import Scheduler, SequenceState
from quintet.rollout.native.stage import Stage
from quintet.rollout.seeds import sample_seeds

GOES_ON, PAUSED, ABORTED = range(3)
"""What becomes of requests, as the rank that owns the output has it."""
HELD_S = 0.01
"""How often ranks that are paused look whether they still are."""


class GenerateCall:
    """One `generate` under way: the rows it computes and the tokens it draws."""

    def __init__(
        self,
        stage: Stage,
        scheduler: Scheduler,
        cache: SlotCache,
        sampling: Sampling,
        *,
        decode: Callable[[list[int]], str],
        state: Callable[[], int],
        progress: Callable[[int], None],
        overheard: Callable[[list[SequenceState]], None],
        routes: Routes | None,
    ) -> None:
        self.stage, self.scheduler, self.cache, self.sampling = stage, scheduler, cache, sampling
        self.routes, self._decode, self._state, self._progress = routes, decode, state, progress
        self._overheard = overheard
        self.device = stage.model.device
        self._head = packed(stage.model.head_weight()) if stage.mesh.last_stage else None
        self._stops = set() if sampling.ignore_end else set(sampling.stop_token_ids)
        self._tail = max((len(s) for s in sampling.stop), default=0)
        self._seeds = [sample_seeds(request.seed, request.samples) for request in scheduler.requests]
        self._done = 0
        self.paused = False
        """Whether all ranks that share the requests are to hold them."""

    def prefill(self, groups: list[list[SequenceState]]) -> None:
        """Compute new prompts, once each, keep them in their samples' slots, and draw first tokens."""
        prompts = [self.scheduler.requests[g[0].request].prompt_ids for g in groups]
        micro = prompt_row(prompts, self.stage.align)
        row = self.stage.model.row(micro)
        first_slot = len(self.scheduler.active) - sum(len(g) for g in groups)
        starts = torch.tensor([0, *micro.lengths]).cumsum(0)
        source, slot, position, last = [], [], [], []
        for g, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
            step = torch.arange(len(prompt))
            for _ in group:
                source.append(starts[g] + step)
                slot.append(torch.full((len(prompt),), first_slot))
                position.append(step)
                last.append(int(starts[g]) + len(prompt) - 1)
                first_slot += 1
        at = [torch.cat(x).to(self.device) for x in (source, slot, position)]
        self.cache.prefill(at[0], at[1], at[2])
        row.cache, row.routes = self.cache, self.routes.of_row() if self.routes is not None else None
        hidden = self.stage.forward(micro.input_ids.to(self.device), row)
        fresh = [sequence for group in groups for sequence in group]
        if self.routes is not None:
            begins = [int(start) for group, start in zip(groups, starts[:-1], strict=False) for _ in group]
            rows = [(d, start, start + d.prompt_length) for d, start in zip(fresh, begins, strict=True)]
            self.routes.keep(rows, micro.tokens)
        self._draw(hidden, torch.tensor(last), fresh)

    def decode(self) -> None:
        """Draw one token for every active sequence."""
        active = self.scheduler.active
        positions = torch.tensor([s.prompt_length + len(s.response_ids) - 1 for s in active])
        ids = torch.tensor([s.response_ids[-1] for s in active])
        total = self.stage.align.row([1] * len(active))
        ids, at = (F.pad(one, (0, total - len(active))) for one in (ids, positions))
        row = PackedRow(qkv_format="thd")
        row.cos, row.sin = self.stage.model.rotary(at.to(self.device))
        self.cache.decode(positions.to(self.device), int(positions.max()) + 1)
        row.cache, row.routes = self.cache, self.routes.of_row() if self.routes is not None else None
        hidden = self.stage.forward(ids[None].to(self.device), row)
        if self.routes is not None:
            self.routes.keep([(d, i, i + 1) for i, d in enumerate(active)], total)
        self._draw(hidden, torch.arange(len(active)), active)

    def retire(self) -> None:
        """Let finished sequences go; the last active ones move into their slots."""
        before = len(self.scheduler.active)
        source, target = self.scheduler.retire()
        if source:
            longest = max(d.prompt_length + len(d.response_ids) for d in self.scheduler.active)
            self.cache.move(source, target, longest)
        ended = before - len(self.scheduler.active)
        if ended:
            self._done += ended
            self._progress(self._done)

    def _draw(self, hidden: Tensor | None, rows: Tensor, sequences: list[SequenceState]) -> None:
        """Draw the next token of each sequence from the hidden state at its row. Whether the requests are held or given up travels
        with the tokens, so that all ranks do it at the same one."""
        count = len(sequences)
        picked = torch.zeros((4, count + 1), dtype=torch.float64, device=self.device)
        if hidden is not None:
            model, mesh = self.stage.model, self.stage.mesh
            assert self._head is not None
            vocab = VocabSlice(len(self._head), model.shape.vocab_size, mesh.groups.tp)
            z = logits(hidden.index_select(0, rows.to(self.device)), self._head, vocab)
            z = z[:, : model.shape.vocab_size]
            seeds = torch.tensor([self._seeds[d.request][d.number] for d in sequences], device=self.device)
            known = [d.prompt_length + len(d.response_ids) - 1 for d in sequences]
            at = torch.tensor(known, device=self.device)
            picked[:, :count] = torch.stack([x.double() for x in draw(z, self.sampling, seeds, at)])
            picked[0, count] = float(self._state())
        *drawn, last_column = zip(*self.stage.share(picked).tolist(), strict=True)
        for sequence, (token, *logprobs) in zip(sequences, drawn, strict=True):
            sequence.response_ids.append(int(token))
            sequence.logprobs.append(logprobs[0])
            sequence.policy_logprobs.append(logprobs[1])
            sequence.raw_logprobs.append(logprobs[2])
            self._check_end(sequence)
        self._overheard(sequences)
        self._heed(int(last_column[0]))

    def hold(self) -> None:
        """Draw nothing until the rank that owns the output goes on, or gives up; the others ask it again and again, so that no
        collective waits for as long as that takes."""
        while self.paused:
            time.sleep(HELD_S)
            self._heed(self.stage.agreed(self._state()))

    def _heed(self, state: int) -> None:
        self.paused = state == PAUSED
        if state == ABORTED:
            self.scheduler.give_up()

    def _check_end(self, sequence: SequenceState) -> None:
        if sequence.response_ids[-1] in self._stops or (self._tail and self._stop_string(sequence)):
            sequence.finish = "stop"
        elif len(sequence.response_ids) >= sequence.most_tokens:
            sequence.finish = "length"

    def _stop_string(self, sequence: SequenceState) -> bool:
        # A token is at least one byte, so the last `tail` tokens hold any stop string that just ended.
        text = self._decode(sequence.response_ids[-(self._tail * 4 + 1) :])
        return any(stop in text for stop in self.sampling.stop)


def prompt_row(prompts: list[list[int]], align: Alignment) -> MicroBatch:
    """Return prompts as a row of the one packer, with nothing trained."""
    values = torch.tensor([token for prompt in prompts for token in prompt])
    ends = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    return pack(values, ends, torch.zeros(len(values), dtype=torch.bool), range(len(prompts)), align)
