"""Say of another program's setting what it is here, and what becomes of its value."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = Any
"""A setting's value as YAML reads it: whatever a user wrote."""


class Facts:
    """Hold what else a file of another program sets, which the meaning of a value may depend on."""

    def __init__(self, values: Mapping[str, Value]):
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, *names: str) -> Value:
        """Return the value of the first setting that is there; a name may be the end of a dotted one."""
        for name in names:
            for key, value in self._values.items():
                if value is not None and f".{key}".endswith(f".{name}"):
                    return value
        return None

    def number(self, *names: str) -> float | None:
        """Return the same where it is a number."""
        value = self.get(*names)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


Convert = Callable[[Value, Facts], Value]
"""(their value, what else they set) -> ours for each setting of the row, or setting -> value. None: nothing is set."""


def same(value: Value, facts: Facts) -> Value:
    """Return a value that means here what it means there."""
    return value


@dataclass(frozen=True)
class Row:
    """Hold one setting of another program."""

    name: str
    """As there; dotted where another one ends with the same word."""
    ours: tuple[str, ...] = ()
    """Empty: there is no such setting here."""
    note: str = ""
    """Says how its value changes, or, without such a setting here, what to do instead."""
    convert: Convert = same

    def settings(self, value: Value, facts: Facts) -> dict[str, Value]:
        """Return our settings for their value; empty where it alone does not say."""
        try:
            found = self.convert(value, facts)
        except (TypeError, ValueError, ZeroDivisionError):
            return {}
        if isinstance(found, dict) and found.keys() <= set(self.ours):
            return found
        return {} if found is None else dict.fromkeys(self.ours, found)


@dataclass(frozen=True)
class Program:
    """Hold the settings of another program."""

    name: str
    option: str
    """As tools/from_mindspeed.py --from takes it."""
    rows: tuple[Row, ...]
    sections: frozenset[str]
    """Words on the top level of its files which are none of ours."""
    enough: int = 1
    """So many of them tell that a file is its."""
    of_data: frozenset[str] = frozenset()
    """Words on the top level of its files which say of data alone: there `defaults` have no place."""
    defaults: Mapping[str, Value] = field(default_factory=dict)
    """Our setting -> what that program takes where it is not set, and that is not what we do."""

    def row(self, name: str) -> Row | None:
        """Return the row that names most of the end of a dotted name."""
        fitting = [row for row in self.rows if f".{name}".endswith(f".{row.name}")]
        return max(fitting, key=lambda row: len(row.name), default=None)


def named(values: Mapping[str, Value]) -> Convert:
    """Return the conversion of a value that has another name here."""

    def convert(value: Value, facts: Facts) -> Value:
        return values.get(value) if isinstance(value, str) else None

    return convert


def fixed(value: Value) -> Convert:
    """Return the conversion of whatever is given to one value."""
    return lambda _, __: value


def on(value: Value, otherwise: Value = None) -> Convert:
    """Return the conversion of a switch to a value where it is on."""
    return lambda given, _: value if given else otherwise


def positive(value: Value, facts: Facts) -> Value:
    """Return a number, or 0 for the -1 of those who mean none or all by it."""
    return max(0, value)


def parts_of(*names: str) -> Convert:
    """Return the conversion of a size to how many of it make the setting `names`."""

    def convert(value: Value, facts: Facts) -> Value:
        whole = facts.number(*names)
        return None if whole is None else max(1, round(whole / value))

    return convert


def unless(name: str) -> Convert:
    """Return the conversion of a value that counts only where another setting is not above 0."""
    return lambda value, facts: None if (facts.number(name) or 0) > 0 else value


def samples_to_tokens(prompt: str, response: str, *unless: str) -> Convert:
    """Return the conversion of samples to tokens; `unless`: switches and sizes that say tokens themselves."""

    def convert(value: Value, facts: Facts) -> Value:
        lengths = facts.number(prompt), facts.number(response)
        if None in lengths or all(map(facts.get, unless or ("",))):
            return None
        return int(value * sum(filter(None, lengths)))

    return convert


def list_of(text: Value, facts: Facts) -> list[int]:
    """Return the numbers of a list, or of a text with commas."""
    return [int(word) for word in text.split(",")] if isinstance(text, str) else list(text)


def said(program: str, row: Row, value: Value = None) -> str:
    """Return the answer to one who gave a name of another program, with or without its value."""
    there = f"{program}'s {row.name}"
    if not row.ours:
        return f"{there} has no counterpart here: {row.note}"
    values = row.settings(value, Facts({})) if value is not None else {}
    spelled = [f"{name} = {ours}" for name, ours in values.items()] or row.ours
    return f"{there} is here {' and '.join(spelled)}" + (f" ({row.note})" if row.note else "")


def rows(*lines: tuple[Value, ...]) -> tuple[Row, ...]:
    """Return rows from (names, our settings, note, conversion), both kinds of names as words with spaces."""
    return tuple(Row(name, tuple(ours.split()), *rest) for names, ours, *rest in lines for name in names.split())


def without(note: str, names: str) -> Iterable[Row]:
    """Return rows of settings that have no counterpart, for one reason."""
    return rows((names, "", note))
