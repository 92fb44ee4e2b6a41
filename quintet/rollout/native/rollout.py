"""The native back end: prefill and decode on the engine's model, in a layout of its own.

With the training layout it runs on the engine's own parameters; with another it holds a second model and takes
its weights shard by shard. All ranks that share requests (tp, pp) run the same schedule; sampled tokens come
from one of them, so they cannot part.

`generate` returns when all is done. What other threads may call meanwhile are `pause`, which holds it after its next token,
`resume`, and `abort`, which ends it at its next token. With several ranks the one that owns the output is asked, and the others
hear it with the tokens. What frees or changes weights or cache is refused while requests are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quintet.data.text_pieces import before_stop
from quintet.engine.layers.linear import packed_weights
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.weights.fingerprint import Fingerprints
from quintet.errors import UserError
from quintet.plan.rollout import PREFILL_TOKENS
from quintet.rollout.base import (
    Part,
    Request,
    Rollout,
    Sample,
    Sampling,
    Wanted,
    WeightSource,
    parts_of,
)
from quintet.rollout.native.cache import SlotCache
from quintet.rollout.native.generate_call import ABORTED, GOES_ON, PAUSED, GenerateCall
from quintet.rollout.native.routes import Routes
from quintet.rollout.native.scheduler import Scheduler, SequenceState
from quintet.rollout.native.stage import Stage
from quintet.rollout.native.weights import Weights


class NativeRollout(Rollout):
    """One rank of the native back end.

    slots: most sequences at once. decode: token ids → text, needed for stop strings and texts. update: what brings the
    engine's weights where both are in one process, and returns their bytes; with it weights stay on the device, for the
    engine owns them or fills them at any time. Without it the model is the rollout's own, and has no weights until a source
    brings them. return_routes: samples tell the chosen experts.
    """

    def __init__(
        self,
        model: PolicyModel,
        mesh: Mesh,
        *,
        slots: int,
        decode: Callable[[list[int]], str],
        update: Callable[[], int] | None = None,
        progress: Callable[[int], None] = lambda done: None,
        return_routes: bool = False,
    ) -> None:
        if return_routes and model.shape.moe is None:
            raise UserError(
                "rollout.return_routes=true: the model has no experts, so no routes; set it to false"
            )
        self.model, self.mesh, self.slots = model, mesh, slots
        self._decode, self._update, self._progress = decode, update, progress
        self._stage, self._weights = Stage(model, mesh), Weights(model, mesh, brought=update is None)
        self._return_routes = return_routes
        self.overheard: Callable[[list[SequenceState]], None] = lambda sequences: None
        """Told of the sequences that a token was just drawn for."""
        self._cache: SlotCache | None = None
        self._asleep: set[Part] = set()
        # Plain flags, each written by one thread at a time. Of several ranks those of the owner of the output count.
        self._under_way = self._paused = self._given_up = False

    @torch.no_grad()
    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Sample]]]:
        """Yield each request's responses as they finish, at the same token on every rank of the same dp rank: see
        `Rollout.stream`."""
        if not requests:
            return
        with self._computing("weights", "kv_cache"):
            scheduler = Scheduler(requests, sampling, self.slots, PREFILL_TOKENS)
            cache = self._cache_for(scheduler)
            routes = Routes(self.model, self.mesh) if self._return_routes else None
            run = GenerateCall(
                self._stage, scheduler, cache, sampling, decode=self._decode, state=self._state,
                progress=self._progress, overheard=self.overheard, routes=routes,
            )  # fmt: skip
            with packed_weights(self.model.decoder):
                while not scheduler.done:
                    if run.paused:
                        run.hold()
                    elif fresh := scheduler.admit():
                        run.prefill(fresh)
                    else:
                        run.decode()
                    run.retire()
                    for number in scheduler.take_finished():
                        sequences = scheduler.sequences[number]
                        samples = [self._sample(sequence, sampling) for sequence in sequences]
                        if routes is not None:
                            routes.tell(sequences, samples)
                        yield number, samples

    @torch.no_grad()
    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs (temperature 1, nothing cut) of every token but the first of each sequence; every rank gets them."""
        if not all(sequences):
            raise UserError("a sequence has no tokens: there is nothing to score")
        if not sequences:
            return []
        with self._computing("weights"):
            return self._stage.score(sequences, PREFILL_TOKENS)

    @contextmanager
    def _computing(self, *parts: Part) -> Iterator[None]:
        """Within it requests are under way. Raises RuntimeError when they cannot be."""
        self._idle("started")
        self._awake(*parts)
        if self._weights.undefined is not None:
            raise RuntimeError(
                f"the rollout has no weights, {self._weights.undefined}: update_weights() comes first"
            )
        self._given_up = False
        if self._stage.agreed(self._state()) == PAUSED:
            raise RuntimeError("the rollout is paused: resume() comes before more requests")
        self.model.eval()
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False

    def _awake(self, *parts: Part) -> None:
        away = [part for part in parts if part in self._asleep]
        if away:
            raise RuntimeError(
                f"the rollout's {' and '.join(away)} sleep: {', '.join(f'wake({part!r})' for part in away)} comes first"
            )

    def _idle(self, what: str) -> None:
        if self._under_way:
            raise RuntimeError(
                f"requests are under way, and nothing else can be {what}: abort() them first, and wait"
            )

    def _state(self) -> int:
        return ABORTED if self._given_up else PAUSED if self._paused else GOES_ON

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

    def _sample(self, made: SequenceState, sampling: Sampling) -> Sample:
        text = before_stop(self._decode(made.response_ids), sampling.stop)
        logprobs = (made.logprobs, made.policy_logprobs, made.raw_logprobs)
        return Sample(made.response_ids, *logprobs, made.finish, text, finished=made.finished)

    # weights

    def receivers(self) -> list[list[Wanted] | None]:
        """Return the parts that this rank's model holds; nobody takes weights where `update` brings them."""
        return [] if self._update is not None else [self._weights.wanted()]

    def update_weights(self, source: WeightSource | None = None) -> int:
        """Take new weights: from a source, or, with `update`, without one; bytes that `update` brought.

        Raises SyncMismatch naming a tensor that did not arrive whole: the weights are undefined until the next ones have.
        """
        self._idle("changed")
        self._awake("weights")
        if self._update is None and source is not None:
            self._weights.take(source)
            return 0
        if self._update is not None and source is None:
            return self._update()
        raise RuntimeError(
            f"this rollout's weights come {'from' if self._update is None else 'without'} a source"
        )

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return fingerprints of this rank's live weights; all can be read back."""
        self._awake("weights")
        return self._weights.fingerprints(), []

    # memory and requests

    def sleep(self, level: int) -> int:
        """Free the KV cache, and at levels 1 and 2 a model of the rollout's own: see `Rollout.sleep`."""
        self._idle("put to sleep")
        left = self._cache.nbytes if self._cache is not None else 0
        if level and "weights" not in self._asleep and self._update is None:
            left += self._weights.sleep(level)
        self._cache = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._asleep |= parts_of(level)
        return left

    def wake(self, part: Part) -> int:
        """Take memory again; the KV cache's when it is first needed. Harmless when awake."""
        sleeps = part == "weights" and part in self._asleep and self._update is None
        self._asleep.discard(part)
        return self._weights.wake() if sleeps else 0

    def pause(self) -> None:
        """Hold the call that is under way in another thread after its next token. None starts until `resume`: it is an error to
        try, for in one thread it would wait for ever."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def metrics(self) -> dict[str, float]:
        """Return {}: nothing is counted here."""
        return {}

    def abort(self) -> None:
        """End the call that is under way in another thread at its next token. Without one, nothing happens."""
        self._given_up = self._under_way
