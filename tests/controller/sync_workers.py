"""Ranks that serve weights, and a rollout's process that takes them, with no model but the weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.engine_work import MODELS
from quintet.cluster.worker import Place, Worker
from quintet.engine.weights.shards import Shard, shard_fingerprints
from quintet.models.mcore import whole_box
from quintet.rollout.base import WANTED, WeightSource
from quintet.rollout.vllm.weights import check, combine
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer
from quintet.sync.server import ReceiverSpec, Served, WeightServer
from quintet.sync.wire import Ticket
from tests.patience import BUSY
from tests.rollout.vllm.test_weights import make, weights_of


class Serving(Worker):
    """A rank that trains: it holds every other tensor, and hands them out."""

    def setup(self) -> None:
        super().setup()
        self.plans = 0
        self._seed = 0
        self._indexer = RankIndexer()
        shape, device = MODELS["tiny"].shape, torch.device("cpu")
        self._server = WeightServer(self._shards, shape, torch.float32, device, 0.25, timeout_s=20.0 * BUSY)

    def _shards(self) -> list[Shard]:
        held = list(weights_of(self._seed).items())[self.rank :: self.world_size]
        return [Shard(name, tuple(t.shape), whole_box(t.shape), t) for name, t in held]

    def plan_sync(self, specs: list[ReceiverSpec]) -> list[Ticket]:
        self.plans += 1
        return self._server.plan(specs)

    def serve(self) -> Served:
        return self._server.serve()

    def fingerprints(self) -> RankFingerprints:
        shards = self._shards()
        return self._indexer.tell(shard_fingerprints(shards), {one.name: one.shape for one in shards})

    def planned(self) -> int:
        return self.plans


class Taking(Worker):
    """A rollout whose `tp` devices learn what they need from loading it: one device needs everything."""

    @property
    def rollout(self) -> Taking:
        """What the verbs of a rollout are asked of."""
        return self

    def __init__(self, place: Place, tp: int) -> None:
        super().__init__(place)
        self.held = [make(rank, tp)[1] for rank in range(tp)]
        self.asked, self.bytes = 0, [0] * tp
        self._indexer = RankIndexer()

    def setup(self) -> None:
        import torch._dynamo  # noqa: F401  (as in vLLM's processes: seconds, which the first weights would wait for)

    def receivers(self) -> list[bytes | None]:
        self.asked += 1
        wanted = [one.wanted() for one in self.held]
        return [None if one is None else WANTED.dump(one) for one in wanted]

    def update_weights(self, source: WeightSource) -> None:
        with ThreadPoolExecutor(len(self.held)) as pool:
            taken = list(pool.map(lambda n: self.held[n].take(source.batches(n)), range(len(self.held))))
        check(taken)
        self.bytes = [one.bytes for one in taken]

    def fingerprints(self) -> RankFingerprints:
        prints, unreadable = combine([one.read() for one in self.held])
        return self._indexer.tell(prints, unreadable=unreadable)

    def told(self) -> tuple[int, list[int]]:
        """How often it was asked what it needs, and the bytes that each device got last."""
        return self.asked, self.bytes
