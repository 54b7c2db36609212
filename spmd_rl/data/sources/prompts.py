"""Prompts: what a source asks, as token ids."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from spmd_rl.config.config import Config
from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.config.source_names import is_made
from spmd_rl.config.template_names import CHAT
from spmd_rl.data import tokens
from spmd_rl.data.image_reader import PLACE, ImageReader
from spmd_rl.data.pictures import Picture
from spmd_rl.data.seeds import derived_seed
from spmd_rl.data.sources import prepared
from spmd_rl.data.sources.few_shot import with_shots
from spmd_rl.data.sources.questions import Question, Reading, read_questions, without_overlong
from spmd_rl.data.sources.row import Row
from spmd_rl.data.templates import Template, load_template
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.family import Grid

_AT_ONCE = 512
_HELD_OUT_PART = 10
_OVERRIDES = ("prompt_column", "answer_column", "image_column", "answer_pattern", "assistant_turn")
# A tokenizer takes a minute and gigabytes for a text of 10 MB. Of a text with so many characters for each token that is
# allowed, the beginning is enough to see that it is too long.
_CHARACTERS_A_TOKEN = 256


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sent to the engine."""

    index: int
    """Row in its source, from 0."""
    token_ids: tuple[int, ...]
    """With the template, as it goes to rollout and to training."""
    text: str
    """The row's prompt, or the last message of a conversation."""
    answer: str
    row: Row
    """All columns that are kept, for reward rules."""
    source: str = ""
    """Name of the dataset it is from."""
    messages: tuple[tokens.Message, ...] = ()
    """The conversation that the template rendered; empty when there was none."""
    template: str | None = None
    """The template, as data.template names it; None: the tokenizer's own."""
    pictures: tuple[Picture, ...] = ()
    """Not decoded."""
    grids: tuple[Grid, ...] = ()
    """Of each picture: what it is as patches."""

    @property
    def patches(self) -> int:
        """Return the patches of all its pictures."""
        return sum(map(prod, self.grids))

    @cached_property
    def pictures_digest(self) -> str:
        """Return what tells its pictures from others', by their files' bytes; empty for a prompt without any."""
        if not self.pictures:
            return ""
        return hashlib.blake2b(b"".join(map(Picture.digest, self.pictures)), digest_size=16).hexdigest()

    @property
    def problem(self) -> str:
        """Return what is the same in a problem that is there twice: pictures may all be asked the same."""
        return f"{self.text} {self.pictures_digest}" if self.pictures else self.text


@dataclass(frozen=True)
class Loaded:
    """Prompts, and what there is to say about the rows that did not become one."""

    prompts: list[Prompt]
    notes: list[str]
    shares: tuple[tuple[int, float], ...] = field(default=())
    """(Number of prompts, weight) of each source, in the order of `prompts`."""


@dataclass(frozen=True)
class Encoded:
    """The outcome of one question."""

    text: str
    """With the template."""
    token_ids: list[int]
    error: str = ""
    """Why there are none."""
    cut: bool = False
    """The text is so long that only its beginning was made token ids."""


def load_prompts(
    config: Config, tokenizer: Any, split: Literal["train", "eval"], images: ImageReader | None = None
) -> Loaded:
    """The prompts of "train" or "eval"; ValueError says what is wrong with the source and which knob fixes it.

    images: reads pictures, for a model that sees. Without a held-out set "eval" is empty. Rows left out are counted in
    the notes.
    """
    assert split in ("train", "eval"), split
    data = config.data
    limit = None if split == "train" else data.eval_problems
    prompts: list[Prompt] = []
    notes: list[str] = []
    shares: list[tuple[int, float]] = []
    for source, weight in _sources(config, split).items():
        dataset = with_overrides(load_dataset_config(source), data)
        if source == data.source and holds_out(config):
            loaded = load_dataset(dataset, data, tokenizer, config.run.seed, "train", None, images)
            loaded = _hold_out(loaded, split, data.eval_problems, source)
        else:
            loaded = load_dataset(dataset, data, tokenizer, config.run.seed, split, limit, images)
        prompts += loaded.prompts
        notes += loaded.notes
        shares.append((len(loaded.prompts), weight))
    if split == "train" and len(prompts) < config.train.prompts_per_step:
        gives = f"{' and '.join(_sources(config, split))} gives only {len(prompts)} prompts"
        met, way = f"{gives}, so a step would ask the same prompt twice", "lower it or bring more prompts"
        raise ConfigError(Problem("train.prompts_per_step", config.train.prompts_per_step, met, way))
    return Loaded(prompts, notes, tuple(shares))


def holds_out(config: Config) -> bool:
    """Return True where held-out problems are taken out of what is trained on: evaluation is asked for, and there are
    no others."""
    data, evaluation = config.data, config.evaluation
    given = data.eval_source is not None or evaluation.benchmarks or data.mix or not data.eval_problems
    if given or not evaluation.every_steps:
        return False
    dataset = load_dataset_config(data.source)
    return not is_made(dataset.source) and dataset.eval_split in (None, dataset.split)


def _hold_out(loaded: Loaded, split: str, most: int, source: str) -> Loaded:
    """Return a source's held-out problems, about a tenth and at most so many, or the others.

    A hash of the problem decides, whatever the seed: one that is there twice is on one side.
    """
    prompts = loaded.prompts
    chosen = [prompt.problem for prompt in prompts if derived_seed(f"held out {prompt.problem}") % _HELD_OUT_PART == 0]
    held = set(list(dict.fromkeys(chosen))[:most]) or {prompts[-1].problem}
    kept = [prompt for prompt in prompts if (prompt.problem in held) == (split == "eval")]
    if split == "eval":
        once = list({prompt.problem: prompt for prompt in reversed(kept)}.values())[::-1]
        return Loaded(once, [], ((len(once), 1.0),))
    which = f"{len(held)} of the {len(prompts)} problems of {source}"
    said = f"data.eval_source is not set: {which} are held out of training"
    return Loaded(kept, [*loaded.notes, said], ((len(kept), 1.0),))


def _sources(config: Config, split: str) -> dict[str, float]:
    """Source -> weight."""
    data = config.data
    if split == "train":
        return data.mix or {data.source: 1.0}
    if data.eval_problems == 0:
        return {}
    if data.eval_source is None:
        dataset = load_dataset_config(data.source)
        own_split = config.evaluation.every_steps and not config.evaluation.benchmarks and dataset.eval_split
        own = is_made(dataset.source) or holds_out(config) or bool(own_split)
        return {data.source: 1.0} if own and not data.mix else {}
    return {data.eval_source: 1.0}


def with_overrides(dataset: DatasetConfig, data: DataConfig) -> DatasetConfig:
    """Put data.*'s columns before those that a dataset's file names."""
    given = {name: getattr(data, name) for name in _OVERRIDES}
    return replace(dataset, **{name: value for name, value in given.items() if value is not None})


def load_dataset(
    dataset: DatasetConfig,
    data: DataConfig,
    tokenizer: Any,
    seed: int,
    split: Literal["train", "eval"],
    limit: int | None,
    images: ImageReader | None = None,
    shots: Sequence[tokens.Message] = (),
) -> Loaded:
    """The prompts of one source: a raw one, or what tools/preprocess_data.py made of it; both have the same token ids.

    data: the template and its settings, lengths, and what to do with rows that cannot be used; its columns and sources
    are not looked at. limit: at most so many prompts, the first; None: all. shots: worked examples before each.
    """
    if dataset.image_column is not None and images is None:
        met = f"{dataset.source} has pictures there, and the model sees none"
        raise ConfigError(Problem("data.image_column", dataset.image_column, met, "take a model that sees"))
    if prepared.is_prepared(dataset.source):
        if shots:
            met, way = f"{dataset.source} is prepared: its prompts are token ids", "name the data that it was made of"
            raise ConfigError(Problem("shots", len(shots) // 2, met, way))
        said = prepared.expectation(data, tokenizer)
        questions, ids, reading = prepared.read(dataset.source, said, data, images)
        encoded, named = [Encoded("", found) for found in ids], prepared.template_name(dataset.source)
    else:
        template = template_of(dataset, data)
        questions, reading = read_questions(dataset, data, template, seed, split, limit, images)
        if shots:
            questions = [with_shots(question, shots, template) for question in questions]
        contents = [question.content for question in questions]
        encoded, named = encode(tokenizer, template, data, contents), template.name
        if images is not None:
            encoded = [with_images(one, question, images) for one, question in zip(encoded, questions, strict=True)]
        if dataset.image_column is None and (blind := sum(PLACE in question.text for question in questions)):
            reading.notes.append(
                f"{blind} of {len(questions)} prompts say {PLACE} and show no picture: {data.prefix}image_column names "
                "their column"
            )
        if not template.plain and not tokens.opens_answer(tokenizer, template.text):
            reading.notes.append(
                f"{data.prefix}template = {template.name}: it has no generation prompt: a prompt ends before what "
                "it writes in front of an answer, and the model has to write that itself"
            )
    if dataset.image_column is not None and not any(question.pictures for question in questions):
        none = f"none of the {len(questions)} prompts shows a picture"
        reading.notes.append(f"data.image_column = {dataset.image_column}: {none}")
    kept = [(question, one.token_ids) for question, one in select(data, questions, encoded, reading)][:limit]
    name = dataset.name or dataset.source
    return Loaded(
        [
            Prompt(q.index, tuple(found), q.text, q.answer, q.row, name, _messages(q), named, q.pictures, q.grids)
            for q, found in kept
        ],
        reading.all_notes(),
        ((len(kept), 1.0),),
    )


def template_of(dataset: DatasetConfig, data: DataConfig) -> Template:
    """The template that spells the prompts of a dataset in a run."""
    return load_template(data.template or dataset.template or CHAT, f"{data.prefix}template")


def encode(tokenizer: Any, template: Template, data: DataConfig, contents: Sequence[Any]) -> list[Encoded]:
    """Token ids of texts (template plain) or conversations; one that the template or tokenizer refuses has an error.

    data: enable_thinking, and max_prompt_length, far beyond which a text is cut.
    """
    enable_thinking, longest = data.enable_thinking, data.max_prompt_length
    if template.plain:
        if enable_thinking is not None:
            met = f"{data.prefix}template = plain has no place for it"
            raise ConfigError(Problem(f"{data.prefix}enable_thinking", enable_thinking, met, "leave it out"))
    else:
        tokens.spelling(tokenizer, template.text, enable_thinking, data.prefix)

    to_ids = tokens.encode_all if template.plain else tokens.encode_rendered
    known: dict[str, list[int]] = {}  # generated problems come again and again

    def spelled(some: Sequence[Any]) -> list[Encoded]:
        if template.plain:
            texts = list(some)
        else:
            texts = tokens.render_text(tokenizer, some, template.text, enable_thinking, data.prefix)
        begun = [text[: _CHARACTERS_A_TOKEN * longest] for text in texts]
        new = [text for text in dict.fromkeys(begun) if text not in known]
        known.update(zip(new, to_ids(tokenizer, new), strict=True))
        made = []
        for text, beginning in zip(texts, begun, strict=True):
            found, cut = known[beginning], len(beginning) < len(text)
            # Twice as many: where a text is cut, its last token may be another.
            if cut and len(found) <= 2 * longest:
                cut, found = False, to_ids(tokenizer, [text])[0]
            made.append(Encoded(text, found, cut=cut))
        return made

    encoded: list[Encoded] = []
    for start in range(0, len(contents), _AT_ONCE):
        some = contents[start : start + _AT_ONCE]
        try:
            encoded += spelled(some)
        # Templates raise what they like; one by one tells which conversation it was.
        except Exception:
            for content in some:
                try:
                    encoded += spelled([content])
                except Exception as error:
                    encoded.append(Encoded("", [], f"{type(error).__name__}: {error}"))
    return encoded


def select(
    data: DataConfig, questions: Sequence[Question], encoded: Sequence[Encoded], reading: Reading
) -> list[tuple[Question, Encoded]]:
    """Those that became token ids and are not too long; the others are counted in `reading`, or refused."""
    usable: dict[int, Encoded] = {}
    kept: list[Question] = []
    for question, one in zip(questions, encoded, strict=True):
        if one.error:
            reading.bad.met(f"{question.place}: the template or tokenizer refuses it: {one.error}")
        else:
            usable[question.index] = one
            kept.append(question)
    if not kept:
        raise ValueError(f"{reading.source}: none of its rows can be used: {'; '.join(reading.bad.examples)}")
    lengths = [(question, len(usable[question.index].token_ids), usable[question.index].cut) for question in kept]
    return [(question, usable[question.index]) for question in without_overlong(data, lengths, reading)]


def with_images(one: Encoded, question: Question, images: ImageReader) -> Encoded:
    """Return a question's token ids with all tokens of its pictures."""
    if one.error or one.cut:
        return one
    try:
        return replace(one, token_ids=images.expanded(one.token_ids, question.grids))
    except ValueError as error:
        return replace(one, error=str(error))


def _messages(question: Question) -> tuple[tokens.Message, ...]:
    return tuple(question.content) if isinstance(question.content, list) else ()
