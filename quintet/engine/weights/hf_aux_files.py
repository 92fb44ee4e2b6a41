"""What stands beside the weights of a Hugging Face directory: config.json, the tokenizer, generation defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from quintet.models import ModelShape
from quintet.models.dense import MTP_KEYS
from quintet.models.family import VALUE_MODEL
from quintet.models.hf_config import read_json

CHAT_TEMPLATE = "chat_template.jinja"

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
    "*.py",  # what auto_map names: without it, who trusts it could not read what was saved
)
"""Files that a saved model takes along, as patterns."""


_OF_SOURCE = ("torch_dtype", "quantization_config")
"""Keys of config.json that say how the weights are stored, where a model comes from."""


def saved_config(
    config: dict[str, Any], shape: ModelShape, dtype: torch.dtype, mtp_layers: int
) -> dict[str, Any]:
    """Return the config.json of a model saved as `dtype`, from that of the model it was made of. mtp_layers: layers for
    multi-token prediction that are saved with it."""
    saved = {key: value for key, value in config.items() if key not in _OF_SOURCE}
    saved["dtype"] = str(dtype).removeprefix("torch.")
    if not mtp_layers:
        saved |= {key: 0 for key in MTP_KEYS if saved.get(key)}
    if shape.head == "value":
        names = [name.replace("ForCausalLM", VALUE_MODEL) for name in config["architectures"]]
        saved |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    return saved


def copy_companions(source: Path, directory: Path) -> None:
    """Copy what stands beside the weights in `source`, config.json as well, to `directory`."""
    directory.mkdir()
    shutil.copyfile(source / "config.json", directory / "config.json")
    _copy(source, directory)


def write_companions(
    directory: Path, companions: Path, config: dict[str, Any], chat_template: str | None = None
) -> None:
    """Write config.json as given, and copies of what else stands beside the weights in `companions`. chat_template: what the tokenizer
    is to have instead of its own."""
    _copy(companions, directory)
    if chat_template is not None:
        write_chat_template(directory, chat_template)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_chat_template(directory: Path, template: str) -> None:
    """Give a tokenizer's directory a chat template in place of any that it has."""
    (directory / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    (directory / "chat_template.json").unlink(missing_ok=True)
    if (file := directory / "tokenizer_config.json").is_file():
        settings = {key: value for key, value in read_json(file).items() if key != "chat_template"}
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, directory: Path) -> None:
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
