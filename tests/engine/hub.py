"""transformers keeps a layer's experts in two tensors; on disk each expert has its own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def hub_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters, or their gradients, under the names that files have."""
    out = {}
    for name, tensor in named:
        if name.endswith(".experts.gate_up_proj"):
            for e, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith(".experts.down_proj"):
            for e, down in enumerate(tensor):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            out[name] = tensor
    return out
