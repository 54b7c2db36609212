"""Read a YAML file of settings, strictly: every mistake is a problem of its own."""

import contextlib
import dataclasses
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from spmd_rl.config.fields import knobs, named_section
from spmd_rl.config.foreign.lookup import foreign_answer
from spmd_rl.errors import Problem, nearest


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


def read_yaml(
    file: Path, problems: list[Problem], knob: str = "--config", expected: str = "sections such as `train:`"
) -> dict[Any, Any] | None:
    """Return the sections of a file as they stand there; None when it cannot be read."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        problems.append(Problem(knob, file, error.strerror or str(error), "name an existing YAML file"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(Problem(knob, file, f"not valid YAML: {' '.join(str(error).split())}", "fix it"))
    else:
        if isinstance(content, dict | None):
            return content or {}
        problems.append(Problem(knob, file, "", f"expected {expected}, found {type(content).__name__}"))
    return None


def read_words(words: list[str]) -> Any:
    """Return the value that words of a command line would be in a file."""
    with contextlib.suppress(yaml.YAMLError):
        values = [yaml.load(word, _Loader) for word in words]
        return values[0] if len(values) == 1 else values or True
    return None


class _Mismatch(Exception):
    """A value is not of the type of its field."""


class SectionReader:
    """Turn the content of a file into dotted name -> value, and collect what is wrong with it."""

    def __init__(self, kind: type, where: str, problems: list[Problem]):
        self.kind, self.where, self.problems = kind, where, problems
        self.values: dict[str, Any] = {}

    def read(self, content: dict[Any, Any], kind: type | None = None, prefix: str = "") -> dict[str, Any]:
        """Read the settings of a section; `kind`: of which class it is, self.kind without a prefix."""
        hints = get_type_hints(kind or self.kind)
        for key, value in content.items():
            name = f"{prefix}{key}"
            if key not in hints:
                self.problems.append(unknown(name, self.kind, self.where, value))
            elif dataclasses.is_dataclass(hints[key]):
                if isinstance(value, dict):
                    self.read(value, hints[key], f"{name}.")
                elif value is not None:  # a section whose every line is commented out reads as None
                    self._expected(name, value, "a section with settings of its own")
            elif section := named_section(hints[key]):
                self._read_named(section, name, value)
            else:
                try:
                    self.values[name] = _convert(hints[key], value)
                except _Mismatch:
                    self._expected(name, value, describe(hints[key]))
        return self.values

    def _read_named(self, section: type, name: str, value: Any) -> None:
        labelled = value if isinstance(value, dict) else {} if value is None else {"": value}
        for label, inner in labelled.items():
            if isinstance(inner, dict) and inner and re.fullmatch(r"\w+", str(label)):
                self.read(inner, section, f"{name}.{label}.")
            else:
                self._expected(name, value, "names (of letters, digits and _), each with settings")

    def _expected(self, name: str, value: Any, what: str) -> None:
        self.problems.append(Problem(name, repr(value), "", f"expected {what}", self.where))


def _convert(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _convert(next(k for k in inner if k is not NoneType), value)
    if origin is Literal and isinstance(value, str | bool) and str(value) in inner:
        return str(value)
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


def describe(kind: Any) -> str:
    """Say what values a type takes."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"{describe(next(k for k in inner if k is not NoneType))}, or nothing (null; None on the command line)"
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is tuple:
        return f"a list, each element {describe(inner[0])}"
    if origin is dict:
        return "names with a number each" if inner[1] is float else "names with values"
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text (in quotes if it looks like a number, a date or true)",
    }[kind]


def unknown(name: str, kind: type, where: str, value: Any = None) -> Problem:
    """Return the problem that there is no such setting, with the one that was probably meant.

    `value`: as it was given; what another program means by it is said where its name is known.
    """
    known = list(knobs(kind))
    sections = {n[:dot] for n in known for dot in (n.find("."), n.rfind(".")) if dot > 0}
    if name in sections:
        example = next(n for n in known if n.startswith(f"{name}."))
        return Problem(name, None, "a section", f"set what is in it, such as {example}", where)
    if answer := foreign_answer(name, value, known):
        return Problem(name, None, "there is no such setting", answer, where)
    last = name.rpartition(".")[2]
    if name.startswith("critic.") and (both := {f"train.{last}", f"parallel.{last}"}.intersection(known)):
        way = f"did you mean {both.pop()}? The critic has the policy's layout, micro-batches and number of updates"
        return Problem(name, None, "there is no such setting", way, where)
    by_last: dict[str, str] = {}
    for full in known:
        by_last.setdefault(full.rpartition(".")[2], full)
    near = by_last.get(last) or nearest(name, [*known, *sections]) or by_last.get(nearest(last, by_last) or "")
    way = f"did you mean {near}?" if near else "--help lists all of them"
    return Problem(name, None, "there is no such setting", way, where)
