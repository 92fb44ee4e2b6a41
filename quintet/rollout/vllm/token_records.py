"""What vLLM's workers write down of a request's tokens, on its way out of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quintet.errors import QuintetError
from quintet.typed import Typed

LOGPROBS, ROUTES = "logprobs", "routes"
TokenRecords = dict[str, np.ndarray]
"""Of one request, a row a token that was computed. logprobs: of the token drawn from there, fp32 [tokens], which says nothing where none was;
routes: [tokens, layers with experts, top-k], uint8 or int16."""
ASKS = {"token_records": True}
"""Of vLLM's SamplingParams the `extra_args` of a request that wants this."""
_TYPES = ("float32", "int16", "uint8")


def asks(params: Any) -> bool:
    """Return whether a request with these SamplingParams of vLLM wants what is written down of it."""
    return params is not None and bool((params.extra_args or {}).get("token_records"))


class RecordsByRequest:
    """`TokenRecords` by request as bytes, in place of `Typed`: numbers as they lie in memory behind a line of JSON, for they are many."""

    what = "the records of tokens"
    _head: Typed[dict[str, dict[str, tuple[str, list[int]]]]] = Typed(
        dict[str, dict[str, tuple[str, list[int]]]], what
    )

    def dump(self, value: Mapping[str, TokenRecords]) -> bytes:
        """Return the bytes of these records."""
        head = {
            name: {what: (one.dtype.name, list(one.shape)) for what, one in records.items()}
            for name, records in value.items()
        }
        arrays = [np.ascontiguousarray(one).data for records in value.values() for one in records.values()]
        return b"".join(
            [self._head.dump(head), b"\n", *(one.cast("B") if one.nbytes else b"" for one in arrays)]
        )

    def load(self, data: bytes, source: str) -> dict[str, TokenRecords]:
        """Return the records. Raises QuintetError naming `source`, where it came from, for anything else."""
        line, _, numbers = data.partition(b"\n")
        start, out = 0, {}
        for name, records in self._head.load(line, source).items():
            out[name] = found = TokenRecords()
            for what, (dtype, shape) in records.items():
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
