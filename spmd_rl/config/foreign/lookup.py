"""Answer who gives a setting or a file of another program."""

from collections.abc import Iterable

from spmd_rl.config.foreign.foreign_row import Program, Row, Value, said
from spmd_rl.config.foreign.mindspeed_names import MINDSPEED
from spmd_rl.config.foreign.trl_names import TRL
from spmd_rl.config.foreign.verl_names import VERL

PROGRAMS = (MINDSPEED, VERL, TRL)
SHORT = {"tp": "parallel.tensor", "pp": "parallel.pipeline", "cp": "parallel.context", "ep": "parallel.expert"}
SHORT |= {"etp": "parallel.expert_tensor", "vpp": "parallel.virtual", "batch_size": "train.prompts_per_step"}
"""What everybody calls them, and no program in its files."""
LAUNCHERS = {"accelerate": {"compute_environment", "distributed_type"}, "DeepSpeed": {"zero_optimization"}}
"""Programs that start ranks or share a model among them -> a word on the top level of their files."""


def foreign_answer(name: str, value: Value, known: Iterable[str]) -> str | None:
    """Return what a setting of another program is here; None: no other one that we know has it.

    `known`: the settings of the program at hand, which may have ours in another section, or not at all.
    """
    here = {full.rpartition(".")[2]: full for full in known} | {full: full for full in known}
    found: dict[Row, list[str]] = {}
    for program in PROGRAMS:
        row = program.row(name)
        if row is None or row.name in here:  # a word that we have too
            continue
        found.setdefault(row, []).append(program.name)
    if not found:
        short = SHORT.get(name.rpartition(".")[2])
        return f"write {short}" if short in here.values() else None
    row, names = max(found.items(), key=lambda item: (bool(item[0].ours), len(item[1])))
    ours = tuple(here.get(setting) or here.get(setting.rpartition(".")[2], "") for setting in row.ours)
    if not all(ours):
        return None
    return said(names[0], Row(row.name, ours, row.note, _in_place(row, ours)), value)


def foreign_program(content: Value) -> Program | None:
    """Return the program that a file's content is for, where that is not this one."""
    if not isinstance(content, dict):
        return None
    return next((one for one in PROGRAMS if len((one.sections | one.of_data) & content.keys()) >= one.enough), None)


def foreign_launcher(content: Value) -> str | None:
    """Return the program that starts ranks which a file's content is for."""
    words = content.keys() if isinstance(content, dict) else ()
    return next((name for name, known in LAUNCHERS.items() if known & set(words)), None)


def _in_place(row: Row, ours: tuple[str, ...]) -> Value:
    """Return the row's conversion with our settings under the names that they have in the program at hand."""
    places = dict(zip(row.ours, ours, strict=True))
    return lambda value, facts: {places[setting]: one for setting, one in row.settings(value, facts).items()}
