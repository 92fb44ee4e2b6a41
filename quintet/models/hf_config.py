"""Hugging Face JSON files as typed values: what a user's file has wrong is said by file, key and expectation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.models.shape import LARGEST

MOST_BYTES = 8 << 20
_NEEDED: Any = object()


def read_json(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises UserError naming the file when it cannot be read, is too large, not UTF-8, not JSON, or no object.
    """
    try:
        with file.open("rb") as f:
            data = f.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UserError(
                f"{file}: larger than {most_bytes >> 20} MiB, which no such file is; download it again"
            )
        data = json.loads(data.decode())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text; expected a JSON object") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file} line {error.lineno}: not valid JSON ({error.msg}); copy it anew") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; expected a JSON object") from None
    except ValueError:  # more digits than Python reads
        raise UserError(f"{file}: a number in it has thousands of digits; download it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a JSON object")
    return data


class HfConfig:
    """A JSON object read key by key. A key that is null counts as absent, as in transformers.

    Every reader raises UserError naming file, key and what was expected; without a default, a key is needed.
    """

    def __init__(
        self,
        data: dict[str, Any],
        where: str = "config.json",
        prefix: str = "",
        spelling: dict[str, str] | None = None,
    ) -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self._spelling = spelling or {}

    def spelled(self, **keys: str) -> HfConfig:
        """Return the same object for those who know its keys by other names: spelled(num_hidden_layers="n_layer") reads n_layer
        where num_hidden_layers is asked for, and errors name n_layer."""
        return HfConfig(self.data, self.where, self.prefix, self._spelling | keys)

    def has(self, key: str) -> bool:
        return self.data.get(self._own(key)) is not None

    def _own(self, key: str) -> str:
        """The file's name for a key."""
        return self._spelling.get(key, key)

    def wrong(self, key: str, expected: str) -> UserError:
        """Return the error of a key that is not as expected, to be raised."""
        key = self._own(key)
        shown = json.dumps(self.data.get(key), default=str)
        shown = shown if len(shown) <= 60 else shown[:57] + "…"
        return UserError(f"{self.where}: {self.prefix}{key} is {shown}; expected {expected}")

    def whole(self, key: str, default: int = _NEEDED, most: int = LARGEST) -> int:
        """Return the whole number of a key, greater than 0, `most` at most."""
        return self._number_from(1, key, default, most, "a whole number greater than 0")

    def count(self, key: str, default: int = _NEEDED, most: int = LARGEST) -> int:
        """Return the whole number of a key, 0 or more, `most` at most."""
        return self._number_from(0, key, default, most, "a whole number, 0 or more")

    def _number_from(self, least: int, key: str, default: int, most: int, expected: str) -> int:
        value: int = self._get(key, default, expected, lambda value: _is_whole(value, least))
        if value > most:
            raise self.wrong(key, f"at most {most:,}")
        return value

    def counts(self, key: str) -> list[int]:
        """Return the list of whole numbers of a key, 0 or more; empty when absent."""
        return self._get(key, [], "a list of whole numbers, such as [0, 1]", _lists(_is_whole))

    def number(self, key: str, default: float = _NEEDED) -> float:
        """Return the finite number of a key, greater than 0."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value <= sys.float_info.max

        return float(self._get(key, default, "a number greater than 0", fits))

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, "true or false", _is(bool))

    def text(self, key: str, default: str) -> str:
        return self._get(key, default, "text", _is(str))

    def texts(self, key: str) -> list[str]:
        """Return the list of text of a key; empty when absent."""
        return self._get(key, [], 'a list of text, such as ["…"]', _lists(_is(str)))

    def section(self, key: str) -> HfConfig:
        """Return the object of a key; empty when absent."""
        value = self._get(key, {}, "an object, such as {…}, or null", _is(dict))
        return HfConfig(value, self.where, f"{self.prefix}{self._own(key)}.")

    def token_ids(self, key: str) -> list[int]:
        """Return the token ids of a key, which holds one or a list of them; empty when absent."""
        several = _lists(_is_whole)
        value = self._get(
            key, [], "a token id or a list of token ids", lambda value: _is_whole(value) or several(value)
        )
        return value if isinstance(value, list) else [value]

    def _get(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        own = self._own(key)
        value = self.data.get(own)
        if value is None:
            value = default
        if value is _NEEDED:
            raise UserError(f"{self.where}: key {self.prefix}{own} is missing; expected {expected}")
        if not fits(value):
            raise self.wrong(key, expected)
        return value


def _is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number, which true and false are not."""
    return type(value) is int and value >= least


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _lists(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def read_end_ids(path: Path) -> list[int]:
    """Return `eos_token_id` of a Hugging Face directory's generation_config.json; empty without the file or the key.

    Chat models end a turn with other tokens than the tokenizer's one end-of-sequence token (Llama 3: `<|eot_id|>`
    and `<|end_of_text|>`), and list them there.
    """
    file = Path(path) / "generation_config.json"
    return HfConfig(read_json(file), str(file)).token_ids("eos_token_id") if file.is_file() else []
