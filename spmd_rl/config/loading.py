"""YAML file and command line to a Config, strictly: every mistake is reported, and all of them at once."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
import yaml

from spmd_rl.config.command_line import name_sections, override, print_help, split_words
from spmd_rl.config.config import Config
from spmd_rl.config.data_config import DatasetConfig
from spmd_rl.config.fields import knobs, named_section, range_problems
from spmd_rl.config.foreign.lookup import foreign_launcher, foreign_program
from spmd_rl.config.redact import hidden
from spmd_rl.config.shipped import find_file, shipped_list
from spmd_rl.config.yaml_file import SectionReader, read_yaml
from spmd_rl.errors import Problem, refuse
from spmd_rl.models.hub import hub_name

Settings = TypeVar("Settings")

DESCRIPTION = """\
Every setting below can stand in a YAML file, by section, and on the command line, which wins.

  --config FILE   the YAML file; without it the defaults below hold
"""


def load_config(argv: list[str], problems: list[Problem] | None = None) -> Config:
    """Return the run that `--config FILE` and overrides such as `--train.steps 2` describe.

    Raises ConfigError with all problems: unknown keys with the nearest known name, values of a wrong type, ...
    `--help` prints every setting with the file's values as defaults, and exits. `problems`: they are added to it
    instead, and what they are of has its default.
    """
    needed = {"model.path": "name a Hugging Face model directory in the file or with --model.path DIR"}
    config = load(Config, argv, needed, DESCRIPTION, problems)
    if config.run.name:
        return config
    # Of the command alone: every rank of every launch, and the same command tomorrow, find the same directory.
    name = next((Path(file).stem for file in split_words(argv, [])[0]), config.program.rpartition(".")[2])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def load(
    kind: type[Settings],
    argv: list[str],
    needed: dict[str, str],
    description: str,
    found: list[Problem] | None = None,
) -> Settings:
    """Return any dataclass of settings, as load_config does.

    `needed`: text settings without a default, and the way out where one is not set. `description`: for `--help`.
    `found`: as load_config's problems.
    """
    problems: list[Problem] = []
    files, overrides, wants_help = split_words(argv, problems)
    content = read_yaml(find_file(files[0], ("", "evaluation")) or Path(files[0]), problems) if files else {}
    if program := foreign_program(content):
        way = f"translate it: python -m spmd_rl from-mindspeed {files[0]} --output mine.yaml, and give that"
        refuse([Problem("--config", files[0], f"it is a file of {program.name}", way)])
    if launcher := foreign_launcher(content):
        way = "torchrun starts the ranks (--nproc_per_node, NNODES); parallel.tensor and the like share the model"
        refuse([Problem("--config", files[0], f"it is a file of {launcher}, which has no part here", way)])
    values = SectionReader(kind, files[0] if files else "", problems).read(content or {})
    name_sections(knobs(kind), overrides, values, wants_help)
    if wants_help:
        print_help(_build(kind, dict.fromkeys(needed, tyro.MISSING) | values), f"{description}\n\n{shipped_list()}")
    if content is not None:
        missing = [name for name in needed if name not in values and name not in overrides]
        problems += [Problem(name, None, "not set", needed[name]) for name in missing]
    config = override(_build(kind, dict.fromkeys(needed, "") | values), overrides, problems)
    if found is None:
        refuse(problems)
    else:
        found += problems
    return config


def load_dataset_config(text: str, knob: str = "dataset") -> DatasetConfig:
    """Return a dataset from its file (data/mine.yaml), the name of a shipped one (gsm8k), a bare source, or NAME:PATH.

    The last has the columns of the file and the rows of PATH. Without a file all columns have their default names. The
    name is always set. Raises ConfigError with all problems of the file; `knob`: the setting that names it.
    """
    file, source = text, ""
    for suffix in (".yaml", ".yml"):
        stem, found, rest = text.partition(f"{suffix}:")
        if found:
            file, source = stem + suffix, rest
    before, _, after = text.partition(":")
    if not source and after and not Path(text).exists() and find_file(before, ("datasets",)):
        file, source = before, after
    if (shipped := find_file(file, ("datasets",))) is not None:
        file = str(shipped)
    if Path(file).suffix not in (".yaml", ".yml"):
        return DatasetConfig(source=text, name=_dataset_name(text))
    problems: list[Problem] = []
    where = f"{knob} = {text}"
    content = read_yaml(Path(file), problems, knob, "settings such as `prompt_column: problem`") or {}
    values = SectionReader(DatasetConfig, where, problems).read(content | ({"source": source} if source else {}))
    if not problems and not values.get("source"):
        way = f"name a file, a directory or a hub dataset, or write {file}:PATH"
        problems.append(Problem("source", None, "not set", way, where))
    refuse(problems)
    values["name"] = values.get("name") or Path(file).stem
    dataset = DatasetConfig(**values)
    refuse([dataclasses.replace(problem, where=where) for problem in range_problems(dataset)])
    return dataset


def _dataset_name(source: str) -> str:
    return Path(source.partition(":")[2] or source).stem


def dump(config: Any, hide: bool = True) -> str:
    """Return YAML that load_config and `load` read back to equal settings, but for hidden secrets."""
    plain = _plain(dataclasses.asdict(config))
    return yaml.safe_dump(hidden(plain) if hide else plain, sort_keys=False, allow_unicode=True, width=120)


def settings(config: Any) -> dict[str, Any]:
    """Return dotted name -> value of every setting, as JSON and YAML spell it, without secrets."""
    return _dotted(hidden(_plain(dataclasses.asdict(config))))


def read_settings(path: Path) -> dict[str, Any]:
    """Return dotted name -> value of a run's config.yaml, whatever version of the program wrote it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as a run's settings: {error}") from error
    return _dotted(content) if isinstance(content, dict) else {}


def _dotted(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return hub_name(value)
    return list(value) if isinstance(value, tuple) else value


def _build(kind: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Make settings from dotted names; what is not among them keeps its default."""
    arguments: dict[str, Any] = {}
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            arguments[name] = _build(inner, values, f"{prefix}{name}.")
        elif section := named_section(inner):
            start = f"{prefix}{name}."
            labels = dict.fromkeys(n.removeprefix(start).partition(".")[0] for n in values if n.startswith(start))
            arguments[name] = {label: _build(section, values, f"{start}{label}.") for label in labels}
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return kind(**arguments)
