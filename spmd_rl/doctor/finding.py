"""Findings of checks, as a person and a program read them."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    check: str
    found: str
    verdict: Literal["ok", "warn", "stop", "skip"]
    """stop: a run would fail. warn: it would be slow, or fail later. skip: could not be looked at, `found` says why."""
    fix: str = ""
    where: str = ""
    """The node or ranks it is about; empty: this machine."""


def at(where: str, findings: Iterable[Finding]) -> list[Finding]:
    """The same findings, said to be about one place."""
    return [replace(finding, where=finding.where or where) for finding in findings]


def status(findings: Iterable[Finding]) -> int:
    """Exit status: 1 where something would stop a run."""
    return int(any(finding.verdict == "stop" for finding in findings))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings of several nodes that differ in nothing else into one row."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=_places(names)) for finding, names in places.items()]


def _places(names: list[str]) -> str:
    nodes = [name.removeprefix("node ") for name in names if name.startswith("node ")]
    if len(nodes) == len(names) > 1:
        return f"{len(nodes)} nodes" if len(nodes) > 8 else "nodes " + ", ".join(nodes)
    return ", ".join(dict.fromkeys(name for name in names if name))


def table(findings: Iterable[Finding]) -> str:
    """For a person: what, found, verdict; under a row that is off, how to fix it."""
    rows = merged(findings)
    check = max([len("check"), *(len(row.check) for row in rows)]) + 2
    where = max(len(row.where) for row in rows) + 2 if any(row.where for row in rows) else 0
    indent = 6 + check + where
    lines = [f"{'':<6}{'check':<{check}}{'where' if where else '':<{where}}found"]
    for row in rows:
        lines += _wrapped(f"{row.verdict:<6}{row.check:<{check}}{row.where:<{where}}", row.found, indent)
        if row.fix and row.verdict in ("warn", "stop"):
            lines += _wrapped(" " * indent, f"-> {row.fix}", indent + 3)
    stops = sum(row.verdict == "stop" for row in rows)
    warns = sum(row.verdict == "warn" for row in rows)
    word = "nothing would stop a run" if not stops else f"{stops} would stop a run"
    return "\n".join([*lines, "", f"{word}; {warns} to look at" if warns else word])


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False)


def as_json(findings: Iterable[Finding]) -> str:
    """The same for a program, every node's rows for themselves."""
    rows = list(findings)
    return json.dumps({"status": status(rows), "findings": [asdict(row) for row in rows]}, indent=2)


def from_plain(rows: list[dict[str, str]]) -> list[Finding]:
    """Findings that another node sent."""
    return [Finding(**row) for row in rows]  # type: ignore[arg-type]
