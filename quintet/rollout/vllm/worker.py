"""What runs inside vLLM's worker processes: its methods are called by `collective_rpc`.

vLLM mixes it into its own worker class, with what else `extension` has. One worker is one receiver of weights.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.errors import UserError
from quintet.rollout.base import Wanted, opened
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.adapters import LoraSlots, pieces_on_disk
from quintet.rollout.vllm.reload import Loading, load_again, models_of
from quintet.rollout.vllm.routes import Listener
from quintet.rollout.vllm.token_records import TokenRecords
from quintet.rollout.vllm.token_store import TokenStore
from quintet.rollout.vllm.weights import LoadReport, Reading, Weights
from quintet.rollout.vllm.worker_models import WorkerModels


class WeightWorker:
    """A class mixed into vLLM's worker: takes weights and tells what it has. Its names are apart from the worker's own."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device
    _store: Listener | TokenStore

    def take_weights(self, source: str) -> LoadReport:
        """Take what the source of these words has for this worker (its rank among tp · pp is the receiver's number). See
        `weights.check`."""
        batches = opened(source).batches(self.rank)
        try:
            taken = self._held.take(batches)
        finally:
            if isinstance(batches, Generator):
                batches.close()  # early, which tells the sender
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken

    def read_fingerprints(self) -> Reading:
        """Return fingerprints of the live weights of this worker. See `weights.combine`."""
        return self._held.read()

    def wanted_weights(self) -> list[Wanted] | None:
        """Return the parts of tensors that this worker takes: see `Weights.wanted`."""
        return self._held.wanted()

    def begin_to_draft(self) -> None:
        """Prepare what vLLM does wrong with drafts. Raises UserError where it speculates in no way, SyncMismatch where a model was to draft and
        there is none."""
        if self.vllm_config.speculative_config is None:
            raise UserError("vLLM was to draft, and has left that out of its settings without a word")
        self._models()
        compat.draft_at_temperature()

    def listen_for_routes(self) -> None:
        """Begin to write down the experts of the tokens of requests that ask for them, on a CPU: see `routes`."""
        runner = self.model_runner
        self._store = compat.listen_to_routers(runner.get_model(), lambda layers: Listener(runner, layers))

    def keep_records(self) -> None:
        """Keep what is written down of the tokens of requests under way, which are about to be read anew."""
        store = getattr(self, "_store", None)
        if isinstance(store, TokenStore):
            store.keep()

    def take_records(self, requests: list[str]) -> dict[str, TokenRecords]:
        """Return what is written down of the tokens of requests that are done, by the names that they were added by."""
        return self._store.take(requests)

    def forget_records(self, requests: list[str]) -> None:
        """Forget what is written down of requests that were given up."""
        self._store.forget(requests)

    def read_frozen(self) -> LoadReport:
        """Read the weights that adapters are beside, before these come."""
        held, config = self._held, self.vllm_config.model_config
        assert isinstance(held, LoraSlots)
        return held.read_frozen(pieces_on_disk(Path(config.model), config.dtype, self.device))

    @cached_property
    def _held(self) -> Weights | LoraSlots:
        models = self._models()
        weights = Weights(
            models, self._load_all, lambda name: models.drafter is None and self._only_drafts(name)
        )
        return weights if self.vllm_config.lora_config is None else LoraSlots(self._slots(), weights)

    def _slots(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    def _models(self) -> WorkerModels:
        return models_of(self.model_runner, self.vllm_config.speculative_config)

    def _only_drafts(self, name: str) -> bool:
        """Whether a Hugging Face name is of a layer for multi-token prediction."""
        layers = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return name.startswith("model.mtp_layers.") or (found is not None and int(found[1]) >= layers)

    def _load_all(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy, and with what is not its own the model that drafts."""
        from vllm.config import set_current_vllm_config

        config, models = self.vllm_config, self._models()
        slots = self._slots() if config.lora_config is not None else None
        drafts: list[tuple[str, Tensor]] = []

        def policy() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if models.drafter is not None and self._only_drafts(name):
                    drafts.append((name, tensor))
                else:
                    yield name if slots is None else compat.name_beside_adapters(slots, name), tensor

        loads: list[Loading] = [(models.policy, policy(), config.model_config)]
        if models.drafter is not None:
            loads.append((models.drafter, drafts, config.speculative_config.draft_model_config))
        with set_current_vllm_config(config):
            load_again(loads)
