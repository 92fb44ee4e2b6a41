"""What vLLM's workers write down of a request's tokens, on its way out of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quintet.errors import QuintetError
from quintet.typed import Typed

LOGPROBS, ROUTES = "logprobs", "routes"
Told = dict[str, np.ndarray]
"""Of one request, a row a token that was computed. logprobs: of the token drawn from there, fp32 [tokens], which says nothing where none was;
routes: [tokens, layers with experts, top-k], uint8 or int16."""
ASKS = {"told": True}
"""Of vLLM's SamplingParams the `extra_args` of a request that wants this."""
_TYPES = ("float32", "int16", "uint8")


def asks(params: Any) -> bool:
    """Return whether a request with these SamplingParams of vLLM wants what is written down of it."""
    return params is not None and bool((params.extra_args or {}).get("told"))


class ToldByRequest:
    """`Told` by request as bytes, in place of `Typed`: numbers as they lie in memory behind a line of JSON, for they are many."""

    what = "what is told of requests"
    _head: Typed[dict[str, dict[str, tuple[str, list[int]]]]] = Typed(
        dict[str, dict[str, tuple[str, list[int]]]], what
    )

    def dump(self, value: Mapping[str, Told]) -> bytes:
        """Return the bytes of what is told."""
        head = {
            name: {what: (one.dtype.name, list(one.shape)) for what, one in told.items()}
            for name, told in value.items()
        }
        arrays = [np.ascontiguousarray(one).data for told in value.values() for one in told.values()]
        return b"".join(
            [self._head.dump(head), b"\n", *(one.cast("B") if one.nbytes else b"" for one in arrays)]
        )

    def load(self, data: bytes, source: str) -> dict[str, Told]:
        """Return what is told. Raises QuintetError naming `source`, where it came from, for anything else."""
        line, _, numbers = data.partition(b"\n")
        start, out = 0, {}
        for name, told in self._head.load(line, source).items():
            out[name] = found = Told()
            for what, (dtype, shape) in told.items():
                if dtype not in _TYPES or min(shape, default=0) < 0:
                    raise QuintetError(f"what came from {source} is not {self.what}: {dtype} {shape}")
                size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                piece = numbers[start : start + size]
                if len(piece) != size:
                    raise QuintetError(
                        f"what came from {source} is not {self.what}: it ends in {what} of {name}"
                    )
                found[what] = np.frombuffer(piece, dtype).reshape(shape)
                start += size
        return out
