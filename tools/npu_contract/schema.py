"""Schemas of operators as TorchScript writes them, and whether a call fits one."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One of an operator's."""

    name: str
    required: bool
    keyword_only: bool


@dataclass(frozen=True)
class Schema:
    """One overload of an operator."""

    text: str
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def base(self) -> str:
        """The name without its overload."""
        return self.name.partition(".")[0]

    @classmethod
    def parse(cls, text: str) -> "Schema | None":
        """Read one; None for what is none."""
        name, _, rest = text.partition("(")
        depth, end = 1, 0
        for end, letter in enumerate(rest):  # noqa: B007
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                break
        parameters, keyword_only = [], False
        for part in _parts(rest[:end]):
            if part == "*":
                keyword_only = True
                continue
            said = re.match(r".+?\s+([A-Za-z_]\w*)(\s*=.+)?$", part)
            if said is None:
                return None
            parameters.append(Parameter(said[1], said[2] is None, keyword_only))
        return cls(text, name, tuple(parameters))

    def misfit(self, positional: int, keywords: set[str]) -> str:
        """Return why a call does not fit; "" where it does."""
        open_to_all = [one for one in self.parameters if not one.keyword_only]
        if positional > len(open_to_all):
            return f"{positional} positional arguments, it takes {len(open_to_all)}"
        given = {one.name for one in open_to_all[:positional]}
        if unknown := keywords - {one.name for one in self.parameters}:
            return f"no parameter {', '.join(sorted(unknown))}"
        if twice := keywords & given:
            return f"given twice: {', '.join(sorted(twice))}"
        missing = [one.name for one in self.parameters if one.required and one.name not in given | keywords]
        return f"missing {', '.join(missing)}" if missing else ""


def _parts(text: str) -> list[str]:
    """Part parameters at commas that are in no brackets and no quotes."""
    found, depth, quote, current = [], 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0 and not quote:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [*found, current.strip()] if current.strip() else found
