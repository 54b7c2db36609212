"""Few-shot prompts: worked examples before a question."""

from collections.abc import Sequence
from dataclasses import replace

from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.config.source_names import is_made
from spmd_rl.data.sources.questions import Question, read_questions
from spmd_rl.data.templates import Template
from spmd_rl.data.tokens import Message
from spmd_rl.errors import ConfigError, Problem


def read_shots(count: int, source: str | None, benchmark: DatasetConfig, data: DataConfig, seed: int) -> list[Message]:
    """Return `count` worked examples as turns of a conversation; the answers stand as their column has them.

    `source`: a dataset, as --benchmark names it. None: the benchmark's own split for training.
    """
    if source is not None:
        dataset = load_dataset_config(source, "shots_source")
    elif is_made(benchmark.source) or benchmark.eval_split not in (None, benchmark.split):
        dataset = benchmark
    else:
        met = f"{benchmark.name or benchmark.source} has no split for training beside its questions"
        raise ConfigError(Problem("shots", count, met, "name worked examples with shots_source"))
    dataset = replace(dataset, image_column=None)
    questions, _ = read_questions(dataset, data, Template("shots", ""), seed, "train", count)
    if len(questions) < count:
        raise ConfigError(Problem("shots", count, f"{dataset.source} has only {len(questions)}", "lower it"))
    turns: list[Message] = []
    for question in questions[:count]:
        turns.append({"role": "user", "content": question.text})
        turns.append({"role": "assistant", "content": _written(question, dataset)})
    return turns


def _written(question: Question, dataset: DatasetConfig) -> str:
    """Return the answer's column, which may be a worked solution; where it is no text, the answer alone."""
    value = None if is_made(dataset.source) else question.row.get(dataset.answer_column)
    return value.strip() if isinstance(value, str) else question.answer


def with_shots(question: Question, shots: Sequence[Message], template: Template) -> Question:
    """Put the examples behind a question's system message, before all else of its conversation."""
    if isinstance(question.content, str):
        met, way = "it has no turns to put the examples of shots into", "set it to question_answer, or another"
        raise ConfigError(Problem("template", template.name, met, way))
    system = [message for message in question.content[:1] if message["role"] == "system"]
    return replace(question, content=[*system, *shots, *question.content[len(system) :]])
