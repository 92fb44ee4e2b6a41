"""Ranks that pack rows as FP8 needs them, and multiply as without it."""

from __future__ import annotations

from quintet.controller.worker import PolicyWorker


class Padded(PolicyWorker):
    """A rank whose engines are told of FP8, and whose layers are not: no CPU has these products."""

    def setup(self) -> None:
        from quintet.engine import fp8

        fp8.require = lambda fp8, backend: None  # for as long as the process lives
        fp8.fields = lambda fp8: {}
        super().setup()
