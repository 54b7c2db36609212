"""Write docs/settings.md out of the settings themselves: python tools/make_settings_page.py

Every setting of training, evaluate and chat with its type, its default and what it does, as --help has them.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any, get_type_hints

from spmd_rl.config.config import Config
from spmd_rl.config.fields import NAME, Bounds, marks, named_section
from spmd_rl.config.serving import ChatConfig, EvaluateConfig
from spmd_rl.config.yaml_file import describe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """\
# Settings

Made by `tools/make_settings_page.py` out of the settings themselves. Each can stand in a YAML file, section by section,
and on the command line as `--section.key VALUE`, which wins; `python -m spmd_rl.grpo --help` says the same.
Relative paths are relative to the directory that the command is started in.
"""
PROGRAMS = (
    ("Training: `spmd_rl.grpo`, `spmd_rl.ppo`", Config, ""),
    ("Evaluating: `spmd_rl.evaluate`", EvaluateConfig, ""),
    ("Talking: `spmd_rl.chat`", ChatConfig, ""),
)


def said(kind: type) -> dict[str, str]:
    """Return what is written under each field of a class of settings, and of those it is made of."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body
        for field, text in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def default(field: dataclasses.Field) -> str:
    """Return the default of a field as a YAML file has it."""
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "needed"
    return f"`{json.dumps(value)}`"


def lines(kind: type, prefix: str) -> list[str]:
    """Return the rows of a section and of those inside it, each section under a heading of its own."""
    plain, marked, texts = get_type_hints(kind), get_type_hints(kind, include_extras=True), said(kind)
    rows, inner = [], []
    for field in dataclasses.fields(kind):
        hint = plain[field.name]
        if dataclasses.is_dataclass(hint):
            inner += ["", f"### {prefix}{field.name}", *lines(hint, f"{prefix}{field.name}.")]
        elif section := named_section(hint):
            inner += ["", f"### {prefix}{field.name}.{NAME}", *lines(section, f"{prefix}{field.name}.{NAME}.")]
        else:
            bounds = ", ".join(str(one) for one in marks(marked[field.name], Bounds) if str(one) != "-inf or more")
            kinds = describe(hint).replace(", or nothing (null; None on the command line)", " or null")
            kinds = kinds.replace(" (in quotes if it looks like a number, a date or true)", "")
            kinds += f": {bounds}" if bounds else ""
            text = texts.get(field.name, "").replace("|", "\\|").replace("<", "&lt;")
            rows.append(f"| `{prefix}{field.name}` | {kinds} | {default(field)} | {text} |")
    table = ["", "| setting | takes | default | |", "| --- | --- | --- | --- |", *rows] if rows else []
    return [*table, *inner]


def page() -> str:
    """Return the whole page."""
    parts = [f"## {title}\n" + "\n".join(lines(kind, prefix)) for title, kind, prefix in PROGRAMS]
    return HEAD + "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
