"""The native back end: prefill and decode on the engine's model, in a layout of its own.

With the training layout it runs on the engine's own parameters; with another it holds a second model and takes
its weights shard by shard. All ranks that share requests (tp, pp) run the same schedule; sampled tokens come
from one of them, so they cannot part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.head import VocabSlice, logits
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.row import MicroBatch, Row, pack
from quintet.packing import Alignment, alignment
from quintet.rollout.base import Request, Sample, Sampling
from quintet.rollout.native.cache import SlotCache
from quintet.rollout.native.sampler import draw, sample_seeds
from quintet.rollout.native.scheduler import Draft, Scheduler

PREFILL_TOKENS = 16384
"""Most prompt tokens in one prefill row."""


class NativeRollout:
    """One rank of the native back end.

    slots: most sequences at once. decode: token ids → text, needed for stop strings and texts.
    """

    def __init__(
        self,
        model: PolicyModel,
        mesh: Mesh,
        *,
        slots: int,
        decode: Callable[[list[int]], str],
        update: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.model, self.mesh, self.slots = model, mesh, slots
        self.update_weights = update
        self._decode, self._progress = decode, progress
        self._cache: SlotCache | None = None
        self._align = alignment(tp=mesh.sizes.tp, sp=model.config.sequence_parallel)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """Responses of each request, in order; every rank of the same dp rank gets them."""
        if not requests:
            return []
        self.model.eval()
        scheduler = Scheduler(requests, sampling, self.slots, PREFILL_TOKENS)
        cache = self._cache_for(scheduler)
        run = _Run(self, scheduler, cache, sampling)
        while not scheduler.done:
            fresh = scheduler.admit()
            if fresh:
                run.prefill(fresh)
            else:
                run.decode()
            run.retire()
        return [[self._sample(s, sampling) for s in row] for row in scheduler.sequences]

    def _cache_for(self, scheduler: Scheduler) -> SlotCache:
        slots, capacity = scheduler.most_active, -(-scheduler.capacity // 64) * 64
        if self._cache is None or not self._cache.fits(slots, capacity):
            config, self._cache = self.model.config, None
            self._cache = SlotCache(
                [layer.self_attention.core_attention.layer_number for layer in self.model.decoder.layers],
                slots,
                capacity,
                self.model.shape.kv_heads // self.mesh.sizes.tp,
                self.model.shape.head_dim,
                config.params_dtype,
                self.model.device,
            )
        return self._cache

    def _sample(self, draft: Draft, sampling: Sampling) -> Sample:
        text = self._decode(draft.response_ids)
        for stop in sampling.stop:
            text = text.split(stop)[0]
        return Sample(
            draft.response_ids, draft.logprobs, draft.policy_logprobs, draft.raw_logprobs, draft.finish, text
        )

    def forward(self, input_ids: Tensor, row: Row) -> Tensor | None:
        """Hidden states [T, hidden] on the last stage, passed from stage to stage; None before it."""
        pp, group = self.mesh.at("pp"), self.mesh.groups.pp
        if not self.mesh.first_stage:
            tokens = input_ids.shape[1] // (self.mesh.sizes.tp if self.model.config.sequence_parallel else 1)
            hidden = torch.empty(
                (tokens, 1, self.model.shape.hidden_size),
                dtype=self.model.config.params_dtype,
                device=self.model.device,
            )
            dist.recv(hidden, src=dist.get_global_rank(group, pp - 1), group=group)
            self.model.set_input_tensor(hidden)
        out = self.model(input_ids, row)
        if self.mesh.last_stage:
            return self.model.for_head(out)
        dist.send(out.contiguous(), dst=dist.get_global_rank(group, pp + 1), group=group)
        return None

    def share(self, picked: Tensor) -> Tensor:
        """What the owner of the output drew, on every rank of its dp rank."""
        group = self.mesh.groups.mp
        if group.size() > 1:
            owner = dist.get_global_rank(group, group.size() - self.mesh.sizes.tp)
            dist.broadcast(picked, src=owner, group=group)
        return picked


class _Run:
    """One `generate` under way: the rows it computes and the tokens it draws."""

    def __init__(
        self, rollout: NativeRollout, scheduler: Scheduler, cache: SlotCache, sampling: Sampling
    ) -> None:
        self.rollout, self.scheduler, self.cache, self.sampling = rollout, scheduler, cache, sampling
        self.device = rollout.model.device
        self._stops = set() if sampling.ignore_end else set(sampling.stop_token_ids)
        self._tail = max((len(s) for s in sampling.stop), default=0)
        seeds = torch.tensor([r.seed for r in scheduler.requests])
        self._seeds = {
            (r, k): seed
            for r, request in enumerate(scheduler.requests)
            for k, seed in enumerate(sample_seeds(seeds[r], torch.arange(request.samples)).tolist())
        }
        self._done = 0

    def prefill(self, groups: list[list[Draft]]) -> None:
        """Compute new prompts, once each, keep them in their samples' slots, and draw first tokens."""
        prompts = [self.scheduler.requests[g[0].request].prompt_ids for g in groups]
        micro = _prompt_row(prompts, self.rollout._align)
        row = self.rollout.model.row(micro)
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
        row.cache = self.cache
        hidden = self.rollout.forward(micro.input_ids.to(self.device), row)
        fresh = [draft for group in groups for draft in group]
        self._draw(hidden, torch.tensor(last), fresh)

    def decode(self) -> None:
        """One token for every active sequence."""
        active = self.scheduler.active
        positions = torch.tensor([s.prompt_length + len(s.response_ids) - 1 for s in active])
        ids = torch.tensor([s.response_ids[-1] for s in active])
        total = self.rollout._align.row([1] * len(active))
        padding = total - len(active)
        if padding:
            ids = torch.cat((ids, ids.new_zeros(padding)))
        at = torch.cat((positions, positions.new_zeros(padding))) if padding else positions
        row = Row(qkv_format="thd")
        row.cos, row.sin = self.rollout.model.rotary(at.to(self.device))
        self.cache.decode(positions.to(self.device), int(positions.max()) + 1)
        row.cache = self.cache
        hidden = self.rollout.forward(ids[None].to(self.device), row)
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
            self.rollout._progress(self._done)

    def _draw(self, hidden: Tensor | None, rows: Tensor, drafts: list[Draft]) -> None:
        """Draw the next token of each draft from the hidden state at its row."""
        picked = torch.zeros((4, len(drafts)), dtype=torch.float64, device=self.device)
        if hidden is not None:
            model, mesh = self.rollout.model, self.rollout.mesh
            weight = model.head_weight()
            vocab = VocabSlice(len(weight), model.shape.vocab_size, mesh.groups.tp)
            z = logits(hidden.index_select(0, rows.to(self.device)), weight, vocab)
            z = z[:, : model.shape.vocab_size]
            seeds = torch.tensor([self._seeds[d.request, d.number] for d in drafts], device=self.device)
            at = torch.tensor([d.prompt_length + len(d.response_ids) for d in drafts], device=self.device)
            picked = torch.stack([x.double() for x in draw(z, self.sampling, seeds, at)])
        for draft, token, *logprobs in zip(drafts, *self.rollout.share(picked).tolist(), strict=True):
            draft.response_ids.append(int(token))
            draft.logprobs.append(logprobs[0])
            draft.policy_logprobs.append(logprobs[1])
            draft.raw_logprobs.append(logprobs[2])
            self._check_end(draft)

    def _check_end(self, draft: Draft) -> None:
        if draft.response_ids[-1] in self._stops or (self._tail and self._stop_string(draft)):
            draft.finish = "stop"
        elif len(draft.response_ids) >= draft.most_tokens:
            draft.finish = "length"

    def _stop_string(self, draft: Draft) -> bool:
        # A token is at least one byte, so the last `tail` tokens hold any stop string that just ended.
        text = self.rollout._decode(draft.response_ids[-(self._tail * 4 + 1) :])
        return any(stop in text for stop in self.sampling.stop)


def _prompt_row(prompts: list[list[int]], align: Alignment) -> MicroBatch:
    """Prompts as a row of the one packer, with nothing trained."""
    values = torch.tensor([token for prompt in prompts for token in prompt])
    ends = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    return pack(values, ends, torch.zeros(len(values), dtype=torch.bool), range(len(prompts)), align)
