"""Say what cannot work among the settings of prompts, held-out problems and their sources."""

import importlib.util
import re
import string
from dataclasses import replace
from pathlib import Path

from spmd_rl.config.config import Config, EvaluationConfig
from spmd_rl.config.data_config import ArithmeticConfig, DataConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.config.source_names import ARITHMETIC, FORMATS, REASONING_GYM, is_hub_name, is_made
from spmd_rl.config.template_names import CHAT, PLAIN, template_file
from spmd_rl.errors import ConfigError, Problem


def data_problems(config: Config) -> list[Problem]:
    """Return all problems of prompts and of held-out problems."""
    data, evaluation = config.data, config.evaluation
    problems = _evaluation(evaluation) + _templates(data)
    if ARITHMETIC in (*(data.mix or (data.source,)), data.eval_source):
        problems += _arithmetic(data.arithmetic)
    own = is_made(data.source) or data.eval_problems  # a part of the source is held out, where there are no others
    held_out = data.eval_source is not None or evaluation.benchmarks or (own and not data.mix)
    if evaluation.every_steps and not held_out:
        way = "name a file with data.eval_source or evaluation.benchmarks, or set it to 0"
        met = "there are no held-out problems"
        problems.append(Problem("evaluation.every_steps", evaluation.every_steps, met, way))
    return problems + _sources(config)


def _arithmetic(arithmetic: ArithmeticConfig) -> list[Problem]:
    problems, section = [], "data.arithmetic"
    if not arithmetic.operations:
        problems.append(Problem(f"{section}.operations", None, "it is empty: nothing to ask", "name some of +, -, *"))
    if arithmetic.max_operand < arithmetic.min_operand:
        met = f"below {section}.min_operand = {arithmetic.min_operand}"
        problems.append(Problem(f"{section}.max_operand", arithmetic.max_operand, met, "raise it"))
    places = _places(arithmetic.wording)
    if places is None or not {"a", "op", "b"} <= places <= {"a", "op", "b"}:
        met = "its places must be {a}, {op} and {b}"
        way = "write a brace that is meant as text twice"
        problems.append(Problem(f"{section}.wording", repr(arithmetic.wording), met, way))
    return problems


def _places(wording: str) -> set[str] | None:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(wording) if name is not None}
    except ValueError:
        return None


def _evaluation(evaluation: EvaluationConfig) -> list[Problem]:
    if evaluation.samples <= 1 or evaluation.temperature != 0:
        return []
    met = "greedily (evaluation.temperature = 0) all samples of a problem are the same"
    return [Problem("evaluation.samples", evaluation.samples, met, "set a temperature such as 0.6, or 1 sample")]


def _templates(data: DataConfig) -> list[Problem]:
    problems: list[Problem] = []
    if data.template not in (None, CHAT, PLAIN):
        try:
            template_file(data.template)
        except ConfigError as error:
            problems += error.problems
    no_place = "data.template = plain has no place for it"
    if data.system is not None and data.template == PLAIN:
        problems.append(Problem("data.system", repr(data.system), no_place, "set the template to chat"))
    if data.enable_thinking is not None and data.template == PLAIN:
        way = "leave it out, or set the template to one that knows it, such as qwen3"
        problems.append(Problem("data.enable_thinking", data.enable_thinking, no_place, way))
    if data.answer_pattern is not None:
        try:
            groups = re.compile(data.answer_pattern).groups
        except re.error as error:
            met = f"not a regular expression: {error}"
            problems.append(Problem("data.answer_pattern", data.answer_pattern, met, "fix it"))
        else:
            if not groups:
                way = "put ( ) around what is the answer"
                problems.append(Problem("data.answer_pattern", data.answer_pattern, "it has no group", way))
    return problems


def _sources(config: Config) -> list[Problem]:
    data = config.data
    problems: list[Problem] = []
    if data.mix and data.source != ARITHMETIC:
        met = "data.mix names the sources already"
        problems.append(Problem("data.source", data.source, met, "leave one of them out"))
    for knob, text in named_sources(config):
        try:
            dataset = load_dataset_config(text, knob)
        except ConfigError as error:
            problems += error.problems
            continue
        if dataset.template not in (None, CHAT, PLAIN):
            try:
                template_file(dataset.template, "template")
            except ConfigError as error:
                problems += [replace(problem, where=f"{knob} = {text}") for problem in error.problems]
        problems += _source(knob, text, dataset.source)
    return problems


def named_sources(config: Config) -> list[tuple[str, str]]:
    """Return (setting, source as it names it) of all that a run reads prompts from."""
    data = config.data
    named = [("data.mix", source) for source in data.mix] or [("data.source", data.source)]
    named += [] if data.eval_source is None else [("data.eval_source", data.eval_source)]
    return named + [("evaluation.benchmarks", source) for source in config.evaluation.benchmarks]


def _source(knob: str, text: str, source: str) -> list[Problem]:
    path = Path(source)
    if source.startswith(REASONING_GYM) and importlib.util.find_spec("reasoning_gym") is None:
        way = "install it, or name another source"
        return [Problem(knob, text, "the package reasoning-gym is not installed", way)]
    if is_made(source) or path.is_dir() or is_hub_name(source):
        return []
    if not path.is_file():
        met = "there is no such file" if text == source else f"there is no file {source}"
        return [Problem(knob, text, met, "name one, or set data.source to arithmetic")]
    if path.suffix not in FORMATS:
        return [Problem(knob, text, f"prompts are read from {', '.join(FORMATS)} files", "convert it")]
    return []
