"""Names that a user's files and scripts hold on to: settings, metrics, the files of a run. They stay.

`python -m promised` in tests/, with the source on PYTHONPATH, writes settings.txt anew; the others are kept by hand.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, get_type_hints

HERE = Path(__file__).parent


def promised(name: str) -> list[str]:
    """Return the lines of one of the lists."""
    return (HERE / f"{name}.txt").read_text().splitlines()


def documented(*whose: str) -> set[str]:
    """Return the metrics that MindSpeed-RL's and MindSpeed-MM's pages name, as spelled there: those of both loops, and
    of `whose` (grpo, ppo; reference, reward_model, pictures: of a run that has one)."""
    lines = (line.split() for line in promised("mindspeed"))
    return {name for kind, name in lines if kind in ("both", *whose)}


def settings(kind: type, prefix: str = "") -> list[str]:
    """Return a line for each setting of a section: name, and default where it has one."""
    from spmd_rl.config.fields import NAME, named_section

    found = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner: Any = hints[field.name]
        if dataclasses.is_dataclass(inner):
            found += settings(inner, f"{prefix}{field.name}.")
        elif section := named_section(inner):
            found += settings(section, f"{prefix}{field.name}.{NAME}.")
        else:
            default = field.default_factory() if callable(field.default_factory) else field.default
            found.append(f"{prefix}{field.name}" + ("" if default is dataclasses.MISSING else f" = {default!r}"))
    return found


def all_settings() -> list[str]:
    """Return the settings of every command, by command."""
    from spmd_rl.config.config import Config
    from spmd_rl.config.serving import ChatConfig, EvaluateConfig

    commands = {"grpo": Config, "evaluate": EvaluateConfig, "chat": ChatConfig}
    return [f"{command} {line}" for command, config in commands.items() for line in settings(config)]


def metric_patterns() -> list[str]:
    """Return a regular expression for each metric on docs/metrics.md: {a,b} stands for either, <x> for any word."""
    page = (HERE.parents[1] / "docs" / "metrics.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    found = []
    for name in (name for cell in cells for name in re.findall(r"`([^`]+)`", cell)):
        parts = re.split(r"(\{[\w,<>]+\})", name)
        choices = [part[1:-1].split(",") if part.startswith("{") else [part] for part in parts]
        found += [re.sub(r"<\w+>", "[^/]+", "".join(one)) for one in itertools.product(*choices)]
    return found
