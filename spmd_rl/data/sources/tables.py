"""The door to pyarrow and datasets: rows of Parquet and Arrow files, of saved datasets and of the Hugging Face hub.

Columns that nothing needs are not read, and what is read becomes Python objects a few rows at a time.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spmd_rl.data.sources.row import BadRows, Row

_ROWS_AT_ONCE = 1024


def read_parquet(
    file: Path, bad: BadRows, columns: frozenset[str] | None, notes: list[str], images: str = ""
) -> Iterator[Row | None]:
    """Rows of a Parquet file; None for each that cannot be read (where a row group is damaged, for the rest of it)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        schema, _ = parquet.schema_arrow, parquet.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{file}: not a whole Parquet file ({_first_line(error)}); copy or make it again") from error
    with parquet:
        wanted = _readable(schema, columns, str(file), notes, images)
        before = 0
        for group in range(parquet.num_row_groups):
            given, there = 0, parquet.metadata.row_group(group).num_rows
            try:
                for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=wanted):
                    for row in _rows(batch, str(file), before + given, bad, images):
                        given += 1
                        yield row
            except (pa.ArrowException, OSError) as error:
                first, last = before + given, before + there - 1
                bad.met(f"{file}, rows {first} to {last}: damaged ({_first_line(error)})", there - given)
                yield from [None] * (there - given)
            before += there


def read_arrow(
    file: Path, bad: BadRows, columns: frozenset[str] | None, notes: list[str], images: str = ""
) -> Iterator[Row | None]:
    """Rows of an Arrow file, of the stream format (what `datasets` writes) or the file format (Feather 2)."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as content:
        if content.size() == 0:
            return
        try:
            start = content.read(6)
            content.seek(0)
            if start == b"ARROW1":
                opened = pa.ipc.open_file(content)
                batches: Iterable[Any] = (opened.get_batch(i) for i in range(opened.num_record_batches))
            else:
                batches = opened = pa.ipc.open_stream(content)
            wanted = _readable(opened.schema, columns, str(file), notes, images)
            before = 0
            for batch in batches:
                yield from _rows(_checked(batch.select(wanted)), str(file), before, bad, images)
                before += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not a whole Arrow file ({_first_line(error)}); copy or make it again") from error


def is_saved_dataset(directory: Path) -> bool:
    """Return True for a directory that `datasets.save_to_disk` wrote."""
    return (directory / "state.json").is_file() or (directory / "dataset_dict.json").is_file()


def read_saved(
    directory: Path, split: str | None, bad: BadRows, columns: frozenset[str] | None, notes: list[str], images: str = ""
) -> Iterator[Row | None]:
    """Rows of what `datasets.save_to_disk` wrote."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise ValueError(f"{directory}: datasets cannot read it ({_first_line(error)}); save it again") from error
    yield from _dataset_rows(_split_of(saved, split, str(directory)), str(directory), bad, columns, notes, images)


def read_hub(
    name: str,
    subset: str | None,
    split: str | None,
    bad: BadRows,
    columns: frozenset[str] | None,
    notes: list[str],
    images: str = "",
) -> Iterator[Row | None]:
    """Rows of a dataset on the Hugging Face hub, from the library's cache where it has been loaded before."""
    import datasets

    if os.environ.get("LOCAL_RANK", "0") != "0":
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise ValueError(
            f"{name}: neither on this machine nor loaded from the Hugging Face hub ({_first_line(error)}); name a file "
            "or directory that is there, or load it once where there is a network and set HF_HOME to its cache"
        ) from error
    yield from _dataset_rows(_split_of(loaded, split, name), name, bad, columns, notes, images)


def _split_of(loaded: Any, split: str | None, name: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    if split in loaded:
        return loaded[split]
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    raise ValueError(
        f"{name}: it has the splits {', '.join(loaded)}"
        + (f", not {split}" if split is not None else "")
        + "; set split in a dataset file, as in configs/datasets/gsm8k.yaml"
    )


def _dataset_rows(
    dataset: Any, name: str, bad: BadRows, columns: frozenset[str] | None, notes: list[str], images: str = ""
) -> Iterator[Row | None]:
    import pyarrow as pa

    wanted = _readable(dataset.features.arrow_schema, columns, name, notes, images)
    before = 0
    # As Arrow tables: nothing is decoded, an image least of all.
    for table in dataset.select_columns(wanted).with_format("arrow").iter(_ROWS_AT_ONCE):
        for batch in table.to_batches():
            try:
                _checked(batch)
            except pa.ArrowInvalid as error:
                raise ValueError(f"{name}: damaged ({_first_line(error)}); copy or make it again") from error
            yield from _rows(batch, name, before, bad, images)
            before += batch.num_rows


def _readable(schema: Any, columns: frozenset[str] | None, name: str, notes: list[str], images: str = "") -> list[str]:
    """Columns to read: of those asked for ("a.b" is inside a), all that are no binary data.

    Where one that is asked for is not there, all: whoever misses it says what there is instead.
    """
    repeated = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if repeated:
        raise ValueError(f"{name}: {repeated[0]} names two columns; rename one")
    wanted = set(schema.names)
    if columns is not None:
        found = {column if column in wanted else column.split(".")[0] for column in columns}
        wanted = found if found <= wanted else wanted
    # Some writers leave out that bytes are text; a column that is asked for by name is.
    named = columns or frozenset()
    binary = [
        field.name
        for field in schema
        if field.name in wanted and _holds_bytes(field.type) and not (field.name in named and not field.type.num_fields)
        if field.name != images
    ]
    if binary:
        notes.append(f"{name}: {', '.join(binary)} holds binary data (such as images), which is not kept")
    return [column for column in schema.names if column in wanted and column not in binary]


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _checked(batch: Any) -> Any:
    """The batch; ArrowInvalid where its buffers do not fit together: reading a value would end the process.

    Text that is not UTF-8 passes: which row it is in is found out later.
    """
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
    return batch


def _rows(batch: Any, name: str, first: int, bad: BadRows, images: str = "") -> Iterator[Row | None]:
    """`images`: a column whose bytes stay what they are."""
    if images in batch.schema.names and _holds_bytes(batch.schema.field(images).type):
        shown = batch.column(images).to_pylist()
        for rest, one in zip(_rows(batch.drop_columns([images]), name, first, bad), shown, strict=True):
            yield None if rest is None else rest | {images: one}
        return
    convert = any(not _is_plain(kind) for kind in batch.schema.types)
    try:
        rows = batch.to_pylist()
        rows = [_plain(row) for row in rows] if convert else rows
    except (ValueError, OverflowError):
        rows = None
    if rows is not None:
        yield from rows
        return
    # Row by row, to know which.
    for number in range(batch.num_rows):
        row: Row = {}
        try:
            for column in batch.schema.names:
                row[column] = _plain(batch.column(column)[number].as_py())
        except (ValueError, OverflowError) as error:
            what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else _first_line(error)
            bad.met(f"{name}, row {first + number}, column {column}: {what}")
            yield None
        else:
            yield row


def _is_plain(kind: Any) -> bool:
    """Return True where JSON can spell all values of the type."""
    import pyarrow as pa

    if kind.num_fields:
        return not pa.types.is_map(kind) and all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _plain(value: Any) -> Any:
    """Values as JSON has them: dates, times and decimals as text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.decode()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
