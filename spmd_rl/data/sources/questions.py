"""Rows to questions: which columns ask and answer, and which rows are left out and why."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from spmd_rl.config.data_config import ArithmeticConfig, DataConfig, DatasetConfig
from spmd_rl.config.source_names import ARITHMETIC, REASONING_GYM, is_made
from spmd_rl.data.image_reader import PLACE, ImageReader, Shown
from spmd_rl.data.pictures import Picture
from spmd_rl.data.sources.arithmetic import make_problems
from spmd_rl.data.sources.messages import as_text, is_message, plain_text, with_suffix
from spmd_rl.data.sources.row import BadRows, Located, Row
from spmd_rl.data.sources.rows import read_rows
from spmd_rl.data.sources.tasks import make_task
from spmd_rl.data.templates import Template
from spmd_rl.data.tokens import Message
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.family import Grid


@dataclass(frozen=True)
class Question:
    """A row that asks something, before it is token ids."""

    index: int
    """Row in its source, from 0."""
    place: str
    """The same for a person: row and file."""
    content: str | list[Message]
    """Text (plain) or messages, as the template takes it."""
    text: str
    """The row's prompt, or the last message of a conversation."""
    answer: str
    row: Row
    """Columns for reward rules."""
    pictures: tuple[Picture, ...] = ()
    grids: tuple[Grid, ...] = ()
    """Of each picture."""


@dataclass
class Reading:
    """The outcome of the rows of a source."""

    source: str
    bad: BadRows
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows left out, those that cannot be used not among them (see `bad`)."""
    notes: list[str] = field(default_factory=list)

    def all_notes(self) -> list[str]:
        return self.bad.note(self.source) + self.notes


def read_questions(
    dataset: DatasetConfig,
    data: DataConfig,
    template: Template,
    seed: int,
    split: str,
    limit: int | None,
    images: ImageReader | None = None,
) -> tuple[list[Question], Reading]:
    """The questions of "train" or "eval", and what was left out; ValueError says what is wrong and which knob fixes it.

    limit: how many "eval" needs; only sources that are generated stop there. images: reads pictures; None: the
    model sees none.
    """
    reading = Reading(dataset.source, BadRows(data.bad_rows))
    if is_made(dataset.source):
        # Their columns are ours, whatever the other split's file calls its own.
        own = DatasetConfig(dataset.source, system=dataset.system, prompt_suffix=dataset.prompt_suffix)
        made = _made(dataset, data, seed, split, limit, reading.notes)
        located: Iterable[Located] = (Located(i, i, dataset.source, row) for i, row in enumerate(made))
        columns = Columns(own, data, template)
    else:
        columns = Columns(dataset, data, template, images)
        located = read_rows(
            dataset.source,
            reading.bad,
            dataset.subset,
            dataset.split if split == "train" else dataset.eval_split or dataset.split,
            columns.needed,
            reading.notes,
            dataset.image_column or "",
        )
    questions, seen = [], set()
    for one in located:
        reading.rows = one.index + 1
        try:
            if columns.dataset.deduplicate is not None:
                key = _key(columns.value(one, "deduplicate", columns.dataset.deduplicate))
                if key in seen:
                    reading.dropped["duplicate"] += 1
                    continue
                seen.add(key)
            questions.append(columns.question(one))
        except ValueError as error:
            reading.bad.met(str(error))
    if reading.dropped["duplicate"]:
        reading.notes.append(
            f"{reading.dropped['duplicate']} of {reading.rows} rows of {dataset.source} repeat an earlier "
            f"{dataset.deduplicate} and are left out"
        )
    if columns.lists:
        reading.notes.append(
            f"{columns.lists} of {reading.rows} rows of {dataset.source} have a list of several in "
            f"{columns.dataset.answer_column}: all of them together are the answer; {columns.dataset.answer_column}.0 "
            "is the first alone"
        )
    if not questions:
        raise ValueError(f"{dataset.source}: none of its rows can be used: {'; '.join(reading.bad.examples)}")
    if not columns.dataset.answer_column:
        return questions, reading
    return _without_empty_answers(columns, data, questions, reading), reading


def _made(
    dataset: DatasetConfig, data: DataConfig, seed: int, split: str, limit: int | None, notes: list[str]
) -> list[Row]:
    if dataset.source != ARITHMETIC:
        wanted = dataset.problems if split == "train" or limit is None else limit
        rows = make_task(dataset.source.removeprefix(REASONING_GYM), dataset.options, wanted, seed, split)
        if not rows:
            raise ValueError(f"{dataset.source}: with its options {dataset.options} it makes no problem for {split}")
        if len(rows) < wanted:
            notes.append(f"{dataset.source}: it makes only {len(rows)} different problems for {split}, not {wanted}")
        return rows
    spec = _arithmetic(dataset, data)
    wanted = spec.problems if split == "train" or limit is None else limit
    rows = make_problems(spec, wanted, seed, split)
    if not rows:
        raise ValueError(
            f"data.arithmetic.max_operand = {spec.max_operand}: its operands leave no problem for {split}; raise it"
        )
    distinct = len({(row["prompt"], row["answer"]) for row in rows})
    if distinct < len(rows):
        notes.append(
            f"data.arithmetic.problems = {wanted}: the operands allow {distinct} distinct problems beside the held-out "
            "ones, so they are repeated; raise data.arithmetic.max_operand for more"
        )
    if len(rows) < wanted:
        notes.append(
            f"data.eval_problems = {wanted}: only {len(rows)} problems are held out, about a quarter of what the "
            "operands allow; raise data.arithmetic.max_operand for more"
        )
    return rows


def _arithmetic(dataset: DatasetConfig, data: DataConfig) -> ArithmeticConfig:
    """data.arithmetic, and what a dataset's file says instead of it."""
    known = {field.name for field in fields(ArithmeticConfig)}
    if unknown := [name for name in dataset.options if name not in known]:
        raise ValueError(f"{dataset.source}: it has no option {', '.join(unknown)}; there are {', '.join(known)}")
    return replace(data.arithmetic, **dataset.options)


class Columns:
    """The columns of one source, as its rows are read."""

    def __init__(self, dataset: DatasetConfig, data: DataConfig, template: Template, images: ImageReader | None = None):
        self.dataset, self.template, self.images, self.prefix = dataset, template, images, data.prefix
        self.system = dataset.system if data.system is None else data.system
        if template.plain and self.system is not None:
            met = f"it has no place for the system message {self.system!r}"
            way = "leave that out, or set the template to chat"
            raise ConfigError(Problem(f"{data.prefix}template", "plain", met, way))
        self.pattern = None if dataset.answer_pattern is None else compiled_pattern(dataset.answer_pattern)
        self.lists = 0
        """Rows whose answer is a list of several."""
        self.taken_out = str.maketrans("", "", dataset.answer_without)
        used = [dataset.prompt_column, dataset.query_column, dataset.answer_column or None, dataset.system_column]
        used += [dataset.deduplicate, dataset.image_column]
        self.needed = (
            None
            if dataset.extra_columns is None
            else frozenset(column for column in (*used, *dataset.extra_columns) if column is not None)
        )

    def question(self, one: Located) -> Question:
        """ValueError: the row cannot be used."""
        asked = as_text(self.value(one, "data.prompt_column", self.dataset.prompt_column))
        prompt, said = self._without_assistant(one, asked)
        if self.dataset.query_column is not None:
            prompt = self._with_query(one, prompt)
        prompt = with_suffix(prompt, self.dataset.prompt_suffix)
        where = f"data.prompt_column = {self.dataset.prompt_column}: {one.place}"
        if self.template.plain:
            content: str | list[Message] = plain_text(prompt, where)
        else:
            content = self._conversation(one, prompt, where)
        shown: Shown = content, (), ()
        if (column := self.dataset.image_column) is not None and self.images is not None:
            try:
                asks = column.partition(".")[0] in one.row or PLACE in str(content)  # a row of text may be without
                value = self.value(one, "data.image_column", column) if asks else None
                shown = self.images.row(content, value, one.file)
            except (ValueError, OSError) as error:
                raise ValueError(f"data.image_column = {column}: {one.place}: {error}") from error
        content, pictures, grids = shown
        return Question(
            index=one.index,
            place=one.place,
            content=content,
            text=prompt if isinstance(prompt, str) else prompt[-1]["content"],
            answer=self._answer(one, said),
            row=self._kept(one),
            pictures=pictures,
            grids=grids,
        )

    def value(self, one: Located, knob: str, column: str) -> Any:
        """Return a row's value; "a.b" also reads column b inside an object a, "a.0" the first item of a list a."""
        if column in one.row:
            return one.row[column]
        value: Any = one.row
        for part in column.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
                continue
            if not isinstance(value, dict) or part not in value:
                way = (
                    f"data.source = verl_parquet:{one.file} reads verl's"
                    if "reward_model" in one.row
                    else "name one of these" + f"{'' if self.prefix else ' in a file of configs/datasets'}"
                )
                has = ", ".join(map(str, one.row))
                raise ValueError(f"{knob} = {column}: {one.place} has no such column; it has {has}; {way}")
            value = value[part]
        return value

    def _without_assistant(self, one: Located, prompt: Any) -> tuple[Any, str | None]:
        """Take off the assistant's message at the end of a conversation; returns its text where it is the answer."""
        if not (isinstance(prompt, list) and prompt and all(map(is_message, prompt))):
            return prompt, None
        if prompt[-1]["role"] != "assistant":
            return prompt, None
        if self.dataset.assistant_turn == "refuse":
            raise ValueError(
                f"data.assistant_turn = refuse: the conversation of {one.place} ends with the assistant's message, "
                "which would be part of the prompt; set it to drop (take that message off) or answer (and read the "
                "answer from it)"
            )
        if len(prompt) == 1:
            raise ValueError(f"data.prompt_column: {one.place} has only the assistant's message, and no question")
        return prompt[:-1], prompt[-1]["content"] if self.dataset.assistant_turn == "answer" else None

    def _with_query(self, one: Located, prompt: Any) -> str:
        query = self.value(one, "query_column", self.dataset.query_column or "")
        for column, value in ((self.dataset.prompt_column, prompt), (self.dataset.query_column, query)):
            if not isinstance(value, str | None):
                raise ValueError(f"query_column: {one.place} holds {type(value).__name__} in {column}; expected text")
        return "\n".join(part for part in (prompt, query) if part)

    def _conversation(self, one: Located, prompt: Any, where: str) -> list[Message]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"{where} is empty")
            messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and prompt and all(map(is_message, prompt)):
            messages = prompt
        else:
            raise ValueError(
                f"{where} holds {type(prompt).__name__}; expected text, or a list of messages {{role, content}}, whose "
                "contents are text, or parts {type: text, text} and {type: image}, for pictures of data.image_column"
            )
        system = self.system
        if self.dataset.system_column is not None:
            own = self.value(one, "system_column", self.dataset.system_column)
            if not isinstance(own, str | None):
                raise ValueError(
                    f"system_column = {self.dataset.system_column}: {one.place} holds {type(own).__name__}; expected "
                    "text"
                )
            system = own or system
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise ValueError(f"{where} begins with a system message already; leave data.system out")
        return [{"role": "system", "content": system}, *messages]

    def _answer(self, one: Located, said: str | None) -> str:
        """`said`: the answer, in place of what its column holds."""
        column = self.dataset.answer_column
        if not column and said is None:
            return ""
        value = self.value(one, "data.answer_column", column) if said is None else said
        if isinstance(value, list) and value and all(isinstance(item, str | int | float) for item in value):
            self.lists += len(value) > 1
            value = ", ".join(map(str, value))
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        if not isinstance(value, str | int | float):
            inside = [f"{column}.{key}" for key in (value if isinstance(value, dict) else range(len(value)))][:5]
            raise ValueError(
                f"data.answer_column = {column}: {one.place} holds {type(value).__name__} there; expected text, a "
                f"number, or a list of these; name what is inside it: {', '.join(inside) or 'there is nothing'}"
            )
        text = str(value)
        if self.pattern is not None and text.strip():
            found = list(self.pattern.finditer(text))
            if not found:
                raise ValueError(
                    f"data.answer_pattern = {self.pattern.pattern}: {one.place} matches nowhere in {column}"
                )
            text = found[-1][1] or ""
        return text.translate(self.taken_out).strip()

    def _kept(self, one: Located) -> Row:
        if self.needed is None:
            return {column: value for column, value in one.row.items() if column != self.dataset.image_column}
        for column in self.dataset.extra_columns or ():
            self.value(one, "extra_columns", column)
        needed = self.needed - {self.dataset.image_column}
        whole = {column if column in one.row else column.split(".")[0] for column in needed}
        return {column: value for column, value in one.row.items() if column in whole}


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """data.answer_pattern; ValueError where it is no regular expression with a group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"data.answer_pattern = {pattern}: not a regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError(f"data.answer_pattern = {pattern}: it has no group; put ( ) around what is the answer")
    return compiled


def _key(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _without_empty_answers(
    columns: Columns, data: DataConfig, questions: list[Question], reading: Reading
) -> list[Question]:
    empty = [question.index for question in questions if not question.answer]
    if not empty:
        return questions
    column = columns.dataset.answer_column
    what = f"{len(empty)} of {len(questions)} rows of {reading.source} have an empty {column}"
    if (data.empty_answers or columns.dataset.empty_answers) == "refuse":
        raise ValueError(
            f"data.empty_answers = refuse: {what} (rows {some(map(str, empty))}); fix them, or set it to drop"
        )
    if len(empty) == len(questions):
        raise ValueError(f"data.answer_column = {column}: {what}; nothing is left to train on")
    reading.dropped["empty answer"] += len(empty)
    reading.notes.append(f"data.empty_answers = drop: {what} and are left out")
    return [question for question in questions if question.answer]


def without_overlong(
    data: DataConfig, lengths: Sequence[tuple[Question, int, bool]], reading: Reading
) -> list[Question]:
    """The questions that data.max_prompt_length leaves.

    lengths: of each the tokens, template included, and whether it has more than these, which were not counted.
    """
    knob, limit = f"{data.prefix}max_prompt_length", data.max_prompt_length
    overlong = [(question.index, length, more) for question, length, more in lengths if length > limit]
    if not overlong:
        return [question for question, _, _ in lengths]
    what = f"{len(overlong)} of {len(lengths)} prompts of {reading.source} are longer"
    if data.overlong_prompts == "refuse":
        named = some(f"row {i}: {'over ' * more}{length} tokens" for i, length, more in overlong)
        way = f"raise it, or set {data.prefix}overlong_prompts to drop"
        raise ConfigError(Problem(knob, limit, f"{what} ({named})", way))
    if len(overlong) == len(lengths):
        shortest = min(length for _, length, _ in lengths)
        raise ConfigError(Problem(knob, limit, f"{what} (the shortest has {shortest} tokens)", "raise it"))
    _, longest, more = max(overlong, key=lambda one: one[1])
    reading.dropped["overlong"] += len(overlong)
    reading.notes.append(
        f"{knob} = {limit}: {what} (the longest has {'over ' * more}{longest} tokens) and are left out"
    )
    return [question for question, length, _ in lengths if length <= limit]


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few of some names."""
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
