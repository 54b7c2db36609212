"""Rows of .jsonl, .json and .csv files; each error with its file, line and column."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd_rl.data.sources.row import BadRows, Row

# Half of a character beyond U+FFFF: JSON can spell it alone, and no file or tokenizer can hold it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_jsonl(file: Path, bad: BadRows) -> Iterator[Row | None]:
    """An object a line; None for a line that cannot be read. Empty lines are no rows."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or (number == 1 and not line.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            try:
                text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, f"{file}, line {number}")
                where, suspect = f"{file}, line {number}", _SURROGATE.search(text) is not None
                yield _object(_parse(text.rstrip(), file, number), suspect, where)
            except ValueError as error:
                bad.met(str(error))
                yield None


def read_json(file: Path, bad: BadRows) -> Iterator[Row | None]:
    """A list of objects, or an object a line; None for an element that is none."""
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        raise ValueError(f"{file}, line {line}, byte {column}: not UTF-8 text; convert it") from error
    if not text.strip():
        return
    try:
        elements = _parse(text, file, 1)
    except ValueError:
        if text.lstrip().startswith("{") and "\n" in text.strip():
            yield from read_jsonl(file, bad)
            return
        raise
    if not isinstance(elements, list):
        raise ValueError(f"{file}: expected a list of objects, found {type(elements).__name__}")
    suspect = _SURROGATE.search(text) is not None
    for number, element in enumerate(elements):
        try:
            yield _object(element, suspect, f"{file}, element {number}")
        except ValueError as error:
            bad.met(str(error))
            yield None


def read_csv(file: Path, bad: BadRows) -> Iterator[Row | None]:
    """A row a record; the first line names the columns. None for a record that has not one value for each."""
    # The library's own limit of 128 KiB guards against files that are no CSV; a problem with a table can be longer.
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            columns = next(reader, [])
        except csv.Error as error:
            raise ValueError(f"{file}, line 1: not valid CSV: {error}") from error
        repeated = sorted({column for column in columns if columns.count(column) > 1})
        if repeated:
            raise ValueError(f"{file}, line 1: {repeated[0]} names two columns; rename one")
        while True:
            try:
                values = next(reader, None)
                if values is None:
                    return
                if values:
                    yield _record(columns, values, f"{file}, line {reader.line_num}")
            except (csv.Error, ValueError) as error:
                said = f"{file}, line {reader.line_num}: not valid CSV: {error}"
                bad.met(said if isinstance(error, csv.Error) else str(error))
                yield None


def _record(columns: list[str], values: list[str], where: str) -> Row:
    if len(values) != len(columns):
        raise ValueError(f"{where}: not one value for each column ({', '.join(columns)})")
    for column, value in zip(columns, values, strict=True):
        if not value.isascii() and not _is_text(value):
            raise ValueError(f"{where}, column {column}: not UTF-8 text")
    return dict(zip(columns, values, strict=True))


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}, byte {error.start + 1}: not UTF-8 text") from error


def _parse(text: str, file: Path, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{file}, line {line}, column {error.colno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {first_line}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"column {repeated} is given twice in one row")
    return row


def _object(value: Any, suspect: bool, where: str) -> Row:
    """The value, if it is a row; suspect: it may hold half a character."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with columns, found {type(value).__name__}")
    if suspect:
        for column, inner in value.items():
            if not _is_text(json.dumps(inner, ensure_ascii=False)):
                raise ValueError(f"{where}, column {column}: half of a character (\\ud800 to \\udfff) stands alone")
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
