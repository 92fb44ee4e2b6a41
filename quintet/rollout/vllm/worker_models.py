"""The models of one of vLLM's workers: the policy, and what drafts for it, if anything does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

DRAFTER = "draft:"
"""What names of the drafter's parts begin with. No module's name has a colon."""


class WorkerModels:
    """The models of one worker, whose parts go by one name each. What the drafter shares with the policy (vLLM gives it the
    policy's embedding and head) is the policy's alone."""

    def __init__(self, policy: nn.Module, drafter: nn.Module | None = None) -> None:
        self.policy, self.drafter = policy, drafter
        self._by_prefix = {"": policy} | ({} if drafter is None else {DRAFTER: drafter})

    def named_tensors(self, *, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, and every buffer where wanted, once, with its name. Loading may replace them."""
        seen = set[int]()
        for prefix, model in self._by_prefix.items():
            named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
            yield from ((prefix + name, tensor) for name, tensor in named if id(tensor) not in seen)
            seen.update(id(tensor) for _, tensor in named)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module once, with its name."""
        seen = set[nn.Module]()
        for prefix, model in self._by_prefix.items():
            for name, module in model.named_modules(memo=seen):
                yield prefix + name, module

    def owner(self, name: str) -> tuple[Any, str]:
        """Return the layer that a tensor belongs to, and its name there. Raises AttributeError where there is none."""
        model = self.policy
        if self.drafter is not None and name.startswith(DRAFTER):
            model, name = self.drafter, name.removeprefix(DRAFTER)
        path, _, attribute = name.rpartition(".")
        return model.get_submodule(path), attribute

    def drafter_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the drafter alone has, by name."""
        parameters = {name for name, _ in self.named_tensors(buffers=False)}
        return {
            name: tensor
            for name, tensor in self.named_tensors()
            if name.startswith(DRAFTER) and name not in parameters
        }
