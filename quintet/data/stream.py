"""The endless order in which prompts are trained on, which a resumed run takes up where it was."""

from __future__ import annotations

import random
from typing import Any

from quintet.data.lengths import ResponseLengths
from quintet.data.prompts import Prompt, PromptSet
from quintet.errors import UserError


class PromptStream:
    """All prompts once an epoch, each epoch in its own order drawn from (seed, epoch).

    A `take` may span two epochs, and may then hold a prompt twice: group samples by their place in the step, not by
    `Prompt.id`.
    """

    def __init__(
        self, prompts: PromptSet, *, seed: int, shuffle: bool = True, lengths: ResponseLengths | None = None
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self.lengths = lengths or ResponseLengths()
        """Saved with the stream: who generates what follows from them."""

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            until = min(len(self._order), self._position + count - len(taken))
            taken += [self._prompts[i] for i in self._order[self._position : until]]
            self._position = until
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream as plain values, for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": len(self._prompts),
            "digest": self._prompts.fingerprint(),
            "response_tokens": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            UserError: the data, the seed or the shuffling is not what it was.
        """
        mine = self.state_dict()
        names = {
            "prompts": f"number of prompts in {self._prompts.name}",
            "digest": f"content of {self._prompts.name}",
            "seed": "run.seed",
            "shuffle": "data.shuffle",
        }
        for key, name in names.items():
            if key in state and state[key] != mine[key]:  # a checkpoint of before has another digest
                raise UserError(
                    f"cannot resume the order of prompts: {name} was {state[key]} and is now {mine[key]}; "
                    "restore it, or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self.lengths.load_state_dict(state.get("response_tokens", {}))  # a checkpoint of before has none
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"prompts/{self._seed}/{self._epoch}").shuffle(order)
        return order
