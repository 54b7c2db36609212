"""Rows of .jsonl, .json and .csv files, each error with its file and line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """The rows of a .jsonl, .json (a list of objects) or .csv file (first line: the columns)."""
    readers: dict[str, Callable[[Path], list[Row]]] = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    if file.suffix not in readers:
        raise ValueError(f"{file}: prompts are read from {', '.join(readers)} files; convert it to one of these")
    try:
        rows = readers[file.suffix](file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; name an existing file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error}); convert it") from error
    if not rows:
        raise ValueError(f"{file}: there is no row in it")
    return rows


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(_parse(line.rstrip(), file, number), f"{file}, line {number}"))
    return rows


def _read_json(file: Path) -> list[Row]:
    content = _parse(file.read_text(encoding="utf-8-sig"), file, 1)
    if not isinstance(content, list):
        raise ValueError(f"{file}: expected a list of objects, found {type(content).__name__}")
    return [_object(element, f"{file}, element {number}") for number, element in enumerate(content)]


def _read_csv(file: Path) -> list[Row]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, restkey="", restval=None)
        rows = []
        for row in reader:
            if "" in row or None in row.values():
                columns = ", ".join(reader.fieldnames or [])
                raise ValueError(f"{file}, line {reader.line_num}: not one value for each column ({columns})")
            rows.append(row)
    return rows


def _parse(text: str, file: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{file}, line {line}, column {error.colno}: not valid JSON: {error.msg}") from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with columns, found {type(value).__name__}")
    return value
