"""Rows of a source: a file, a directory of files, or a dataset of the Hugging Face library."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from spmd_rl.config.source_names import FORMATS, is_hub_name
from spmd_rl.data.sources import tables, text_files
from spmd_rl.data.sources.row import BadRows, Located, Row


def read_rows(
    source: str,
    bad: BadRows,
    subset: str | None = None,
    split: str | None = None,
    columns: frozenset[str] | None = None,
    notes: list[str] | None = None,
    images: str = "",
) -> Iterator[Located]:
    """The rows of a file, of all files of a directory in order of their names, of a saved dataset, or of a hub dataset.

    split: of a directory, files that have the word in their name or folder; files have none. columns: what to read
    where that saves something; None: all. images: a column
    whose bytes are kept. Raises ValueError where the source cannot be read at all or has no row.
    """
    index = 0
    for file, rows in _parts(source, bad, subset, split, columns, notes if notes is not None else [], images):
        for number, row in enumerate(rows):
            if row is not None:
                yield Located(index, number, file, row)
            index += 1
    if not index:
        raise ValueError(f"{source}: there is no row in it")


def _parts(
    source: str,
    bad: BadRows,
    subset: str | None,
    split: str | None,
    columns: frozenset[str] | None,
    notes: list[str],
    images: str,
) -> Iterator[tuple[str, Iterator[Row | None]]]:
    """(file or dataset, its rows, None for one that cannot be read)."""
    readers: dict[str, Callable[[Path], Iterator[Row | None]]] = {
        ".jsonl": lambda file: text_files.read_jsonl(file, bad),
        ".json": lambda file: text_files.read_json(file, bad),
        ".csv": lambda file: text_files.read_csv(file, bad),
        ".parquet": lambda file: tables.read_parquet(file, bad, columns, notes, images),
        ".arrow": lambda file: tables.read_arrow(file, bad, columns, notes, images),
    }
    path = Path(source)
    if path.is_dir() and tables.is_saved_dataset(path):
        yield source, tables.read_saved(path, split, bad, columns, notes, images)
    elif path.is_dir():
        for file in files_of(path, split):
            yield str(file), _opened(file, readers[file.suffix])
    elif is_hub_name(source):
        yield source, tables.read_hub(source, subset, split, bad, columns, notes, images)
    elif path.suffix in readers:
        yield source, _opened(path, readers[path.suffix])
    else:
        raise ValueError(
            f"{source}: prompts are read from {', '.join(readers)} files, directories of them and hub datasets; "
            "convert it to one of these"
        )


def _opened(file: Path, reader: Callable[[Path], Iterator[Row | None]]) -> Iterator[Row | None]:
    try:
        yield from reader(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; name an existing file") from error


def files_of(directory: Path, split: str | None) -> list[Path]:
    """Files of a directory and those below that hold rows, in order; with `split`, those with it in their name."""
    found = sorted(
        file
        for file in directory.rglob("*")
        if file.suffix in FORMATS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )
    if not found:
        raise ValueError(f"{directory}: there is no {', '.join(FORMATS)} file in this directory; name another")
    if split is None:
        return found
    word = re.compile(rf"(?<![^\W_]){re.escape(split)}(?![^\W\d_])")
    chosen = [file for file in found if word.search(str(file.relative_to(directory)))]
    if not chosen:
        names = ", ".join(str(file.relative_to(directory)) for file in found[:5])
        raise ValueError(
            f"{directory}: no file in it has the split {split} in its name (it has {names}); name the file itself"
        )
    return chosen
