"""Prompts: rows of a file, or problems made on the spot, as token ids; and the order in which steps take them."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config, DataConfig
from spmd_rl.data import tokens
from spmd_rl.data.arithmetic import make_problems
from spmd_rl.data.rows import Row, read_rows
from spmd_rl.data.seeds import derived_seed

ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sent to the engine."""

    index: int
    """Row in its source, from 0."""
    token_ids: tuple[int, ...]
    """With the template, as it goes to rollout and to training."""
    text: str
    """What is asked: the row's prompt, or the last message of a conversation."""
    answer: str
    row: Row
    """All columns, for reward rules."""
    messages: tuple[tokens.Message, ...] = ()
    """The conversation that the template rendered; empty when there was none."""


@dataclass(frozen=True)
class Loaded:
    """Prompts, and what there is to say about the rows that did not become one."""

    prompts: list[Prompt]
    notes: list[str]


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts a step takes: every prompt once an epoch, each epoch in another order."""

    prompts: int
    """How many there are."""
    seed: int
    shuffle: bool

    def take(self, step: int, count: int) -> list[int]:
        """Positions of the `count` prompts of a step, counted from 0; runs on into the next epoch."""
        first, end = step * count, (step + 1) * count
        epochs = range(first // self.prompts, (end - 1) // self.prompts + 1)
        order = [position for epoch in epochs for position in self._epoch(epoch)]
        skipped = first - epochs.start * self.prompts
        return order[skipped : skipped + count]

    def _epoch(self, epoch: int) -> list[int]:
        order = list(range(self.prompts))
        if self.shuffle:
            random.Random(derived_seed("prompt order", self.seed, epoch)).shuffle(order)
        return order


def load_prompts(config: Config, tokenizer: Any, split: str) -> Loaded:
    """The prompts of "train" or "eval"; ValueError says what is wrong with the source and which knob mends it.

    Without a held-out set "eval" is empty. Rows left out are counted in the notes.
    """
    assert split in ("train", "eval"), split
    data = config.data
    source = data.source if split == "train" else data.eval_source
    if split == "eval" and source is None and data.source == ARITHMETIC:
        source = ARITHMETIC
    if source is None or (split == "eval" and data.eval_problems == 0):
        return Loaded([], [])
    notes: list[str] = []
    if source == ARITHMETIC:
        rows = _made(config, split, notes)
        # Their columns are ours, whatever the file of the other split calls its own.
        questions, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    else:
        rows = read_rows(Path(source))
        questions = [_column(row, i, "data.prompt_column", data.prompt_column, source) for i, row in enumerate(rows)]
        answers = [_column(row, i, "data.answer_column", data.answer_column, source) for i, row in enumerate(rows)]
    answers = [_answer(answer, i, data.answer_column, source) for i, answer in enumerate(answers)]
    kept = _without_empty_answers(data, source, answers, notes)
    ids = dict(zip(kept, _encode(data, tokenizer, source, [(i, questions[i]) for i in kept]), strict=True))
    kept = _without_overlong(data, source, {i: len(ids[i]) for i in kept}, notes)
    if split == "eval":
        kept = kept[: data.eval_problems]
    elif len(kept) < config.train.prompts_per_step:
        raise ValueError(
            f"train.prompts_per_step = {config.train.prompts_per_step}: {source} gives only {len(kept)} prompts, so a "
            "step would ask the same prompt twice with the same seeds; lower it or bring more prompts"
        )
    said = {i: tuple(_conversation(questions[i], i, data, source)) if data.template == "chat" else () for i in kept}
    return Loaded(
        [Prompt(i, tuple(ids[i]), _text(questions[i]), answers[i], rows[i], messages=said[i]) for i in kept], notes
    )


def _made(config: Config, split: str, notes: list[str]) -> list[Row]:
    spec = config.data.arithmetic
    wanted = spec.problems if split == "train" else config.data.eval_problems
    rows = make_problems(spec, wanted, config.run.seed, split)
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


# ---- columns


def _column(row: Row, index: int, knob: str, column: str, source: str) -> Any:
    """A row's value; "a.b" also reads column b inside an object a."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(
                f"{knob} = {column}: row {index} of {source} has no such column; "
                f"name one of those it has: {', '.join(map(str, row))}"
            )
        value = value[part]
    return value


def _answer(value: Any, index: int, column: str, source: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value).strip()
    raise ValueError(
        f"data.answer_column = {column}: row {index} of {source} holds {type(value).__name__} there; "
        "expected text or a number"
    )


# ---- which rows become prompts


def _without_empty_answers(data: DataConfig, source: str, answers: list[str], notes: list[str]) -> list[int]:
    empty = [i for i, answer in enumerate(answers) if not answer]
    if not empty:
        return list(range(len(answers)))
    what = f"{len(empty)} of {len(answers)} rows of {source} have an empty {data.answer_column}"
    if data.empty_answers == "refuse":
        raise ValueError(
            f"data.empty_answers = refuse: {what} (rows {_some(map(str, empty))}); mend them, or set it to drop"
        )
    if len(empty) == len(answers):
        raise ValueError(f"data.answer_column = {data.answer_column}: {what}; nothing is left to train on")
    notes.append(f"data.empty_answers = drop: {what} and are left out")
    return [i for i, answer in enumerate(answers) if answer]


def _without_overlong(data: DataConfig, source: str, lengths: dict[int, int], notes: list[str]) -> list[int]:
    limit = data.max_prompt_length
    overlong = {i: length for i, length in lengths.items() if length > limit}
    if not overlong:
        return list(lengths)
    what = f"{len(overlong)} of {len(lengths)} prompts of {source} are longer"
    if data.overlong_prompts == "refuse":
        named = _some(f"row {i}: {length} tokens" for i, length in overlong.items())
        raise ValueError(
            f"data.max_prompt_length = {limit}: {what} ({named}); raise it, or set data.overlong_prompts to drop"
        )
    if len(overlong) == len(lengths):
        raise ValueError(
            f"data.max_prompt_length = {limit}: {what} (the shortest has {min(lengths.values())} tokens); raise it"
        )
    notes.append(f"data.max_prompt_length = {limit}: {what} (up to {max(overlong.values())} tokens) and are left out")
    return [i for i in lengths if i not in overlong]


def _some(names: Any, limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


# ---- templates


def _encode(data: DataConfig, tokenizer: Any, source: str, questions: list[tuple[int, Any]]) -> list[list[int]]:
    """Token ids of (row, prompt) pairs, all in one call of the tokenizer."""
    if data.template == "plain":
        return tokens.encode_all(tokenizer, [_plain(question, i, data, source) for i, question in questions])
    return tokens.render_all(tokenizer, [_conversation(question, i, data, source) for i, question in questions])


def _plain(question: Any, index: int, data: DataConfig, source: str) -> str:
    where = f"data.prompt_column = {data.prompt_column}: row {index} of {source}"
    if not isinstance(question, str):
        raise ValueError(
            f"{where} holds {type(question).__name__}; data.template = plain needs text, chat also takes messages"
        )
    if not question.strip():
        raise ValueError(f"{where} is empty; mend or remove it")
    return question


def _conversation(question: Any, index: int, data: DataConfig, source: str) -> list[tokens.Message]:
    where = f"data.prompt_column = {data.prompt_column}: row {index} of {source}"
    if isinstance(question, str):
        if not question.strip():
            raise ValueError(f"{where} is empty; mend or remove it")
        messages = [{"role": "user", "content": question}]
    elif isinstance(question, list) and question and all(map(_is_message, question)):
        messages = question
    else:
        raise ValueError(
            f"{where} holds {type(question).__name__}; expected text, or a list of messages {{role, content}}"
        )
    if data.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"{where} begins with a system message already; leave data.system out")
    return [{"role": "system", "content": data.system}, *messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _text(question: Any) -> str:
    return question if isinstance(question, str) else question[-1]["content"]
