"""Write a file of another program anew, as one of ours."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from spmd_rl.config.config import Config
from spmd_rl.config.fields import knobs
from spmd_rl.config.foreign.foreign_row import Facts, Program, Value
from spmd_rl.config.foreign.lookup import PROGRAMS, foreign_program
from spmd_rl.config.yaml_file import read_yaml
from spmd_rl.errors import ConfigError, Problem, refuse

TEMPLATES = {"deepseek": "deepseek3_r1", "qwen": "qwen_r1"}
"""Part of a model's name -> the template that its reasoning recipes use."""


_REFERENCE = re.compile(r"\$\{(?:oc\.select:(?P<select>[\w.]+)(?:,\s*(?P<default>[^{}]*))?|(?P<name>[\w.]+))\}")
_REFERENCES = 9
"""So many of them may lead from one to the next."""


@dataclass
class Translation:
    """Hold our settings, and what there is to say of each."""

    program: Program
    values: dict[str, Value] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """Our setting -> what changed its meaning, or where it comes from."""
    left: list[tuple[str, Value, str]] = field(default_factory=list)
    """(their setting, its value, why it has no place here)"""
    ranks: int | None = None
    """Ranks that the file speaks of."""

    def take(self, name: str, value: Value, facts: Facts) -> None:
        """Add a setting of theirs."""
        row = self.program.row(name)
        if isinstance(value, str) and "${" in value:
            self.left.append((name, value, f"{' or '.join(row.ours) if row else 'a reference'}: write out what it is"))
            return
        if row is None:
            self.left.append((name, value, "not known"))
            return
        found = row.settings(value, facts) if row.ours else {}
        if not found:
            why = row.note if not row.ours else f"{' or '.join(row.ours)}: {row.note or 'its value has no counterpart'}"
            self.left.append((name, value, why))
        for setting, ours in found.items():
            if self.values.get(setting, ours) != ours:
                self.left.append((name, value, f"{setting} is set by {self.comments[setting]}"))
                continue
            self.values[setting] = ours
            self.comments[setting] = f"{name}: {value}" + (f" ({row.note})" if row.note else "")


def read_foreign(file: Path, program: Program | None = None) -> tuple[Program, dict[str, Value]]:
    """Return whose file it is and its dotted settings; ConfigError where it is nobody's that we know."""
    problems: list[Problem] = []
    content = read_yaml(file, problems, "FILE", "sections such as `rl_config:`")
    refuse(problems)
    known = program or foreign_program(content)
    if known is None:
        names = ", ".join(f"--from {one.option}" for one in PROGRAMS)
        raise ConfigError(Problem("FILE", file, "it is not clear whose file it is", f"say so: {names}"))
    return known, _resolved(dict(_dotted(content or {})))


def translate(
    program: Program, given: dict[str, Value], ranks: int | None = None, data: str | None = None
) -> Translation:
    """Return our settings for theirs. `ranks`: devices, where the file does not say; `data`: the source of prompts."""
    facts = Facts(given | {"ranks": ranks})
    done = Translation(program, ranks=ranks or _ranks(facts))
    for name, value in given.items():
        done.take(name, value, facts)
    of_data = program.of_data & given.keys()
    for setting, value in program.defaults.items():
        if not of_data and setting not in done.values:
            done.values[setting], done.comments[setting] = value, f"{program.name}'s default"
    _complete(done, data)
    return done


def _complete(done: Translation, data: str | None) -> None:
    """Add what a run needs and their file does not have, or has elsewhere."""
    if data:
        done.values["data.source"], done.comments["data.source"] = data, "as asked for"
    model = str(done.values.get("model.path", "")).lower()
    template = next((name for part, name in TEMPLATES.items() if part in model), None)
    if template and done.program.option == "mindspeed" and "data.template" not in done.values:
        done.values["data.template"] = template
        done.comments["data.template"] = "prompt_type of their preprocessing; name yours"
    if done.values.get("algorithm.advantage") != "gae":
        for setting in [name for name in done.values if name.startswith("critic.")]:
            del done.values[setting]  # verl's files have them in any case
    if done.values.get("algorithm.advantage") == "gae" and "rollout.max_response_length" in done.values:
        done.values.setdefault("algorithm.kl_coefficient", 0.0)
    if str(done.values.get("data.source", "")).startswith("configs/datasets/deepscaler"):
        done.values["data.empty_answers"], done.comments["data.empty_answers"] = "drop", "a few rows have none"
    lengths = [done.values.get(name) for name in ("data.max_prompt_length", "rollout.max_response_length")]
    budget = done.values.get("train.tokens_per_microbatch")
    if all(lengths) and budget and budget < sum(filter(None, lengths)):
        done.values["train.tokens_per_microbatch"] = sum(filter(None, lengths))
        done.comments["train.tokens_per_microbatch"] = "the longest sample must fit"


def _ranks(facts: Facts) -> int | None:
    nodes, devices = facts.number("nnodes"), facts.number("n_gpus_per_node")
    if nodes and devices:
        return int(nodes * devices)
    count = facts.number("actor_resource.num_npus", "num_npus")
    return int(count) if count else None


def _dotted(content: dict[Value, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", _number(value)


def _resolved(given: dict[str, Value]) -> dict[str, Value]:
    """Return settings with OmegaConf's references to each other replaced, and without those that ??? stands for."""
    found = {}
    for name, value in given.items():
        for _ in range(_REFERENCES):
            said = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if said is None:
                break
            value = given.get(said["select"] or said["name"], said["default"])
            value = yaml.safe_load(value) if isinstance(value, str) and value == said["default"] else value
        if value not in ("???", None):
            paths = value if isinstance(value, list) else [value]
            at_home = [str(Path(one).expanduser()) if str(one).startswith("~/") else one for one in paths]
            found[name] = at_home if isinstance(value, list) else _number(at_home[0])
    return found


def _number(value: Value) -> Value:
    """Return the number that YAML 1.1 takes for text, as 1e-6."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def text(done: Translation, file: Path) -> str:
    """Return our YAML file, with a comment at each line and what was left out at the end."""
    world = f" --world-size {done.ranks}" if done.ranks else ""
    critic = done.values.get("algorithm.advantage") == "gae"
    lines = [
        f"# Written from {file.name}, a file of {done.program.name}. Behind a setting: where it comes from.",
        f"#   python -m spmd_rl.plan --config THIS{world}",
        f"#   bash launch/torchrun.sh -m spmd_rl.{'ppo' if critic else 'grpo'} --config THIS",
        "",
    ]
    order = list(knobs(Config))
    for section in (section.name for section in dataclasses.fields(Config)):
        inside = sorted((name for name in done.values if name.startswith(f"{section}.")), key=order.index)
        if inside:
            lines.append(f"{section}:")
        for name in inside:
            lines.append(f"  {name.partition('.')[2]}: {_spelled(done.values[name])}  # {done.comments.get(name, '')}")
    lines += ["", "# Left out:"] * bool(done.left)
    lines += [f"#   {name}: {_spelled(value)}: {why}" for name, value, why in done.left]
    return "\n".join(lines) + "\n"


def _spelled(value: Value) -> str:
    """Return a value on one line, as YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
