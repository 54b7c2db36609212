"""Write the glossary of docs/mindspeed.md: python tools/make_mindspeed_page.py

It is the table from which the command line answers to names of MindSpeed-RL, and from_mindspeed translates files.
"""

from pathlib import Path

from spmd_rl.config.foreign.foreign_row import same
from spmd_rl.config.foreign.mindspeed_names import MINDSPEED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mindspeed.md"
BEGIN, END = "<!-- glossary: tools/make_mindspeed_page.py -->\n", "<!-- end of glossary -->\n"


def glossary() -> str:
    """Return every name of MindSpeed-RL with ours, then those without a counterpart by the reason."""
    lines = ["| MindSpeed-RL | here | what becomes of its value |", "| --- | --- | --- |"]
    reasons: dict[str, list[str]] = {}
    for row in MINDSPEED.rows:
        if row.ours:
            ours = ", ".join(f"`{name}`" for name in row.ours)
            value = row.note or ("the same" if row.convert is same else "translated")
            lines.append(f"| `{row.name}` | {ours} | {value} |")
        else:
            reasons.setdefault(row.note, []).append(row.name)
    lines += ["", "| needless or absent here | because |", "| --- | --- |"]
    for why, names in reasons.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {why} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with its glossary made anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + glossary() + "\n" + END + rest.partition(END)[2]


def write() -> None:
    """Make the page anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    write()
