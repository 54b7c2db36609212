"""Hold what can be set of prompts: where they come from, and how they are formatted."""

from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.config.fields import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ArithmeticConfig:
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",)
    """Which operations the problems use, drawn evenly."""
    min_operand: NonNegativeInt = 0
    """Smallest operand."""
    max_operand: NonNegativeInt = 9
    """Largest operand: 9 for one digit, 99 for up to two."""
    problems: PositiveInt = 2000
    """Problems to train on. Distinct while the operands allow it, then repeated (the log says so)."""
    wording: str = "What is {a} {op} {b}? Answer with the number only."
    """The prompt, with places {a}, {op} and {b}."""


@dataclass(frozen=True)
class DatasetConfig:
    """One source and how its columns are read: what a file in configs/datasets/ holds."""

    source: str
    """A .jsonl, .json, .csv, .parquet or .arrow file, a directory of them or of `datasets.save_to_disk`, a name on the
    Hugging Face hub (openai/gsm8k), "arithmetic", or "reasoning_gym:<task>"."""
    name: str | None = None
    """Its name in metrics. None: the name of the file that describes it, else of its source."""
    subset: str | None = None
    """Configuration of a dataset on the hub."""
    split: str | None = None
    """Split to train on: of the hub, of `save_to_disk`, or the files of a directory that have it in their name."""
    eval_split: str | None = None
    """Split to evaluate on. None: the same."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages {role, content}. "a.b" is column b inside a."""
    query_column: str | None = None
    """Column with more of the prompt, put on a line after it where it is not empty (Alpaca's `input`)."""
    prompt_suffix: str = ""
    """Text put behind every prompt, or the last message of a conversation: how to answer, where the rows don't say."""
    answer_column: str = "answer"
    """Column of the answer that reward rules compare with. "": the rows have none, as where a reward model judges."""
    system_column: str | None = None
    """Column of a row's own system message, which goes before `system` where it is not empty."""
    extra_columns: tuple[str, ...] | None = None
    """Further columns to keep for reward rules. None: all but binary ones (images), which are never kept."""
    image_column: str | None = None
    """Column of the pictures that a prompt shows at its places <image>: one or a list, each a path below the data's
    directory, bytes, or {bytes, path}. None: there are none."""
    answer_pattern: str | None = None
    """Regular expression whose group 1, where it matches last, is the answer. None: the column as it is."""
    answer_without: str = ""
    """Characters taken out of the answer, such as the comma in 1,450."""
    assistant_turn: Literal["refuse", "drop", "answer"] = "refuse"
    """Says how to treat a conversation whose last message is the assistant's, which would be part of the prompt: refuse
    it, take that message off, or take it off and read the answer from it in place of the answer column."""
    deduplicate: str | None = None
    """Column that tells rows apart: of those with the same value the first is kept."""
    empty_answers: Literal["drop", "refuse"] = "refuse"
    """Treatment of rows whose answer is empty, unless the run sets data.empty_answers."""
    system: str | None = None
    """System message, unless the run sets data.system."""
    template: str | None = None
    """Template, unless the run sets data.template."""
    problems: PositiveInt = 2000
    """Problems that a reasoning_gym task makes for training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a reasoning_gym task, under its own names."""


@dataclass(frozen=True)
class DataConfig:
    prefix = "data."
    """Stands before its settings' names, where the program at hand has them in this section."""

    source: str = "arithmetic"
    """Prompts to train on: "arithmetic" or "reasoning_gym:<task>" (generated), a .jsonl, .json, .csv,
    .parquet or .arrow file, a directory of them, a Hugging Face hub name, a shipped data set by its name (gsm8k;
    configs/datasets/), a FILE.yaml of your own, or NAME:PATH for the columns of the one and the rows of the other."""
    mix: dict[str, PositiveFloat] = field(default_factory=dict)
    """Several sources with weights, in place of data.source: --data.mix a.jsonl 3 configs/datasets/b.yaml 1"""
    prompt_column: str | None = None
    """Column of the prompt: a string, or a list of chat messages {role, content}; "a.b" is column b inside a. None:
    what the dataset's file says, else "prompt"."""
    answer_column: str | None = None
    """Column of the answer that reward rules compare with; "": there is none. None: what the dataset's file says, else
    "answer"."""
    image_column: str | None = None
    """Column of the pictures that a prompt shows at its places <image>: one or a list, each a path below the data's
    directory, bytes, or {bytes, path}. None: what the dataset's file says, else there are none."""
    image_min_pixels: PositiveInt | None = None
    """A picture with fewer pixels is enlarged to so many. None: what the model's preprocessor_config.json says."""
    image_max_pixels: PositiveInt | None = None
    """A picture with more pixels is made smaller. None: what the model's preprocessor_config.json says."""
    images_per_prompt: PositiveInt = 1
    """Pictures of a prompt, at most; a row with more is one that cannot be used (bad_rows)."""
    image_urls: Literal["refuse", "fetch"] = "refuse"
    """Treatment of http and https addresses in an image column: a row with one cannot be used, or every rank fetches
    the picture when it reads the row, and keeps it."""
    image_fetch_seconds: PositiveFloat = 10.0
    """A picture that takes longer to fetch cannot be used."""
    image_fetch_mib: PositiveFloat = 20.0
    """A fetched picture that is larger cannot be used."""
    answer_pattern: str | None = None
    """Regular expression whose group 1, where it matches last, is the answer. None: what the dataset's file says."""
    assistant_turn: Literal["refuse", "drop", "answer"] | None = None
    """Says how to treat a conversation that ends with the assistant's message: refuse it, take the message off
    (drop), or take it off and read the answer from it (answer). None: what the dataset's file says, else refuse."""
    system: str | None = None
    """System message put before every prompt. None: what the dataset's file says, else what the template does by
    itself. Not with template "plain"."""
    template: str | None = None
    """Template of prompts: "chat" (the tokenizer's own chat template), "plain" (its text as it is), a name in
    configs/templates/, or a .jinja file. None: what the dataset's file says, else "chat"."""
    enable_thinking: bool | None = None
    """Passed to a template that knows it (Qwen3). None: what the template does by itself."""
    max_prompt_length: PositiveInt = 1024
    """Tokens, template included."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """Leave longer prompts out and say how many, or stop and name them."""
    empty_answers: Literal["drop", "refuse"] | None = None
    """Treatment of rows whose answer is empty. None: what the dataset's file says, else refuse."""
    bad_rows: Literal["drop", "refuse"] = "refuse"
    """Treatment of rows that cannot be read (broken text, a missing column, a value of another type): leave them out
    and say how many, or stop at the first and name file, row and column."""
    eval_source: str | None = None
    """The held-out problems, named as data.source is. None: problems generated have their own, disjoint from
    training; where evaluation.every_steps asks for some, the source's own split for it, or else about a tenth of the
    source is held out of training, at most eval_problems, and the log says so."""
    eval_problems: NonNegativeInt = 128
    """At most so many held-out problems, the first of the source."""
    shuffle: bool = True
    """Another order every epoch, drawn from run.seed. False: the order of the source."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
