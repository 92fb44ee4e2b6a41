"""`.metadata` is a pickle, and a pickle is a program: here it can name the classes of checkpoint metadata, no others."""

from __future__ import annotations

import io
import pickle
from enum import EnumMeta
from typing import Any

_NAMES = {
    "torch": "Size float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # core keeps the plans of its ranks there
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "collections": "OrderedDict",
    "builtins": "getattr",  # by which Python before 3.11.4 writes members of enums; stands for a look-up of these alone
}
ADMITTED = frozenset((module, name) for module, names in _NAMES.items() for name in names.split())


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint's metadata needs")
        return EnumMeta.__getitem__ if name == "getattr" else super().find_class(module, name)


def unpickle(data: bytes) -> Any:
    """Return the objects of a pickle that names nothing but `ADMITTED`.

    Raises pickle.UnpicklingError for any other name, before it is looked up, and whatever damaged data leads to.
    """
    return _Restricted(io.BytesIO(data)).load()
