"""Prompts prepared once: a Parquet file with token ids, and what they were made with."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.data_config import DataConfig
from spmd_rl.config.template_names import CHAT
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.pictures import Picture, pictures_of, write_picture
from spmd_rl.data.sources.questions import Question, Reading
from spmd_rl.data.sources.row import BadRows, Row
from spmd_rl.data.templates import Template, load_template
from spmd_rl.data.tokens import chat_template, fingerprint, text_fingerprint
from spmd_rl.models.family import Grid

_KEY = b"spmd_rl.prompts"
_VERSION = 1

Shown = tuple[tuple[Picture, ...], tuple[Grid, ...]]


@dataclass(frozen=True)
class Spelling:
    """Identify all that token ids depend on beside the text: the tokenizer and the template with its settings."""

    tokenizer: str
    """Fingerprint."""
    template: str
    """As data.template names it."""
    template_text: str
    """Fingerprint of its Jinja; of nothing for plain."""
    system: str | None
    enable_thinking: bool | None


@dataclass(frozen=True)
class Expectation:
    """A run's expectations of prepared prompts; None: it has none."""

    tokenizer: str
    chat_template: str
    """Fingerprint of the model's own."""
    template: Template | None
    system: str | None
    enable_thinking: bool | None


def spelling(tokenizer: Any, template: Template, system: str | None, enable_thinking: bool | None) -> Spelling:
    return Spelling(
        fingerprint(tokenizer),
        template.name,
        text_fingerprint("" if template.plain else template.text or chat_template(tokenizer)),
        system,
        enable_thinking,
    )


def expectation(data: DataConfig, tokenizer: Any) -> Expectation:
    return Expectation(
        fingerprint(tokenizer),
        text_fingerprint(chat_template(tokenizer)),
        None if data.template is None else load_template(data.template),
        data.system,
        data.enable_thinking,
    )


def is_prepared(source: str) -> bool:
    """Return True for a file that tools/preprocess_data.py made."""
    if Path(source).suffix != ".parquet" or not Path(source).is_file():
        return False
    import pyarrow.parquet as pq

    try:
        return _KEY in (pq.read_schema(source).metadata or {})
    except Exception:
        # Reading it as a raw file says what is wrong with it.
        return False


def write(file: Path, kept: Sequence[tuple[Question, str, list[int]]], spelled: Spelling) -> None:
    """Write questions with their rendered text and token ids, in order; their pictures into a directory beside it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    questions = [question for question, _, _ in kept]
    shown = {}
    if any(question.pictures for question in questions):
        beside = pictures_beside(file)
        beside.mkdir(exist_ok=True)
        names = [[f"{beside.name}/{write_picture(one, beside).name}" for one in q.pictures] for q in questions]
        shown["pictures"] = pa.array(names, pa.large_list(pa.string()))
        shown["grids"] = pa.array([question.grids for question in questions], pa.large_list(pa.list_(pa.int32())))
    table = pa.table(
        {
            "index": pa.array([question.index for question in questions], pa.int64()),
            "question": pa.array([question.text for question in questions], pa.large_string()),
            # Not "prompt": a copy of the file without its metadata must not be taken for a raw one.
            "rendered": pa.array([text for _, text, _ in kept], pa.large_string()),
            "prompt_ids": pa.array([ids for _, _, ids in kept], pa.large_list(pa.int32())),
            "prompt_tokens": pa.array([len(ids) for _, _, ids in kept], pa.int32()),
            "answer": pa.array([question.answer for question in questions], pa.large_string()),
            # Columns differ from row to row, which a table cannot hold.
            "row": pa.array(
                [json.dumps(question.row, ensure_ascii=False, default=str) for question in questions], pa.large_string()
            ),
        }
        | shown
    )
    meaning = json.dumps({"version": _VERSION} | asdict(spelled), ensure_ascii=False)
    partial = file.with_name(file.name + ".partial")
    pq.write_table(table.replace_schema_metadata({_KEY: meaning.encode()}), partial, compression="zstd")
    partial.replace(file)


def pictures_beside(file: Path) -> Path:
    """Return the directory of the pictures that the prompts of a prepared file show."""
    return file.with_suffix(".pictures")


def read(
    source: str, expected: Expectation, data: DataConfig, images: ImageReader | None
) -> tuple[list[Question], list[list[int]], Reading]:
    """Questions and their token ids; ValueError where they were made with another tokenizer or template.

    images: reads pictures; None: the model sees none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    reading = Reading(source, BadRows(data.bad_rows))
    questions: list[Question] = []
    ids: list[list[int]] = []
    try:
        with pq.ParquetFile(source) as file:
            spelled = _spelling(source, (file.schema_arrow.metadata or {})[_KEY])
            _compare(source, spelled, expected)
            seen = [name for name in ("pictures", "grids") if name in file.schema_arrow.names]
            if seen and images is None:
                raise ValueError(f"{source}: its prompts show pictures, and the model sees none; take one that sees")
            for batch in file.iter_batches(columns=["index", "question", "prompt_ids", "answer", "row", *seen]):
                for row in batch.to_pylist():
                    place, reading.rows = f"row {reading.rows} of {source}", reading.rows + 1
                    shown: Shown | None = ((), ())
                    if seen and images is not None:
                        shown = _shown(row, place, Path(source), images, reading.bad)
                    if shown is None:
                        continue
                    said = row["question"], row["answer"], json.loads(row["row"])
                    questions.append(Question(row["index"], place, "", *said, *shown))
                    ids.append(row["prompt_ids"])
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{source}: damaged ({(str(error) or 'no text').splitlines()[0]}); make it again") from error
    if not questions:
        raise ValueError(f"{source}: there is no row in it that can be used: {'; '.join(reading.bad.examples)}")
    if expected.template is None and spelled.template != CHAT:
        reading.notes.append(f"{source}: its prompts were prepared with the template {spelled.template}")
    return questions, ids, reading


def _shown(row: Row, place: str, file: Path, images: ImageReader, bad: BadRows) -> Shown | None:
    """Return the pictures of a row and their grids; None where they cannot be shown, which `bad` counts."""
    try:
        pictures = pictures_of(row["pictures"], file.parent)
        grids = images.grids(pictures)
    except (OSError, ValueError) as error:
        bad.met(f"{place}: {error}; a prepared file and the directory of its pictures go together")
        return None
    if grids != (before := tuple(map(tuple, row["grids"]))):
        raise ValueError(
            f"{place}: its pictures become {grids} patches (frames, rows, columns), and were {before} when it was "
            "prepared: data.image_min_pixels, data.image_max_pixels, the model's preprocessor_config.json or the files "
            "were others; prepare it again, or set them as they were"
        )
    return tuple(pictures), grids


def template_name(source: str) -> str:
    """Return the template that a prepared file's prompts were made with, as data.template names it."""
    import pyarrow.parquet as pq

    return _spelling(source, pq.read_schema(source).metadata[_KEY]).template


def _spelling(source: str, meaning: bytes) -> Spelling:
    said = json.loads(meaning)
    if said.pop("version") != _VERSION:
        raise ValueError(f"{source}: it was prepared by another version of spmd_rl; make it again")
    return Spelling(**said)


def _compare(source: str, spelled: Spelling, expected: Expectation) -> None:
    again = "prepare it again with tools/preprocess_data.py --model and this model, or name the raw file"
    if spelled.tokenizer != expected.tokenizer:
        raise ValueError(f"{source}: its token ids are another tokenizer's than model.path's; {again}")
    named = expected.template
    if named is None:
        if spelled.template == CHAT and spelled.template_text != expected.chat_template:
            raise ValueError(
                f"{source}: it was prepared with another chat template than the one in model.path now; {again}"
            )
    else:
        text = "" if named.plain else named.text
        text_now = expected.chat_template if text is None else text_fingerprint(text)
        if text_now != spelled.template_text or named.plain != (spelled.template == "plain"):
            raise ValueError(
                f"data.template = {named.name}: {source} was prepared with the template {spelled.template}, or with "
                "that one as it was before; leave data.template out, or prepare the file again"
            )
    for knob, stored, wanted in (
        ("system", spelled.system, expected.system),
        ("enable_thinking", spelled.enable_thinking, expected.enable_thinking),
    ):
        if wanted is not None and wanted != stored:
            raise ValueError(
                f"data.{knob} = {wanted!r}: {source} was prepared with {stored!r}; leave it out, or prepare the file "
                "again"
            )
