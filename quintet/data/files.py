"""Rows of a dataset with where each stands, from a jsonl, parquet or csv file, a `datasets` directory or the hub."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quintet.errors import UserError
from quintet.recipe.paths import HUB_NAME


class FileRow(NamedTuple):
    source: str
    """Where it stands, for messages: "prompts.jsonl:17"."""
    columns: dict[str, Any]


def read_rows(path: str, which: Literal["train", "eval", "sft"]) -> list[FileRow]:
    """Return all rows of a dataset.

    Args:
        path: a .jsonl, .parquet or .csv file, a directory made by `Dataset.save_to_disk`, or a hub name as "owner/name",
            "owner/name:split" or "owner/name:config:split".
        which: picks the split where the path does not: "train", or for "eval" the first of test, validation, eval.

    Raises:
        UserError: it is missing, empty or malformed; names the file, the line and what was expected.
    """
    key = f"data.{which}_path"
    local = Path(path).expanduser()
    if local.is_dir():
        rows = _from_disk(local, which, key)
    elif local.is_file():
        if (read := _READERS.get(local.suffix)) is None:
            raise UserError(f"{key}: {path} is neither a .jsonl nor a .parquet nor a .csv file")
        rows = list(read(local))
    elif HUB_NAME.fullmatch(path):
        rows = _from_hub(path, which, key)
    else:
        raise UserError(f"{key}: there is no file {path} (looked in {Path.cwd()})")
    if not rows:
        raise UserError(f"{key}: {path} is empty; expected one row a prompt")
    return rows


def from_jsonl(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a file with a JSON object a line. Raises UserError naming the line that is none."""
    # Cut at newlines only: str.splitlines would also cut at separators that may stand inside JSON strings.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            if b"\\ud" in line.lower():  # half of a pair is no text, and would be found where it is written
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from None
        except ValueError as error:
            shown = line[:60].decode(errors="replace")
            raise UserError(
                f"{where}: not valid JSON ({error}); expected one JSON object a line, got: {shown}"
            ) from None
        except RecursionError:
            raise UserError(f"{where}: JSON nested too deeply; expected one flat object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected a JSON object with one key a column, got {_json_type(row)}")
        yield FileRow(where, row)


def _from_csv(path: Path) -> Iterator[FileRow]:
    """Rows under the header that the first line is; a field in quotes may span lines."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(sys.maxsize)  # of 128 KiB: a long prompt is no mistake
            reader = csv.DictReader(file, strict=True)
            names, before = reader.fieldnames or (), 1
            if twice := [name for at, name in enumerate(names) if name and name in names[:at]]:
                raise UserError(f"{path}:1: the header names {twice[0]!r} twice; a row keeps one of the two")
            for row in reader:
                where, before = f"{path}:{before + 1}", reader.line_num
                if None in row or None in row.values():
                    raise UserError(
                        f"{where}: not as many fields as the header has ({', '.join(names)}); text with commas "
                        "stands in double quotes"
                    )
                yield FileRow(where, dict(row))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except csv.Error as error:
        raise UserError(f"{path}:{reader.reader.line_num}: not valid csv ({error})") from None


def _from_parquet(path: Path) -> Iterator[FileRow]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:  # also of a value that Python has nothing for, such as text that is no UTF-8
        raise UserError(f"{path}: not a readable parquet file ({error})") from error
    yield from _from_dataset(rows, str(path))


_READERS = {".jsonl": from_jsonl, ".parquet": _from_parquet, ".csv": _from_csv}


def _from_disk(path: Path, which: str, key: str) -> list[FileRow]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(
            f"{key}: {path} is a directory, but not one saved by datasets' save_to_disk ({error})"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_split(list(loaded), which, key, str(path))]
    return _from_dataset(loaded, str(path))


def _from_hub(path: str, which: str, key: str) -> list[FileRow]:
    import datasets

    name, *rest = path.split(":")
    config = rest[0] if len(rest) == 2 else None
    try:
        split = rest[-1] if rest else _split(datasets.get_dataset_split_names(name, config), which, key, path)
        loaded = datasets.load_dataset(name, config, split=split)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{key}: there is no file {path}, and reading it as a hub dataset failed: "
            f"{next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error
    return _from_dataset(loaded, path)


def _from_dataset(dataset: Iterable[Mapping[str, Any]], name: str) -> list[FileRow]:
    return [FileRow(f"{name}:row {i}", dict(row)) for i, row in enumerate(dataset, start=1)]


def _split(names: list[str], which: str, key: str, path: str) -> str:
    wanted = ["test", "validation", "eval"] if which == "eval" else ["train"]
    for name in wanted:
        if name in names:
            return name
    raise UserError(f"{key}: {path} has the splits {', '.join(names)}, but none of {', '.join(wanted)}")


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")
