"""The rollout protocol: what a generation back end is asked and what it answers."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from quintet.engine.weights.fingerprint import Fingerprints as Fingerprints
from quintet.models.mcore import Box
from quintet.recipe import schema
from quintet.typed import Typed

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Part = Literal["weights", "kv_cache"]
"""What a rollout keeps on its device, and can give up while others need the memory."""


def parts_of(level: int) -> set[Part]:
    """Return what sleeps at a level of `Rollout.sleep`."""
    return {"weights", "kv_cache"} if level else {"kv_cache"}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The sampling distribution is softmax(logits / temperature), cut by top-k, then top-p,
    then min-p, and renormalised. temperature 0 takes the largest logit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    """Go on past end-of-sequence to the full length (for benchmarks)."""

    @staticmethod
    def of(recipe: schema.Rollout, end_ids: Sequence[int], *, greedy: bool = False) -> Sampling:
        """Return the sampling of a recipe; `end_ids` are the tokenizer's end-of-sequence ids."""
        return Sampling(
            temperature=0.0 if greedy else recipe.temperature,
            top_p=recipe.top_p,
            top_k=recipe.top_k,
            min_p=recipe.min_p,
            max_response_tokens=recipe.max_response_tokens,
            stop=tuple(recipe.stop),
            stop_token_ids=tuple({*recipe.stop_token_ids, *end_ids}),
        )


@dataclass(frozen=True)
class Request:
    """One prompt, `samples` responses. `seed` keys the noise: sample k of a seed is the same whatever else is in
    the batch. `max_response_tokens` may limit each sample on its own."""

    prompt_ids: list[int]
    samples: int = 1
    seed: int = 0
    max_response_tokens: tuple[int, ...] | None = None

    def limits(self, sampling: Sampling) -> tuple[int, ...]:
        """Return the most tokens of each sample."""
        if self.max_response_tokens is None:
            return (sampling.max_response_tokens,) * self.samples
        return self.max_response_tokens


@dataclass
class Sample:
    """One response. Log-probs are of the sampled tokens: `logprobs` under the sampling distribution,
    `policy_logprobs` with the temperature but nothing cut (what the trainer computes again), `raw_logprobs` under the
    model's own (temperature 1, nothing cut). A back end that cannot tell the first or the last says None; the policy's are
    always there. `finish` is "stop" or "length", or "abort" of one that was given up."""

    response_ids: list[int]
    logprobs: list[float] | None
    policy_logprobs: list[float]
    raw_logprobs: list[float] | None
    finish: str
    text: str = field(default="")
    routes: np.ndarray | None = None
    """Chosen experts of a mixture-of-experts model where they are asked for, uint8 or int16 [tokens - 1, layers, top-k]: those of each
    token that was read, which is every token but the last, in no certain order. Layers are those with experts, in their
    order: layer 0 here is the first that has any."""
    finished: float = field(default=0.0, compare=False)
    """When its last token was there, by this process's `time.perf_counter`."""


@dataclass(frozen=True)
class Wanted:
    """A part of a Hugging Face tensor that a receiver takes: `box` of the tensor `name`."""

    name: str
    box: Box


WANTED: Typed[list[Wanted]] = Typed(list[Wanted], "what a receiver wants")


@dataclass(frozen=True)
class Piece:
    """A part of a Hugging Face tensor on its way to a rollout: `tensor` has the shape of `box`, `shape` is that of the whole.
    It is good only until the next pieces are asked for: who keeps it copies it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


class WeightSource(Protocol):
    """The source that a rollout gets new weights from, opened in the process that takes them."""

    def words(self) -> str:
        """Return the text that `opened` makes it of again in another process."""
        ...

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        """Yield all that the receiver of this number takes (its place in `Rollout.receivers`), once, in any order, as many pieces at a
        time as are there: they are good until the next list is asked for. Exhausting the iterator tells the sender that all has
        arrived; closing it early tells that it has not."""
        ...


SOURCE = "quintet.sync.source:ChannelSource"
"""The source that travels to other processes, of a room above this one."""


def opened(words: str) -> WeightSource:
    """Return the source of which these are the `WeightSource.words`. Raises QuintetError when they are something else."""
    source: WeightSource = pkgutil.resolve_name(SOURCE).of(words)
    return source


COUNTS = ("prefix_cache_queries", "prefix_cache_hits", "drafts", "draft_tokens", "accepted_tokens")
"""What a rollout may count: prompt tokens looked for in the prefix cache and found there; with speculation, drafts, the
tokens in them, and those of them that were accepted. Beside these, `accepted_at` of each place in a draft."""


def accepted_at(position: int) -> str:
    """Return the name under which a rollout counts drafts of which at least so many tokens, from 1, were accepted."""
    return f"accepted_at_{position}"


class Rollout(Protocol):
    """A generation back end; one process of it.

    Weights and KV cache are on the device, or asleep. Around new weights the order is: `pause` or `abort`, `sleep`, after
    levels 1 and 2 `wake("weights")`, `update_weights`, `wake("kv_cache")`, `resume`.
    """

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Sample]]]:
        """Yield each request's responses as soon as the last of them is there: its place among the requests, and these. Ranks
        that share requests (tp, pp) all get them. `pause`, `resume` and `abort` may come from another thread meanwhile."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """Return `stream`, waited for: responses of each request, in order."""
        rows: list[list[Sample]] = [[] for _ in requests]
        for number, samples in self.stream(requests, sampling):
            rows[number] = samples
        return rows

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs (temperature 1, nothing cut) of every token but the first of each sequence, given those before it."""
        ...

    def receivers(self) -> list[list[Wanted] | None]:
        """Return who takes weights in this process, one entry a device: the parts it wants, or None for whole tensors."""
        ...

    def update_weights(self, source: WeightSource) -> int:
        """Take new weights; bytes that came, 0 where the source counts them. What was computed with the old ones, the prefix
        cache, is forgotten; requests that are held go on from the tokens they have, whose log-probs stay those of the old ones."""
        ...

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return fingerprints of the live weights, of all receivers of this process; and the names of the tensors that cannot be
        read back, because the back end keeps them in another form: of those there may be fingerprints of what arrived. Two
        receivers that hold one part must agree, or it raises SyncMismatch."""
        ...

    def sleep(self, level: int) -> int:
        """Give memory up, and return its bytes, 0 where the back end cannot tell: level 0 the KV cache alone; 1 and 2 the weights too, which 1 copies to the host and 2 forgets.
        Harmless where that sleeps already."""
        ...

    def wake(self, part: Part) -> int:
        """Take memory again, and return its bytes. After level 2 the weights are undefined until `update_weights`."""
        ...

    def pause(self) -> None:
        """Hold requests that are under way, and start no others, until `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what was counted since the last call, under the names of `COUNTS` and `accepted_at`; {} of a back end that counts nothing."""
        ...

    def abort(self) -> None:
        """Give up requests that are under way: their samples end with finish "abort"."""
        ...
