"""YAML file and command line to a Config, strictly: every mistake is reported, and all of them at once."""

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from spmd_rl.config.config import Config, DatasetConfig
from spmd_rl.config.redact import hidden
from spmd_rl.errors import ConfigError

Settings = TypeVar("Settings")

DESCRIPTION = """\
Every setting below can stand in a YAML file, section by section, and on the command line, which wins.

  --config FILE   the YAML file; without it the defaults below hold
"""
NAME = "NAME"
"""Stands in a setting's name for a name of the user's own: of one of several sections of the same kind."""


def load_config(argv: list[str]) -> Config:
    """The run that `--config FILE` and overrides such as `--train.steps 2` describe.

    Raises ConfigError with all problems: unknown keys with the nearest known name, values of a wrong type, ...
    `--help` prints every setting with the file's values as defaults, and exits.
    """
    needed = {
        "model.path": "model.path: not set; name a Hugging Face model directory in the file or with --model.path DIR"
    }
    return load(Config, argv, needed, DESCRIPTION)


def load(kind: type[Settings], argv: list[str], needed: dict[str, str], description: str) -> Settings:
    """load_config, for any dataclass of settings.

    `needed`: text settings without a default, and what to say where one is not set. `description`: for `--help`.
    """
    problems: list[str] = []
    files, overrides, wants_help = _split(argv, problems)
    content = _read_yaml(Path(files[0]), problems) if files else {}
    values: dict[str, Any] = {}
    _read_section(kind, content or {}, "", files[0] if files else "", values, problems)
    _name_sections(knobs(kind), overrides, values, wants_help)
    if wants_help:
        _tyro(["--help"], _build(kind, dict.fromkeys(needed, tyro.MISSING) | values), description)
    if content is not None:
        problems += [what for name, what in needed.items() if name not in values and name not in overrides]
    config = _override(_build(kind, dict.fromkeys(needed, "") | values), overrides, problems)
    if problems:
        raise ConfigError(problems)
    return config


def load_dataset_config(text: str) -> DatasetConfig:
    """A dataset from the path of its file (configs/datasets/gsm8k.yaml), from a bare source, or from FILE.yaml:PATH.

    The last has the columns of FILE and the rows of PATH. Without a file all columns have their default names. The
    name is always set. Raises ConfigError with all problems of the file.
    """
    file, source = text, ""
    for suffix in (".yaml", ".yml"):
        stem, found, rest = text.partition(f"{suffix}:")
        if found:
            file, source = stem + suffix, rest
    if Path(file).suffix not in (".yaml", ".yml"):
        return DatasetConfig(source=text, name=_dataset_name(text))
    problems: list[str] = []
    content = _read_yaml(Path(file), problems, "dataset", "settings such as `prompt_column: problem`") or {}
    values: dict[str, Any] = {"source": source} if source else {}
    _read_section(DatasetConfig, {**content, **values}, "", file, values, problems)
    if not problems and not values.get("source"):
        problems.append(f"{file}: source is not set; name a file, a directory or a hub dataset, or write {file}:PATH")
    if problems:
        raise ConfigError(problems)
    values["name"] = values.get("name") or Path(file).stem
    return DatasetConfig(**values)


def _dataset_name(source: str) -> str:
    return Path(source.partition(":")[2] or source).stem


def dump(config: Any, hide: bool = True) -> str:
    """YAML that load_config reads back to an equal Config, and `load` to equal settings, but for hidden secrets."""
    plain = _plain(dataclasses.asdict(config))
    return yaml.safe_dump(hidden(plain) if hide else plain, sort_keys=False, allow_unicode=True, width=120)


def settings(config: Any) -> dict[str, Any]:
    """Dotted name -> value of every setting, as JSON and YAML spell it, without secrets."""
    return _dotted(hidden(_plain(dataclasses.asdict(config))))


def read_settings(path: Path) -> dict[str, Any]:
    """Dotted name -> value of a run's config.yaml, whatever version of the program wrote it."""
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
    return list(value) if isinstance(value, tuple) else value


def knobs(kind: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every setting -> its type."""
    found: dict[str, Any] = {}
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            found |= knobs(inner, f"{prefix}{name}.")
        elif section := _named(inner):
            found |= knobs(section, f"{prefix}{name}.{NAME}.")
        else:
            found[prefix + name] = inner
    return found


def _named(kind: Any) -> type | None:
    """The kind of section that a field holds several of, each under a name: dict[str, Section]."""
    inner = get_args(kind)
    return inner[1] if get_origin(kind) is dict and dataclasses.is_dataclass(inner[1]) else None


def _knob(name: str, known: Iterable[str]) -> str:
    """A setting's name as `knobs` knows it: with NAME where the user's own name of a section stands."""
    for knob in known:
        before, named, after = knob.partition(f".{NAME}.")
        if named and re.fullmatch(rf"{re.escape(before)}\.\w+\.{re.escape(after)}", name):
            return knob
    return name


def _name_sections(
    known: Iterable[str], overrides: dict[str, list[str]], values: dict[str, Any], wants_help: bool
) -> None:
    """Have a section, empty as yet, for each name that only the command line knows; for help, one called NAME."""
    for name in overrides:
        if _knob(name, known) != name:
            values.setdefault(name.rpartition(".")[0] + ".", None)
    for before in {knob.partition(NAME)[0] for knob in known if NAME in knob} if wants_help else ():
        if not any(name.startswith(before) for name in values):
            values[f"{before}{NAME}."] = None


def _build(kind: type, values: dict[str, Any], prefix: str = "") -> Any:
    """A Config from dotted names; what is not among them keeps its default."""
    arguments: dict[str, Any] = {}
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            arguments[name] = _build(inner, values, f"{prefix}{name}.")
        elif section := _named(inner):
            start = f"{prefix}{name}."
            labels = dict.fromkeys(n.removeprefix(start).partition(".")[0] for n in values if n.startswith(start))
            arguments[name] = {label: _build(section, values, f"{start}{label}.") for label in labels}
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return kind(**arguments)


# ---- the file


class _Loader(yaml.SafeLoader):
    """YAML with two traps removed: only true and false are booleans, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads off, on, yes and no as booleans, which would make `wandb: off` something else than "off".
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")


def _read_yaml(
    file: Path, problems: list[str], knob: str = "--config", expected: str = "sections such as `train:`"
) -> dict[Any, Any] | None:
    """The sections of a file as they stand there; None when it cannot be read."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        problems.append(f"{knob} = {file}: {error.strerror or error}; name an existing YAML file")
        return None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{knob} = {file}: not valid YAML: {' '.join(str(error).split())}")
        return None
    if not isinstance(content, dict | None):
        problems.append(f"{knob} = {file}: expected {expected}, found {type(content).__name__}")
        return None
    return content or {}


def _read_section(
    kind: type,
    content: dict[Any, Any],
    prefix: str,
    file: str,
    values: dict[str, Any],
    problems: list[str],
    root: type | None = None,
) -> None:
    """`root`: what this is a section of; None: it is no section."""
    hints = get_type_hints(kind)
    for key, value in content.items():
        name = f"{prefix}{key}"
        if key not in hints:
            problems.append(f"{file}: {_unknown(name, root or kind)}")
        elif dataclasses.is_dataclass(hints[key]):
            if isinstance(value, dict):
                _read_section(hints[key], value, f"{name}.", file, values, problems, root or kind)
            elif value is not None:  # a section whose every line is commented out reads as None
                problems.append(f"{file}: {name} = {value!r}: expected a section with settings of its own")
        elif section := _named(hints[key]):
            labelled = value if isinstance(value, dict) else {} if value is None else {"": value}
            for label, inner in labelled.items():
                if isinstance(inner, dict) and inner and re.fullmatch(r"\w+", str(label)):
                    _read_section(section, inner, f"{name}.{label}.", file, values, problems)
                else:
                    problems.append(
                        f"{file}: {name} = {value!r}: expected names (of letters, digits and _), each with settings"
                    )
        else:
            try:
                values[name] = _convert(hints[key], value)
            except _Mismatch:
                problems.append(f"{file}: {name} = {value!r}: expected {_describe(hints[key])}")


class _Mismatch(Exception):
    """A value is not of the type of its field."""


def _convert(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _convert(next(k for k in inner if k is not NoneType), value)
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(inner[0], element) for element in value)
    if origin is dict and isinstance(value, dict):
        return {_convert(inner[0], key): _convert(inner[1], element) for key, element in value.items()}
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 takes 1e-6 for a string: it wants 1.0e-6
        with contextlib.suppress(ValueError):
            return float(value)
    raise _Mismatch


def _describe(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"{_describe(next(k for k in inner if k is not NoneType))}, or nothing (null; None on the command line)"
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is tuple:
        return f"a list, each element {_describe(inner[0])}"
    if origin is dict:
        return "names with a number each" if inner[1] is float else "names with values"
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text (in quotes if it looks like a number, a date or true)",
    }[kind]


def _unknown(name: str, kind: type) -> str:
    """Says that there is no such setting, and which one was probably meant."""
    known = list(knobs(kind))
    sections = {n[:dot] for n in known for dot in (n.find("."), n.rfind(".")) if dot > 0}
    if name in sections:
        return f"{name}: a section; set what is in it, such as {next(n for n in known if n.startswith(name + '.'))}"
    last = name.rpartition(".")[2]
    by_last: dict[str, str] = {}
    for full in known:
        by_last.setdefault(full.rpartition(".")[2], full)
    near = [by_last[last]] if last in by_last else difflib.get_close_matches(name, [*known, *sections], 1)
    near = near or [by_last[word] for word in difflib.get_close_matches(last, list(by_last), 1)]
    return f"{name}: there is no such setting" + (
        f"; did you mean {near[0]}?" if near else "; --help lists all of them"
    )


# ---- the command line


def _split(argv: list[str], problems: list[str]) -> tuple[list[str], dict[str, list[str]], bool]:
    """(files of --config, setting -> its words, whether help is wanted); the last of a repeated setting wins."""
    groups: list[tuple[str, list[str]]] = []
    wants_help = False
    for word in argv:
        if word in ("-h", "--help"):
            wants_help = True
        elif word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if given else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            problems.append(f"command line: {word}: expected --config FILE or --section.setting VALUE")
    files = [word for name, words in groups if name == "config" for word in words]
    if any(name == "config" and len(words) != 1 for name, words in groups) or len(files) > 1:
        problems.append("--config: expected one YAML file")
        files = []
    return files, {name: words for name, words in groups if name != "config"}, wants_help


def _override(config: Settings, overrides: dict[str, list[str]], problems: list[str]) -> Settings:
    known = knobs(type(config))
    accepted: dict[str, list[str]] = {}
    for name, words in overrides.items():
        kind = known.get(_knob(name, known))
        if kind is not None:
            accepted[name] = _spell_booleans(words) if kind in (bool, bool | None) else words
        else:
            problems.append(f"command line: {_unknown(name, type(config))}")
    try:
        return _tyro([word for name in accepted for word in _words(name, accepted[name])], config)
    except SystemExit:  # tyro stops at the first mistake; one by one finds them all
        for name, words in accepted.items():
            try:
                _tyro(_words(name, words), config)
            except SystemExit:
                given = " ".join(overrides[name]) or "nothing"
                problems.append(f"command line: {name} = {given}: expected {_describe(known[_knob(name, known)])}")
        return config


def _words(name: str, words: list[str]) -> list[str]:
    # One word with "=" may begin with a dash.
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]


def _spell_booleans(words: list[str]) -> list[str]:
    """A bare `--train.recompute` says True, and YAML's true is as good as Python's True."""
    if not words:
        return ["True"]
    return [word.capitalize() if word.lower() in ("true", "false") else word for word in words]


def _tyro(argv: list[str], default: Settings, description: str = "") -> Settings:
    wants_help = argv == ["--help"]
    with contextlib.ExitStack() as quiet:
        if not wants_help:
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return tyro.cli(
            type(default),
            args=argv,
            default=default,
            description=description,
            use_underscores=True,
            # Every setting takes a value: --data.shuffle False, as it is written in the file.
            config=(tyro.conf.FlagConversionOff,),
            registry=_registry(),
        )


def _registry() -> tyro.constructors.ConstructorRegistry:
    """tyro would make one option of each default rule; a run's rules replace the default ones as a whole."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def weights(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type != dict[str, float]:
            return None

        def read(words: list[str]) -> dict[str, float]:
            if len(words) % 2:
                raise ValueError("expected names with a number each")
            return {name: float(weight) for name, weight in zip(words[::2], words[1::2], strict=True)}

        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="[STR FLOAT ...]",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
        )

    return registry
