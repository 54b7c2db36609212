"""Hold a row, and count those that cannot be used."""

from dataclasses import dataclass, field
from typing import Any, Literal

Row = dict[str, Any]

_EXAMPLES = 3


@dataclass
class BadRows:
    """Rows that cannot be used: the first one ends the reading, or all are left out and counted."""

    policy: Literal["drop", "refuse"]
    """data.bad_rows."""
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def met(self, what: str, rows: int = 1) -> None:
        """`what`: the file, row and column, and what is wrong there."""
        if self.policy == "refuse":
            raise ValueError(f"{what}; fix it, or set data.bad_rows to drop")
        self.count += rows
        if len(self.examples) < _EXAMPLES:
            self.examples.append(what)

    def note(self, source: str) -> list[str]:
        """Describe them in one line; empty for none."""
        if not self.count:
            return []
        more = "" if self.count <= len(self.examples) else "; ..."
        return [
            f"data.bad_rows = drop: {self.count} rows of {source} cannot be used and are left out: "
            f"{'; '.join(self.examples)}{more}"
        ]


@dataclass(frozen=True)
class Located:
    """A row and where it stands."""

    index: int
    """In the whole source, from 0; rows that cannot be read are counted too."""
    number: int
    """In its file, from 0."""
    file: str
    row: Row

    @property
    def place(self) -> str:
        return f"row {self.number} of {self.file}"
